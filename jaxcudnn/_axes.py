# SPDX-License-Identifier: Apache-2.0
"""Folding one dimension of an array into another and out again, and changing its length."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax


def fold(array: jax.Array, source: int, axis: int, outer: int = 1) -> jax.Array:
    """Merge dimension `source`, of size b, into `axis`: outer * inner becomes outer * (b * inner).

    `axis` counts without `source`.
    """
    array = jnp.moveaxis(array, source, 0)
    b, *shape = array.shape
    inner = shape[axis] // outer
    array = array.reshape(b, *shape[:axis], outer, inner, *shape[axis + 1 :])
    array = jnp.moveaxis(array, 0, axis + 1)
    return array.reshape(*shape[:axis], outer * b * inner, *shape[axis + 1 :])


def unfold(array: jax.Array, axis: int, b: int, outer: int = 1) -> jax.Array:
    """Undo `fold`: the dimension of size b comes to stand just before what is left of `axis`."""
    before, size, after = array.shape[:axis], array.shape[axis], array.shape[axis + 1 :]
    inner = size // (outer * b)
    array = array.reshape(*before, outer, b, inner, *after)
    array = jnp.moveaxis(array, axis + 1, axis)
    return array.reshape(*before, b, outer * inner, *after)


def shortened(array: jax.Array, ends: Sequence[tuple[int, int]]) -> jax.Array:
    """Cut so many elements off the two ends of each axis.

    This and the next are not `lax.slice` and `lax.pad`, whose transposes are not weakly typed.
    """
    for axis, (low, high) in enumerate(ends):
        if low or high:
            inner = array.shape[axis] - low - high
            _, array, _ = lax.split(array, (low, inner, high), axis)
    return array


def lengthened(array: jax.Array, ends: Sequence[tuple[int, int]]) -> jax.Array:
    """Put so many zeros at the two ends of each axis."""
    for axis, pair in enumerate(ends):
        if any(pair):
            low, high = (
                lax.full_like(array, 0, shape=(*array.shape[:axis], size, *array.shape[axis + 1 :]))
                for size in pair
            )
            array = lax.concatenate((low, array, high), axis)
    return array
