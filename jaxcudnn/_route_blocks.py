# SPDX-License-Identifier: Apache-2.0
"""Convolutions with few channels as ones with more of them, without a copy of an image.

With channels last, a block of s positions of the last dimension is one run of memory, so that their
channels may stand for those of one position, of x and of y alike. In one dimension, with stride 1
and R taps, not dilated, output p and tap r meet at input position  p + r - lo. Written by blocks,
p = s P + a  and  p + r - lo = s J + b  with 0 <= a, b < s. With  lo' = ceil(lo / s)

    y[s P + a] = sum over j, b of  X[P + j - lo', b] W[a, j, b],    X[J, b] = x[s J + b]
                                                                    W[a, j, b] = w[r]  where
                                                    r = s (j - lo') + b - a + lo  is a tap, else 0

is a convolution of stride 1 and low padding lo', with A blocks as window, whose inputs are pairs of
b and a channel of x, and its outputs pairs of a and one of y. A dx is computed as the forward
convolution that it is (`_route_reversed`). A dw would be that of this convolution summed over all
a, which is not had in float32 at a speed that is worth it (docs/decisions.md).

The last output of a block ends the window, so  A = floor((s + R - 2 - lo) / s) + lo' + 1.  W has
A s / R times as many numbers for each output as w, and as many more products. It is worth it since
cuDNN's plans copy an image of few channels to one of more, and compute with few of either slowly.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _route_reversed
from ._route_geometry import (
    Convolve,
    aligned_channels,
    channels_last,
    dimensions,
    dtypes,
    last,
    users_order,
)
from ._spec import ConvSpec, Layout

LARGEST = 8
"""Positions of a block."""

ENOUGH = 64
"""Channels of x and y from which on more gain nothing."""

FEWEST_ELEMENTS = 1 << 22
"""Of the larger image, below which W is not made in the time that is gained."""

MOST_OUTPUTS = 320
"""Of those measured."""


def is_possible(op: str, spec: ConvSpec) -> bool:
    """Say whether the last dimension consists of whole blocks, neither strided nor dilated."""
    *_, each = dimensions(spec)
    return (
        op != "wgrad"
        and spec.groups == 1
        and each.stride == 1
        and (each.dilation == 1 or each.window == 1)
        and _route_reversed.has_fprop(op, spec)
        and positions(op, spec) > 1
    )


def is_faster(op: str, spec: ConvSpec) -> bool:
    """Say whether that is faster than cuDNN's plans.

    It is in 16 bits for fewer channels than 16 bytes hold, but for one of float16, for which cuDNN
    has a plan of its own; and where neither inputs nor outputs are more than half as many as are
    enough.
    """
    inputs, outputs = _channels(op, spec)
    multiplied = jnp.dtype(dtypes(op, spec)[0])
    if multiplied.itemsize != 2 or set(spec.strides) != {1}:
        return False
    if max(math.prod(spec.x_shape), math.prod(spec.y_shape)) < FEWEST_ELEMENTS:
        return False
    few = aligned_channels(op, spec)
    if inputs < few:
        is_measured = few <= outputs <= MOST_OUTPUTS and positions(op, spec) * inputs % few == 0
        return is_measured and (inputs > 1 or multiplied != "float16")
    return outputs >= few and outputs <= 2 * inputs and 2 * max(inputs, outputs) <= ENOUGH


def positions(op: str, spec: ConvSpec) -> int:
    """Give the number of positions of a block: 1 where there are no blocks to be had."""
    *_, each = dimensions(spec)
    inputs, outputs = _channels(op, spec)
    wanted = LARGEST
    if inputs >= aligned_channels(op, spec):
        wanted = max(2, ENOUGH // max(inputs, outputs))
    return math.gcd(each.size, each.out, 1 << min(wanted, LARGEST).bit_length() - 1)


def _channels(op: str, spec: ConvSpec) -> tuple[int, int]:
    """Give the inputs and outputs of the forward convolution that is computed."""
    outputs, inputs = spec.w_shape[:2]
    return (outputs, inputs) if op == "dgrad" else (inputs, outputs)


@_route_reversed.by_fprop
def compute(
    a: jax.Array,
    b: jax.Array,
    *,
    op: str,
    spec: ConvSpec,
    layout: Layout,
    convolve: Convolve,
) -> jax.Array:
    """Compute a primitive by a forward convolution, which `convolve` computes."""
    x, w = channels_last(a, "x", spec, layout), channels_last(b, "w", spec, layout)
    blocks = _blocks(spec, positions(op, spec))
    s = blocks.positions
    x = x.reshape(*x.shape[:-2], -1, s * x.shape[-1])
    y = convolve(
        x, _matrices(w, blocks), op=op, spec=_inner(spec, blocks), layout=last(spec.num_spatial)
    )
    y = y.reshape(*y.shape[:-2], -1, spec.y_shape[1])
    return users_order(y, "y", spec, layout)


class _Blocks(NamedTuple):
    """How the last dimension is divided."""

    positions: int
    window: int
    low: int
    places: np.ndarray
    """The position within the window of blocks at which an output of a block and a tap meet."""


def _blocks(spec: ConvSpec, block: int) -> _Blocks:
    *_, each = dimensions(spec)
    low = -(-each.low // block)
    window = (block + each.window - 2 - each.low) // block + low + 1
    a, r = np.ogrid[:block, : each.window]
    return _Blocks(block, window, low, a + r - each.low + block * low)


def _inner(spec: ConvSpec, blocks: _Blocks) -> ConvSpec:
    """Give the convolution of blocks."""
    *_, each = dimensions(spec)
    s = blocks.positions
    size, out = each.size // s, each.out // s
    high = out - 1 + blocks.window - blocks.low - size
    return replace(
        spec,
        x_shape=(spec.x_shape[0], s * spec.x_shape[1], *spec.x_shape[2:-1], size),
        w_shape=(s * spec.w_shape[0], s * spec.w_shape[1], *spec.w_shape[2:-1], blocks.window),
        padding=(*spec.padding[:-1], (blocks.low, high)),
        dilation=(*spec.dilation[:-1], 1),
        flip=False,
    )


def _matrices(w: jax.Array, blocks: _Blocks) -> jax.Array:
    """Bring w, of (K, window, R, C), to W, of (s K, window, A, s C)."""
    s, taps = blocks.positions, w.shape[-2]
    met = np.full((s, blocks.window * s), taps)  # the number of a zero that is put behind them
    np.put_along_axis(met, blocks.places, np.broadcast_to(np.arange(taps), (s, taps)), axis=1)
    w = jnp.concatenate([w, jnp.zeros_like(w[..., :1, :])], axis=-2)
    w = jnp.moveaxis(jnp.take(w, met, axis=-2), -3, 0)  # (s, K, window, A s, C)
    return w.reshape(-1, *w.shape[2:-2], blocks.window, s * w.shape[-1])
