# SPDX-License-Identifier: Apache-2.0
"""Convolutions whose windows do not overlap as one product of matrices.

In one dimension, with s the stride and R taps, not dilated, output p and tap r meet at input
position  s p + r - lo. If R <= s, every position belongs to one pair of p and r at most. So x,
padded by lo and cut or padded at its end to s P positions, is an array of P blocks of s, of which
the first R meet taps:

    b[n, p, r, c] = x[n, s p + r - lo, c]       a copy of x, or a part of it, in another order
    y[n, p, k]    = sum over r, c of  b[n, p, r, c] w[k, r, c]
    db[n, p, r, c] = sum over k of  dy[n, p, k] w[k, r, c],   and dx is db put back to its places
    dw[k, r, c]   = sum over n, p of  dy[n, p, k] b[n, p, r, c]

Positions of x that are in no block have the derivative zero. Where there is one output, P = 1, the
stride is of no account and may be taken to be R: a window over the whole image is a matrix product.

There is one copy, of x or dx, since a block of more than one dimension is no run of memory: with
channels last its inner runs are of R C numbers. It is one loop, padding included. The product is
written in 16 bits by the kernel that computes it, from sums in float32.
tests/test_routes_compiled.py has what XLA makes of it.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._route_geometry import (
    Convolve,
    Dimension,
    aligned_channels,
    channels_last,
    dimensions,
    dtypes,
    padded,
    precision,
    rounded,
    users_order,
)
from ._spec import ROLES, ConvSpec, Layout, Role


def is_possible(op: str, spec: ConvSpec) -> bool:
    """Say whether windows do not overlap."""
    return all(_step(each) >= each.window and _is_dense(each) for each in dimensions(spec))


def is_faster(op: str, spec: ConvSpec) -> bool:
    """Say whether that is faster than cuDNN's plans.

    It is for patches of images with few channels, and in 16 bits for single positions with few
    inputs or outputs, since those plans copy what has too few to an array that has more. Which
    matrix product XLA takes is timed, so that bits may differ from run to run.
    """
    few = aligned_channels(op, spec)
    inputs, window, numbers = spec.w_shape[1], spec.w_shape[2:], math.prod(spec.w_shape[1:])
    sides = spec.w_shape[:2]
    is_small = jnp.dtype(dtypes(op, spec)[0]).itemsize == 2
    return (
        spec.groups == 1
        and not spec.options.deterministic
        and (
            inputs < few <= numbers
            or (is_small and set(window) == {1} and min(sides) < few <= max(sides))
        )
        and all(each.window == _step(each) for each in dimensions(spec))
    )


def compute(
    a: jax.Array, b: jax.Array, *, op: str, spec: ConvSpec, layout: Layout, convolve: Convolve
) -> jax.Array:
    """Compute a primitive; `convolve` is not needed."""
    first, second, result = ROLES[op]
    multiplied, summed = dtypes(op, spec)
    operands = (
        _apart(channels_last(array, role, spec, layout).astype(multiplied), role, spec)
        for array, role in ((a, first), (b, second))
    )
    positions, taps = "pqo"[: spec.num_spatial], "rst"[: spec.num_spatial]
    # A dimension of one group would be one of a batch, for which XLA transposes the filter.
    g = "g" if spec.groups > 1 else ""
    letters = {"x": f"n{positions}{taps}{g}c", "w": f"{g}k{taps}c", "y": f"n{positions}{g}k"}
    sums = _product(
        dict(zip((letters[first], letters[second]), operands, strict=True)),
        letters[result],
        precision=precision(op, spec),
        preferred_element_type=summed,
    )
    return users_order(_together(rounded(sums, op, spec), result, spec), result, spec, layout)


def _product(operands: dict[str, jax.Array], wanted: str, **options: Any) -> jax.Array:
    """Multiply two arrays, whose dimensions have letters, and sum over those that are not wanted.

    Unlike `jnp.einsum` it sums in the order of the filter's dimensions, so that only the image is
    copied, and has the operand first whose dimensions come first in the result.
    """
    (left, right), (a, b) = operands, operands.values()
    shared = set(left).intersection(right)
    if wanted.lstrip("g")[0] in right:
        left, right, a, b = right, left, b, a
    batch = [letter for letter in wanted if letter in shared]
    summed = [letter for letter in right if letter in shared and letter not in wanted]

    def axes(letters: str, chosen: list[str]) -> list[int]:
        return [*map(letters.index, chosen)]

    sums = lax.dot_general(
        a,
        b,
        ((axes(left, summed), axes(right, summed)), (axes(left, batch), axes(right, batch))),
        **options,
    )
    order = [*batch, *(letter for letter in left + right if letter not in shared)]
    return sums.transpose([*map(order.index, wanted)])


def _apart(array: jax.Array, role: Role, spec: ConvSpec) -> jax.Array:
    """Give groups a dimension, if there are some, and x its blocks: (N, P, R, groups, C)."""
    groups = [spec.groups] if spec.groups > 1 else []
    if role == "w":
        return array.reshape(*groups, -1, *array.shape[1:])
    if role == "y":
        return array.reshape(*array.shape[:-1], *groups, -1)
    given = dimensions(spec)
    ends = [_step(each) * each.out - each.low - each.size for each in given]
    array = padded(array, [(each.low, end) for each, end in zip(given, ends, strict=True)])
    sizes = [size for each in given for size in (each.out, _step(each))]
    array = array.reshape(array.shape[0], *sizes, -1)
    for axis, each in enumerate(given):
        array = lax.slice_in_dim(array, 0, each.window, axis=2 + 2 * axis)
    array = array.transpose(_blocks_first(spec))
    return array.reshape(*array.shape[:-1], *groups, -1)


def _together(array: jax.Array, role: Role, spec: ConvSpec) -> jax.Array:
    """Undo `_apart`, or have zeros where x is in no block."""
    if role == "w":
        return array.reshape(spec.w_shape[0], *spec.w_shape[2:], -1)
    if role == "y":
        return array.reshape(spec.y_shape[0], *spec.y_shape[2:], -1)
    given = dimensions(spec)
    array = array.reshape(*array.shape[: 1 + 2 * len(given)], -1)
    array = array.transpose(np.argsort(_blocks_first(spec)))
    between = [pads for each in given for pads in ((0, 0, 0), (0, _step(each) - each.window, 0))]
    array = lax.pad(array, jnp.zeros((), array.dtype), [(0, 0, 0), *between, (0, 0, 0)])
    steps = [_step(each) * each.out for each in given]
    array = array.reshape(array.shape[0], *steps, -1)
    ends = [each.size + each.low - step for each, step in zip(given, steps, strict=True)]
    return padded(array, [(-each.low, end) for each, end in zip(given, ends, strict=True)])


def _blocks_first(spec: ConvSpec) -> list[int]:
    """Give the order that brings (N, P, R, P', R', ..., C) to (N, P, P', ..., R, R', ..., C)."""
    alternating = range(1, 1 + 2 * spec.num_spatial)
    return [0, *alternating[::2], *alternating[1::2], len(alternating) + 1]


def _step(dimension: Dimension) -> int:
    """Give the stride, or where there is one output what might as well be it."""
    return dimension.stride if dimension.out > 1 else max(1, dimension.window)


def _is_dense(dimension: Dimension) -> bool:
    return dimension.dilation == 1 or dimension.window == 1
