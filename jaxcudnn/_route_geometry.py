# SPDX-License-Identifier: Apache-2.0
"""What routes have in common: a convolution by dimensions, arrays with channels last, dtypes.

Arrays within a route are (N, *positions, C) for x and y, and (K, *window, C / groups) for w, with
the window in the order in which it slides without `flip`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._dtypes import accumulator, allows_tf32, computed_in, multiplied_in
from ._spec import ROLES, ConvSpec, Layout, Role

Convolve = Callable[..., jax.Array]
"""Computes a primitive: `convolve(a, b, op=..., spec=..., layout=...)`."""


class Dimension(NamedTuple):
    """One spatial dimension: outputs p and taps r meet at inputs  stride p + dilation r - low."""

    size: int
    window: int
    out: int
    stride: int
    dilation: int
    low: int

    @property
    def span(self) -> int:
        """How many positions all windows together span, padding included."""
        return self.stride * (self.out - 1) + self.dilation * (self.window - 1) + 1


def dimensions(spec: ConvSpec) -> list[Dimension]:
    """Give the spatial dimensions of a convolution."""
    lows = (low for low, _ in spec.padding)
    numbers = (spec.x_shape[2:], spec.w_shape[2:], spec.y_shape[2:], spec.strides, spec.dilation)
    return [Dimension(*each) for each in zip(*numbers, lows, strict=True)]


def channels_last(array: jax.Array, role: Role, spec: ConvSpec, layout: Layout) -> jax.Array:
    """Bring a user's array into the order of routes."""
    array = array.transpose(layout.memory_order(role))
    return _unflipped(array, role, spec)


def users_order(array: jax.Array, role: Role, spec: ConvSpec, layout: Layout) -> jax.Array:
    """Undo `channels_last`."""
    array = _unflipped(array, role, spec)
    return array.transpose(np.argsort(layout.memory_order(role)))


def _unflipped(array: jax.Array, role: Role, spec: ConvSpec) -> jax.Array:
    is_reversed = role == "w" and spec.flip
    return lax.rev(array, range(1, array.ndim - 1)) if is_reversed else array


def last(num_spatial: int) -> Layout:
    """Give the layout of arrays in the order of routes."""
    axes = (0, num_spatial + 1, *range(1, num_spatial + 1))
    return Layout(axes, axes, axes)


def padded(
    array: jax.Array, pads: Sequence[tuple[int, int]], spread: Sequence[int] | None = None
) -> jax.Array:
    """Put zeros around the positions of x or y, or crop them where a number is negative.

    Args:
        array: x or y.
        pads: low and high for each spatial dimension.
        spread: the distance to which positions are moved apart before, 1 unless given.
    """
    inner = [step - 1 for step in spread or [1] * len(pads)]
    widths = [(low, high, more) for (low, high), more in zip(pads, inner, strict=True)]
    return lax.pad(array, jnp.zeros((), array.dtype), [(0, 0, 0), *widths, (0, 0, 0)])


def rounded(sums: jax.Array, op: str, spec: ConvSpec) -> jax.Array:
    """Round sums to the dtype of the result."""
    return lax.convert_element_type(sums, spec.dtype(ROLES[op][2]))


def dtypes(op: str, spec: ConvSpec) -> tuple[str, str]:
    """Give the dtype in which operands are multiplied, and that in which products are summed."""
    given = [spec.dtype(role) for role in ROLES[op]]
    multiplied, summed = multiplied_in(*given), accumulator(*given)
    # Eight bits are exact in 16, too.
    return computed_in(*given) or summed if multiplied == summed else multiplied, summed


def precision(op: str, spec: ConvSpec) -> lax.Precision:
    """Give the precision of a product of float32 matrices: whether TF32 is allowed, as in cuDNN."""
    first, second, _ = (spec.dtype(role) for role in ROLES[op])
    tf32 = spec.options.allow_tf32 and allows_tf32(first, second, spec.precision)
    return lax.Precision.DEFAULT if tf32 else lax.Precision.HIGHEST


def aligned_channels(op: str, spec: ConvSpec) -> int:
    """Give the number of channels of which cuDNN's fast plans want a multiple: 16 bytes."""
    return max(1, 16 // jnp.dtype(dtypes(op, spec)[0]).itemsize)
