# SPDX-License-Identifier: Apache-2.0
"""Folding one dimension of an array into another, and out again."""

import jax
import jax.numpy as jnp


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
