# SPDX-License-Identifier: Apache-2.0
"""Depthwise convolutions as sums of shifted products, for which XLA makes one loop.

Each channel is by itself. In one dimension, with stride s, dilation d and R taps,

    y[p]  = sum over r of  x[s p + d r - lo] w[r]
    dw[r] = sum over n, p of  x[s p + d r - lo] dy[p]
    dx[i] = sum over r' of  u[i + d r' - lo'] w[R - 1 - r'],     lo' = d (R - 1) - lo

where u is dy spread out by s with zeros between, so that  u[s p] = dy[p]  (`_reference` derives
it). So y and dx are sums of R arrays, each of them a shifted operand times a number for each
channel, in float32; that is one loop over the result, whose reads come from the caches after the
first. dw is one reduction, over an array that has R products for each element of dy and is never in
memory: as R reductions, XLA reads the operands anew for each two of them.
"""

import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ._route_geometry import (
    Convolve,
    channels_last,
    dimensions,
    dtypes,
    padded,
    rounded,
    users_order,
)
from ._spec import ROLES, ConvSpec, Layout, Shape

MOST_TAPS = 8
"""With which it is a loop of a few operations for each element that is read."""


def is_possible(op: str, spec: ConvSpec) -> bool:
    """Say whether each output channel has an input channel of its own."""
    return spec.is_depthwise


def is_faster(op: str, spec: ConvSpec) -> bool:
    """Say whether that is faster: it is in one dimension, where cuDNN has no kernel of its own."""
    return spec.num_spatial == 1 and spec.strides == (1,) and 2 <= spec.w_shape[2] <= MOST_TAPS


def compute(
    a: jax.Array, b: jax.Array, *, op: str, spec: ConvSpec, layout: Layout, convolve: Convolve
) -> jax.Array:
    """Compute a primitive; `convolve` is not needed."""
    first, second, result = ROLES[op]
    _, summed = dtypes(op, spec)
    a, b = (channels_last(array, role, spec, layout) for array, role in ((a, first), (b, second)))
    given = dimensions(spec)
    if op == "dgrad":
        lows = [each.dilation * (each.window - 1) - each.low for each in given]
        steps, spread, out = (1,) * len(given), spec.strides, spec.x_shape[2:]
    else:
        lows = [each.low for each in given]
        steps, spread, out = spec.strides, (1,) * len(given), spec.y_shape[2:]
    spans = [
        step * (count - 1) + each.dilation * (each.window - 1) + 1
        for step, count, each in zip(steps, out, given, strict=True)
    ]
    sizes = [step * (size - 1) + 1 for step, size in zip(spread, a.shape[1:-1], strict=True)]
    pads = [(low, span - low - size) for low, span, size in zip(lows, spans, sizes, strict=True)]
    shifted = list(_shifted(padded(a, pads, spread), spec, steps, out))
    if op == "wgrad":
        stacked = jnp.stack(shifted, axis=-2).astype(summed)
        products = stacked * b.astype(summed)[..., None, :]
        sums = products.sum(range(b.ndim - 1))  # (taps, C)
        sums = sums.T.reshape(spec.w_shape[0], *spec.w_shape[2:], 1)
    else:
        taps = b.reshape(b.shape[0], -1).astype(summed)  # (C, taps)
        if op == "dgrad":
            taps = lax.rev(taps, (1,))
        products = (
            each.astype(summed) * lax.expand_dims(taps[:, tap], range(each.ndim - 1))
            for tap, each in enumerate(shifted)
        )
        sums = next(products)
        for product in products:
            sums = sums + product
    return users_order(rounded(sums, op, spec), result, spec, layout)


def _shifted(
    array: jax.Array, spec: ConvSpec, steps: Sequence[int], out: Shape
) -> Iterator[jax.Array]:
    """Give for each tap the elements that it meets, `out` positions at a distance of `steps`."""
    starts = ([each.dilation * tap for tap in range(each.window)] for each in dimensions(spec))
    n, *_, c = array.shape
    for start in itertools.product(*starts):
        stops = (
            first + step * (count - 1) + 1
            for first, step, count in zip(start, steps, out, strict=True)
        )
        yield lax.slice(array, (0, *start, 0), (n, *stops, c), (1, *steps, 1))
