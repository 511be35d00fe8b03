# SPDX-License-Identifier: Apache-2.0
"""In which order of dimensions, and in which dtype, a convolution is faster for cuDNN.

cuDNN's best kernels want channels last. Where there are few channels its kernels for channels
first are as good, and arrays that are so spare two transposes. docs/decisions.md has the figures.
"""

import math

from ._spec import ConvSpec, Layout

FEW_CHANNELS = 4
"""Per group, of input or output, with which channels first spares more in float32 than it costs."""

SMALL_WINDOWS = {1: 27, 2: 9, 3: 27}
"""Taps, up to which that is so of what is a forward convolution, by the number of dimensions."""

LARGE_WINDOW = 256
"""Taps of a depthwise window, from which on channels first is several times as fast."""

TILED_WINDOWS = (1, 3, 5)
"""The sizes of a depthwise window for whose filter gradient cuDNN has a kernel of its own."""


def is_channels_first(op: str, spec: ConvSpec, layout: Layout, dtype: str) -> bool:
    """Say whether cuDNN is given arrays in the order N, C, spatial, and filters likewise."""
    taps = math.prod(spec.w_shape[2:])
    if spec.is_depthwise and taps >= LARGE_WINDOW:
        return True
    if not layout.is_channels_first:
        return False
    if spec.is_depthwise:
        # For these it has tiling kernels for channels last.
        return not _is_tiled(spec) if op == "wgrad" else dtype != "float16"
    channels = min(spec.w_shape[1], spec.w_shape[0] // spec.groups)
    # A strided input gradient is no forward convolution, whose plans are the better ones.
    is_small = (
        op == "wgrad"
        or (op == "dgrad" and set(spec.strides) != {1})
        or taps <= SMALL_WINDOWS[spec.num_spatial]
    )
    return dtype == "float32" and channels <= FEW_CHANNELS and is_small


def _is_tiled(spec: ConvSpec) -> bool:
    return spec.num_spatial <= 2 and all(size in TILED_WINDOWS for size in spec.w_shape[2:])


def widened(op: str, spec: ConvSpec, dtype: str | None) -> str | None:
    """Give the dtype in which a convolution is computed that could be in this one.

    The one kernel for filter gradients of depthwise convolutions that is fast rounds its partial
    sums to the dtype of the operands, so that 16-bit ones are converted.
    """
    if op != "wgrad" or dtype not in ("float16", "bfloat16") or not spec.is_depthwise:
        return dtype
    return "float32" if _is_tiled(spec) else dtype
