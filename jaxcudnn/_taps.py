# SPDX-License-Identifier: Apache-2.0
"""Convolutions where XLA has none for GPUs: a sum of matrix products, one for each tap.

XLA:GPU refuses integers, and ends the process for more than three spatial dimensions or for none.
With the names of `_readings`, and lhs already spread out and padded so that its position is
s p + d r: the product of tap r is a matrix product, over input channels, of the positions d r,
d r + s, ... of lhs with the filter's tap r. Where the output has fewer positions than the window,
as filter gradients have, it is one product for each of them instead: of the window there with the
whole filter. Products come one after another, in a loop, since all at once would need the memory of
as many outputs.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.export import is_symbolic_dim

from ._dtypes import is_integer
from ._spec import extent

MOST_SPATIAL = 3
"""The most spatial dimensions that XLA convolves over on a GPU, and cuDNN; both need one."""


def is_needless(num_spatial: int, result: str) -> bool:
    """Say whether XLA has a convolution for GPUs of so many dimensions and for such a result."""
    return 1 <= num_spatial <= MOST_SPATIAL and not is_integer(result) and result != "bool"


def convolve(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    *,
    dimension_numbers: lax.ConvDimensionNumbers,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: str,
) -> jax.Array:
    """Compute what `lax.conv_general_dilated` computes."""
    ones = (1,) * len(window_strides)
    lhs_dilation, rhs_dilation = lhs_dilation or ones, rhs_dilation or ones
    x = lhs.transpose(dimension_numbers.lhs_spec)
    w = rhs.transpose(dimension_numbers.rhs_spec)
    widths = [(low, high, b - 1) for (low, high), b in zip(padding, lhs_dilation, strict=True)]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *widths])
    out = [
        (size - extent(window, d)) // s + 1
        for size, window, d, s in zip(
            x.shape[2:], w.shape[2:], rhs_dilation, window_strides, strict=True
        )
    ]

    def multiply(subscripts: str, seen: jax.Array, taps: jax.Array) -> jax.Array:
        # Without the barrier XLA:GPU fuses slices into its matrix products, and ended the process
        # over some (jax 0.11).
        return jnp.einsum(
            subscripts,
            *lax.optimization_barrier((seen, taps)),
            precision=precision,
            preferred_element_type=preferred_element_type,
        )

    # Groups first: those of channels, or those of images, of which the other is 1.
    images, group = x.shape[0] // batch_group_count, (batch_group_count, feature_group_count)
    window = w.shape[2:]
    # Symbolic sizes of an output are more than a window's, as far as is known.
    if not any(map(is_symbolic_dim, out)) and math.prod(out) < math.prod(window):
        filters = w.reshape(*group, -1, math.prod(w.shape[1:]))
        starts = _multiples(out, window_strides)

        def part(position: jax.Array) -> jax.Array:
            seen = _strided(x, starts[position], rhs_dilation, window)
            seen = seen.reshape(batch_group_count, images, feature_group_count, filters.shape[-1])
            return multiply("bnfc,bfoc->nbfo", seen, filters)

        total = jnp.moveaxis(lax.map(part, jnp.arange(math.prod(out))), 0, -1)
    else:
        taps = w.reshape(*group, -1, w.shape[1], math.prod(window))
        starts = _multiples(window, rhs_dilation)

        def product(tap: jax.Array | int) -> jax.Array:
            seen = _strided(x, starts[tap], window_strides, out)
            seen = seen.reshape(batch_group_count, images, feature_group_count, -1, *out)
            return multiply("bnfc...,bfoc->nbfo...", seen, taps[..., tap])

        total = lax.fori_loop(
            1, math.prod(window), lambda tap, total: total + product(tap), product(0)
        )
    return total.reshape(images, w.shape[0], *out).transpose(np.argsort(dimension_numbers.out_spec))


def _multiples(sizes: Sequence[int], steps: Sequence[int]) -> jax.Array:
    """Give every place of a box of these sizes, in order, times the steps between places."""
    places = np.indices(sizes).reshape(len(sizes), math.prod(sizes)).T
    return jnp.asarray(places * np.asarray(steps, int), "int32")


def _strided(
    x: jax.Array, starts: jax.Array, steps: Sequence[int], sizes: Sequence[int]
) -> jax.Array:
    """Take so many positions of each spatial dimension, from a start and at a distance."""
    spans = [b * (n - 1) + 1 for b, n in zip(steps, sizes, strict=True)]
    zero = jnp.zeros((), starts.dtype)
    near = lax.dynamic_slice(x, (zero, zero, *starts), (*x.shape[:2], *spans))
    return lax.slice(near, (0,) * x.ndim, near.shape, (1, 1, *steps))
