# SPDX-License-Identifier: Apache-2.0
"""Strided convolutions with few channels as convolutions of stride 1 with more of them.

In one dimension, with stride s and R taps, not dilated, output p and tap r meet at input position
s p + r - lo. Written by blocks, position i is  i = s j + b  with 0 <= b < s, and  r - lo = s a + b,
so that they meet in block  j = p + a. With  lo' = ceil(lo / s),  f = s lo' - lo  and  a' = a + lo',

    y[p] = sum over a', b of  X[p + a' - lo', b] W[a', b],     X[j, b] = x[s j + b]
                                                               W[a', b] = w[s a' + b - f]

which is a convolution of stride 1 and low padding lo' whose channels are pairs of b and a channel
of x. X is x with zeros up to a multiple of s; W is w with f zeros before it, and behind it up to
A s of them, where  A = ceil((f + R) / s). Both maps only move numbers, so their transposes move
them back: dx and dw are those of this convolution, without what stands for zeros.

As many channels of zeros are added as make a multiple of 16 bytes, which cuDNN's fast plans need.
"""

import math
import operator
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._route_geometry import (
    Convolve,
    aligned_channels,
    channels_last,
    dimensions,
    last,
    padded,
    users_order,
)
from ._spec import ROLES, ConvSpec, Layout, Role, Shape


def is_possible(op: str, spec: ConvSpec) -> bool:
    """Say whether there are strides to be had, and nothing else is unusual where they are."""
    strided = [each for each in dimensions(spec) if each.stride > 1]
    return (
        bool(strided)
        and spec.groups == 1
        and all(each.low < each.window for each in strided)
        and all(each.dilation == 1 or each.window == 1 for each in strided)
    )


def is_faster(op: str, spec: ConvSpec) -> bool:
    """Say whether that is faster: cuDNN has no fast plan for so few channels."""
    few = aligned_channels(op, spec)
    return few > 2 and spec.x_shape[1] < few <= spec.w_shape[0] and math.prod(spec.w_shape[2:]) > 1


def compute(
    a: jax.Array, b: jax.Array, *, op: str, spec: ConvSpec, layout: Layout, convolve: Convolve
) -> jax.Array:
    """Compute a primitive by another one, which `convolve` computes."""
    first, second, result = ROLES[op]
    inner = _inner(op, spec)
    # y stays as it is, in the user's order.
    order = last(spec.num_spatial)._replace(y=layout.y)
    operands = (
        array if role == "y" else _deepened(channels_last(array, role, spec, layout), role, inner)
        for array, role in ((a, first), (b, second))
    )
    computed = convolve(*operands, op=op, spec=inner.spec, layout=order)
    if result == "y":
        return computed
    return users_order(_flattened(computed, result, inner), result, spec, layout)


class _Inner(NamedTuple):
    """The other convolution, and how x and w get there: widths as those of `lax.pad`."""

    spec: ConvSpec
    strides: Shape
    channels: int
    """Of x, before they are more."""
    widths: dict[Role, list[tuple[int, int]]]
    """The zeros before and behind the positions of x and the window of w."""


def _inner(op: str, spec: ConvSpec) -> _Inner:
    widths: dict[Role, list[tuple[int, int]]] = {"x": [], "w": []}
    sizes, windows, pads, dilation = [], [], [], []
    for each, pair in zip(dimensions(spec), spec.padding, strict=True):
        s = each.stride
        if s == 1:
            sizes.append(each.size)
            windows.append(each.window)
            pads.append(pair)
            dilation.append(each.dilation)
            widths["x"].append((0, 0))
            widths["w"].append((0, 0))
            continue
        low = -(-each.low // s)
        front = s * low - each.low
        window = -(-(front + each.window) // s)
        reached = each.out - 1 + window - low  # blocks of x
        size = min(-(-each.size // s), reached)
        sizes.append(size)
        windows.append(window)
        pads.append((low, reached - size))
        dilation.append(1)
        widths["x"].append((0, s * size - each.size))
        widths["w"].append((front, s * window - front - each.window))
    multiple = aligned_channels(op, spec)
    channels = -(-math.prod(spec.strides) * spec.x_shape[1] // multiple) * multiple
    inner = replace(
        spec,
        x_shape=(spec.x_shape[0], channels, *sizes),
        w_shape=(spec.w_shape[0], channels, *windows),
        strides=(1,) * spec.num_spatial,
        padding=tuple(pads),
        dilation=tuple(dilation),
        flip=False,
    )
    return _Inner(inner, spec.strides, spec.x_shape[1], widths)


def _deepened(array: jax.Array, role: Role, inner: _Inner) -> jax.Array:
    """Give X of x, or W of w."""
    shape = inner.spec.shape(role)
    array = padded(array, inner.widths[role])
    blocks = [n for pair in zip(shape[2:], inner.strides, strict=True) for n in pair]
    array = array.reshape(shape[0], *blocks, inner.channels).transpose(_outside_first(inner))
    array = array.reshape(shape[0], *shape[2:], -1)
    zeros = [(0, 0, 0)] * (array.ndim - 1) + [(0, shape[1] - array.shape[-1], 0)]
    return lax.pad(array, jnp.zeros((), array.dtype), zeros)


def _flattened(array: jax.Array, role: Role, inner: _Inner) -> jax.Array:
    """Give dx of X's derivative, or dw of W's: the transpose of `_deepened`."""
    shape = inner.spec.shape(role)
    array = array[..., : math.prod(inner.strides) * inner.channels]
    array = array.reshape(shape[0], *shape[2:], *inner.strides, inner.channels)
    array = array.transpose(np.argsort(_outside_first(inner)))
    sizes = map(operator.mul, shape[2:], inner.strides)
    array = array.reshape(shape[0], *sizes, inner.channels)
    return padded(array, [(-low, -high) for low, high in inner.widths[role]])


def _outside_first(inner: _Inner) -> list[int]:
    """Give the order that brings (N, J, s, J', s', ..., C) to (N, J, J', ..., s, s', ..., C)."""
    alternating = range(1, 1 + 2 * inner.spec.num_spatial)
    return [0, *alternating[::2], *alternating[1::2], len(alternating) + 1]
