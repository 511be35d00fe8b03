# SPDX-License-Identifier: Apache-2.0
"""Depthwise convolutions with large windows as grouped ones that tensor cores can compute.

In the last dimension, with stride 1 and R taps, outputs p and inputs j of one channel are linked by
a Toeplitz matrix, so that these positions may stand where channels do: in two dimensions

    y[n, h, p, c] = sum over q, j of  x[n, h + q - lo, j, c] T[c, p, q, j],
    T[c, p, q, j] = w[c, q, r]  where  j = p + r - lo'  for a tap r, else 0

is a convolution over h, with a group for each c, of inputs j and outputs p. Its derivatives in x
and T are those of this convolution, and dw[c, q, r] is the sum of T's over all p: there
j = p + r - lo', and nowhere else is w. A dx is computed as the forward convolution that it is
(`_route_reversed`).

T is larger than w, and has zeros, which cost products. Where the image is much wider than the
window, outputs are divided into blocks of B; each has inputs B + R - 1, with the images of all
blocks in a row, and lo' is then 0 since x is padded. So at least half of T is not zero if the
image is at most as wide as the window, or else if B is.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _route_reversed
from ._dtypes import accumulator
from ._memory import LARGE_WINDOW
from ._route_geometry import (
    Convolve,
    aligned_channels,
    channels_last,
    dimensions,
    dtypes,
    last,
    padded,
    precision,
    rounded,
    users_order,
)
from ._spec import ROLES, ConvSpec, Layout

FEWEST_TAPS = 169
"""From which on it is faster in 16 bits, but for filter gradients."""

MOST_CHANNELS = 384
"""Up to which it is faster in float32 with tensor cores for input gradients."""


def is_possible(op: str, spec: ConvSpec) -> bool:
    """Say whether it is depthwise, and neither strided nor dilated in the last dimension."""
    return (
        spec.is_depthwise
        and spec.num_spatial >= 2
        and spec.strides[-1] == spec.dilation[-1] == 1
        and _route_reversed.has_fprop(op, spec)
    )


def is_faster(op: str, spec: ConvSpec) -> bool:
    """Say whether the window is so large that cuDNN has no fast plan for it.

    In float32 without tensor cores nothing is gained, and with them nothing forward, nor for input
    gradients of many channels.
    """
    taps, multiplied = math.prod(spec.w_shape[2:]), dtypes(op, spec)[0]
    if spec.num_spatial != 2:
        return False
    if jnp.dtype(multiplied).itemsize == 2:
        return taps >= (LARGE_WINDOW if op == "wgrad" else FEWEST_TAPS)
    uses_tensor_cores = multiplied == "float32" and precision(op, spec) == lax.Precision.DEFAULT
    if taps < LARGE_WINDOW or not uses_tensor_cores:
        return False
    return op == "wgrad" or (op == "dgrad" and spec.x_shape[1] <= MOST_CHANNELS)


@_route_reversed.by_fprop
def compute(
    a: jax.Array, b: jax.Array, *, op: str, spec: ConvSpec, layout: Layout, convolve: Convolve
) -> jax.Array:
    """Compute a primitive by another one, which `convolve` computes."""
    first, second, result = ROLES[op]
    blocks = _blocks(op, spec)
    rows = {"x": _rows_of_x, "y": _rows_of_y, "w": _matrices}
    operands = (
        rows[role](channels_last(array, role, spec, layout), spec, blocks)
        for array, role in ((a, first), (b, second))
    )
    inner = _inner(spec, blocks)
    if op == "wgrad":  # whose numbers are sums of some, so that only those are rounded
        summed = accumulator(*spec.dtypes)
        inner = replace(inner, dtypes=spec.dtypes._replace(w=summed))
    computed = convolve(*operands, op=op, spec=inner, layout=last(spec.num_spatial - 1))
    back = {"y": _images_of_rows, "w": _taps_of_matrices}[result]
    return users_order(rounded(back(computed, spec, blocks), op, spec), result, spec, layout)


class _Blocks(NamedTuple):
    """How the last dimension is divided."""

    count: int
    outputs: int
    """Of each block, a multiple of what cuDNN wants, the last ones perhaps beyond the image."""
    inputs: int
    """Of each block, likewise."""
    low: int
    """The padding that matrices have, and not x: where there is one block."""


def _blocks(op: str, spec: ConvSpec) -> _Blocks:
    *_, each = dimensions(spec)
    multiple = aligned_channels(op, spec)

    def aligned(size: int) -> int:
        return -(-size // multiple) * multiple

    if each.out <= 2 * each.window:
        return _Blocks(1, aligned(each.out), aligned(each.size), each.low)
    outputs = aligned(each.window)
    inputs = aligned(outputs + each.window - 1)
    return _Blocks(-(-each.out // outputs), outputs, inputs, 0)


def _inner(spec: ConvSpec, blocks: _Blocks) -> ConvSpec:
    """Give the grouped convolution, over all dimensions but the last."""
    images, channels, *sizes = spec.x_shape
    return replace(
        spec,
        x_shape=(images * blocks.count, channels * blocks.inputs, *sizes[:-1]),
        w_shape=(channels * blocks.outputs, blocks.inputs, *spec.w_shape[2:-1]),
        strides=spec.strides[:-1],
        padding=spec.padding[:-1],
        dilation=spec.dilation[:-1],
        groups=channels,
        flip=False,
    )


def _rows_of_x(x: jax.Array, spec: ConvSpec, blocks: _Blocks) -> jax.Array:
    """Bring x, of (N, H, W, C), to (N blocks, H, C inputs)."""
    *_, each = dimensions(spec)
    low = each.low - blocks.low
    total = blocks.outputs * (blocks.count - 1) + blocks.inputs
    ends = [(0, 0)] * (spec.num_spatial - 1) + [(low, total - low - each.size)]
    x = padded(x, ends)
    parts = [
        lax.slice_in_dim(x, start, start + blocks.inputs, axis=spec.num_spatial)
        for start in range(0, blocks.outputs * blocks.count, blocks.outputs)
    ]
    x = jnp.swapaxes(jnp.stack(parts, 1), -1, -2)
    return x.reshape(x.shape[0] * blocks.count, *x.shape[2:-2], -1)


def _rows_of_y(y: jax.Array, spec: ConvSpec, blocks: _Blocks) -> jax.Array:
    """Bring y, of (N, H, P, C), to (N blocks, H, C outputs)."""
    n, *rows, out, channels = y.shape
    beyond = blocks.count * blocks.outputs - out
    y = padded(y, [(0, 0)] * len(rows) + [(0, beyond)])
    y = y.reshape(n, *rows, blocks.count, blocks.outputs, channels)
    y = jnp.swapaxes(jnp.moveaxis(y, 1 + len(rows), 1), -1, -2)
    return y.reshape(n * blocks.count, *rows, -1)


def _images_of_rows(y: jax.Array, spec: ConvSpec, blocks: _Blocks) -> jax.Array:
    """Undo `_rows_of_y`."""
    n, channels, *rows, out = spec.y_shape
    y = y.reshape(n, blocks.count, *rows, channels, blocks.outputs)
    y = jnp.moveaxis(jnp.swapaxes(y, -1, -2), 1, 1 + len(rows))
    y = y.reshape(n, *rows, blocks.count * blocks.outputs, channels)
    return lax.slice_in_dim(y, 0, out, axis=1 + len(rows))


def _matrices(w: jax.Array, spec: ConvSpec, blocks: _Blocks) -> jax.Array:
    """Bring w, of (C, window, R, 1), to T, of (C outputs, window, inputs)."""
    taps = _taps(spec, blocks)
    w = jnp.concatenate([w, jnp.zeros_like(w[..., :1, :])], axis=-2)[..., 0]
    w = jnp.take(
        w, np.where(taps < 0, w.shape[-1] - 1, taps), axis=-1
    )  # (C, window, outputs, inputs)
    w = jnp.moveaxis(w, -2, 1)
    return w.reshape(-1, *w.shape[2:])


def _taps(spec: ConvSpec, blocks: _Blocks) -> np.ndarray:
    """Give the tap by which an output and an input of a block are linked, or -1."""
    p, j = np.ogrid[: blocks.outputs, : blocks.inputs]
    taps = j - p + blocks.low
    return np.where((0 <= taps) & (taps < spec.w_shape[-1]), taps, -1)


def _taps_of_matrices(matrices: jax.Array, spec: ConvSpec, blocks: _Blocks) -> jax.Array:
    """Bring the derivative of T to that of w: the transpose of `_matrices`."""
    p, r = np.ogrid[: blocks.outputs, : spec.w_shape[-1]]
    j = p + r - blocks.low
    is_there = (0 <= j) & (j < blocks.inputs)
    flat = np.where(is_there, p * blocks.inputs + j, blocks.outputs * blocks.inputs)
    channels, _, *window, _ = spec.w_shape
    matrices = matrices.reshape(channels, blocks.outputs, *window, blocks.inputs)
    matrices = jnp.moveaxis(matrices, 1, -2).reshape(channels, *window, -1)
    matrices = jnp.concatenate([matrices, jnp.zeros_like(matrices[..., :1])], axis=-1)
    return jnp.take(matrices, flat, axis=-1).sum(-2)[..., None]
