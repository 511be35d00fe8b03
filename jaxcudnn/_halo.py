# SPDX-License-Identifier: Apache-2.0
"""Convolutions whose positions are divided among devices, and what these exchange.

In one spatial dimension, x has X positions and y has Y; of n devices, device i holds those of x
from i S on and those of y from i T on, with S = ceil(X / n) and T = ceil(Y / n), as XLA divides
arrays. What is held beyond the end is arbitrary, and taken for zeros. With stride s, dilated window
E and low padding lo, output p meets the inputs from s p - lo to s p - lo + E - 1. So

    fprop   device i needs the  s (T - 1) + E  inputs from  s T i - lo  on, and no padding;
    wgrad   needs the same of x, and its own of dy: the sum over devices is dw;
    dgrad   needs those of dy from  ceil((S i + lo - E + 1) / s)  to  floor((S i + S - 1 + lo) / s).

What is needed of others comes from the neighbours, who may be several on each side; positions
outside of the array are zeros, which is what padding is. If nearly everything is needed by all,
everything is gathered.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._spec import ConvSpec, Layout, extent, replaced


class Line(NamedTuple):
    """The devices among which positions are divided."""

    axes: tuple[str, ...]
    """Of the mesh."""
    count: int

    def index(self) -> jax.Array:
        """Give the number of the device that asks."""
        return lax.axis_index(self.axes)


Start = Callable[[Any], Any]
"""The first position that device i needs, for i as a number or an array of one."""


def fprop(
    x: jax.Array, spec: ConvSpec, layout: Layout, dimension: int, line: Line
) -> tuple[jax.Array, ConvSpec]:
    """Give the inputs that a device's outputs need, and what is convolved then."""
    _, stride, low, window = _geometry(spec, dimension)
    outputs = _share(spec.y_shape[2 + dimension], line)
    length = stride * (outputs - 1) + window
    x = needed(
        x, layout.x[2 + dimension], spec.x_shape[2 + dimension], line,
        lambda i: stride * outputs * i - low, length,
    )  # fmt: skip
    return x, _unpadded(spec, dimension, length)


def own(y: jax.Array, spec: ConvSpec, layout: Layout, dimension: int, line: Line) -> jax.Array:
    """Give a device's own part of y, with zeros beyond the end."""
    return _masked(y, layout.y[2 + dimension], spec.y_shape[2 + dimension], line)


def dgrad(
    dy: jax.Array, spec: ConvSpec, layout: Layout, dimension: int, line: Line
) -> tuple[jax.Array, ConvSpec, Callable[[jax.Array], jax.Array]]:
    """Give the outputs that a device's inputs met, the gradient to compute, and what is its own.

    The gradient is of the positions from that of the first output's window on, or from a later one.
    """
    size, stride, low, window = _geometry(spec, dimension)
    inputs = _share(size, line)

    def first(i: Any) -> Any:
        return -((window - 1 - low - inputs * i) // stride)

    devices = range(line.count)
    count = max(1, *((inputs * (i + 1) - 1 + low) // stride - first(i) + 1 for i in devices))
    dy = needed(dy, layout.y[2 + dimension], spec.y_shape[2 + dimension], line, first, count)

    def offset(i: Any) -> Any:
        """Give where a device's inputs begin, from where its first window does."""
        return inputs * i + low - stride * first(i)

    offsets = [offset(i) for i in devices]
    padding = max(0, min(offsets))
    before = max(0, -min(offsets))
    length = max(1, max(offsets) - padding + inputs)
    after = max(0, stride * (count - 1) + window - padding - length)
    computed = replace(
        spec,
        x_shape=replaced(spec.x_shape, 2 + dimension, length),
        padding=replaced(spec.padding, dimension, (padding, after)),
    )
    axis = layout.x[2 + dimension]

    def own_part(dx: jax.Array) -> jax.Array:
        missing = max(0, max(offsets) - padding + inputs - length)
        dx = _padded(dx, axis, before, missing)
        return _part(
            dx,
            axis,
            [each - padding + before for each in offsets],
            inputs,
            line,
            lambda i: offset(i) - padding + before,
        )

    return dy, computed, own_part


def needed(
    array: jax.Array, axis: int, size: int, line: Line, start: Start, length: int
) -> jax.Array:
    """Give each device the positions that it needs, in order, with zeros outside of the array.

    Args:
      array: the part that a device holds.
      axis: the axis that is divided.
      size: the whole array's.
      line: the devices.
      start: the first position that a device needs.
      length: how many a device needs.
    """
    share, devices = array.shape[axis], range(line.count)
    array = _masked(array, axis, size, line)
    low = max(0, *(share * i - start(i) for i in devices))
    high = max(0, *(start(i) + length - share * (i + 1) for i in devices))
    if line.count > 2 and low + high >= share * (line.count - 1):
        array = lax.all_gather(array, line.axes, axis=axis, tiled=True)
        most = max(start(i) + length for i in devices)
        low = max(0, *(-start(i) for i in devices))
        array = _padded(array, axis, low, max(0, most - array.shape[axis]))
        starts = [start(i) + low for i in devices]
        return _part(array, axis, starts, length, line, lambda i: start(i) + low)
    before = _from_others(array, axis, low, line, forward=True)
    after = _from_others(array, axis, high, line, forward=False)
    array = lax.concatenate([*reversed(before), array, *after], axis)
    starts = [start(i) - share * i + low for i in devices]
    return _part(array, axis, starts, length, line, lambda i: start(i) - share * i + low)


def _from_others(
    array: jax.Array, axis: int, width: int, line: Line, *, forward: bool
) -> list[jax.Array]:
    """Give what the devices before, or after, hold next to one's own, the nearest first."""
    share, pieces = array.shape[axis], []
    for distance in range(1, line.count):
        taken = min(share, width - share * (distance - 1))
        if taken <= 0:
            break
        begin = share - taken if forward else 0
        piece = lax.slice_in_dim(array, begin, begin + taken, axis=axis)
        pairs = [(i, i + distance) for i in range(line.count - distance)]
        pairs = pairs if forward else [(j, i) for i, j in pairs]
        pieces.append(lax.ppermute(piece, line.axes, pairs))
    missing = width - share * (line.count - 1)
    if missing > 0:  # further than there are devices
        zeros = lax.slice_in_dim(array, 0, 1, axis=axis)
        zeros = jnp.zeros_like(zeros)
        pieces.append(jnp.concatenate([zeros] * missing, axis))
    return pieces


def _masked(array: jax.Array, axis: int, size: int, line: Line) -> jax.Array:
    """Put zeros where a device's part goes beyond the end of the array."""
    share = array.shape[axis]
    if share * line.count == size:
        return array
    position = lax.broadcasted_iota(jnp.int32, array.shape, axis)
    first = lax.convert_element_type(line.index(), jnp.int32) * share
    return jnp.where(position + first < size, array, jnp.zeros_like(array))


def _part(
    array: jax.Array, axis: int, starts: list[int], length: int, line: Line, start: Start
) -> jax.Array:
    """Slice a device's part off."""
    if len(set(starts)) == 1:
        return lax.slice_in_dim(array, starts[0], starts[0] + length, axis=axis)
    index = lax.convert_element_type(line.index(), jnp.int32)
    return lax.dynamic_slice_in_dim(array, start(index), length, axis=axis)


def _padded(array: jax.Array, axis: int, before: int, after: int) -> jax.Array:
    if not before and not after:
        return array
    pads = [(0, 0)] * array.ndim
    pads[axis] = (before, after)
    return jnp.pad(array, pads)


def _geometry(spec: ConvSpec, dimension: int) -> tuple[int, int, int, int]:
    """Give X, s, lo and E."""
    return (
        spec.x_shape[2 + dimension],
        spec.strides[dimension],
        spec.padding[dimension][0],
        extent(spec.w_shape[2 + dimension], spec.dilation[dimension]),
    )


def _share(size: int, line: Line) -> int:
    return -(-size // line.count)


def _unpadded(spec: ConvSpec, dimension: int, length: int) -> ConvSpec:
    return replace(
        spec,
        x_shape=replaced(spec.x_shape, 2 + dimension, length),
        padding=replaced(spec.padding, dimension, (0, 0)),
    )
