# SPDX-License-Identifier: Apache-2.0
"""Depthwise convolutions with large windows by fast Fourier transforms, in float32.

With stride 1, where outputs p and taps r meet at  p + d r - lo, x padded by lo and cut to the span
of all windows, F' = P + d (R - 1) positions, is periodic for all that anyone sees: no  p + d r
reaches F'. So over any period F >= F', with ^ for the discrete transform and w spread out by d,

    y^ = x^ conj(w^),     dw^ = sum over n of  x^ conj(dy^),

of which the first P numbers of y are used, and every d-th of dw. dx is computed as the forward
convolution that it is (`_route_reversed`).

It is not exact: the error of each number is some ulps of the largest in its channel, whereas the
definition's is some ulps of the products that are summed there; and one number that is not finite
makes all of its channel so. So nobody gets it who has not named it.
"""

import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax

from . import _route_reversed
from ._memory import LARGE_WINDOW
from ._route_geometry import (
    Convolve,
    channels_last,
    dimensions,
    padded,
    rounded,
    users_order,
)
from ._spec import ROLES, ConvSpec, Layout

_FACTORS = (2, 3, 5, 7)  # of lengths whose transforms are fast


def is_possible(op: str, spec: ConvSpec) -> bool:
    """Say whether it is depthwise, of stride 1, and float32 is what sums are kept in."""
    return (
        spec.is_depthwise
        and set(spec.strides) == {1}
        and "float64" not in spec.dtypes
        and _route_reversed.has_fprop(op, spec)
    )


def is_faster(op: str, spec: ConvSpec) -> bool:
    """Say whether the window is large: transforms cost what some tens of taps do."""
    return math.prod(spec.w_shape[2:]) >= LARGE_WINDOW


@_route_reversed.by_fprop
def compute(
    a: jax.Array, b: jax.Array, *, op: str, spec: ConvSpec, layout: Layout, convolve: Convolve
) -> jax.Array:
    """Compute a primitive; `convolve` is not needed."""
    first, second, result = ROLES[op]
    given = dimensions(spec)
    pads = [(each.low, each.span - each.low - each.size) for each in given]
    dilation = [each.dilation for each in given]
    periods = [_period(each.span) for each in given]

    def transformed(array: jax.Array, role: str) -> jax.Array:
        """Bring an array to (N or 1, C, frequencies)."""
        array = channels_last(array, role, spec, layout).astype(jnp.float32)
        if role == "x":
            array = padded(array, pads)
        elif role == "w":
            array = jnp.moveaxis(padded(array, [(0, 0)] * len(given), dilation), 0, -1)
            array = array.reshape(1, *array.shape[:-2], -1)
        return jnp.fft.rfftn(jnp.moveaxis(array, -1, 1), periods, range(2, 2 + len(given)))

    x, other = transformed(a, first), transformed(b, second)
    product = x * jnp.conj(other)
    if op == "wgrad":
        product = product.sum(0, keepdims=True)
    sums = jnp.fft.irfftn(product, periods, range(2, 2 + len(given)))
    steps = dilation if op == "wgrad" else [1] * len(given)
    counts = [each.window if op == "wgrad" else each.out for each in given]
    stops = (step * (count - 1) + 1 for step, count in zip(steps, counts, strict=True))
    sums = lax.slice(sums, (0,) * sums.ndim, (*sums.shape[:2], *stops), (1, 1, *steps))
    sums = jnp.moveaxis(sums, 1, 0 if op == "wgrad" else -1)
    if op == "wgrad":  # (C, 1, window)
        sums = jnp.moveaxis(sums, 1, -1)
    return users_order(rounded(sums, op, spec), result, spec, layout)


def _period(least: int) -> int:
    """Give the smallest length of at least so many that has small factors alone."""
    return next(length for length in itertools.count(least) if _rest(length) == 1)


def _rest(length: int) -> int:
    for factor in _FACTORS:
        while length % factor == 0:
            length //= factor
    return length
