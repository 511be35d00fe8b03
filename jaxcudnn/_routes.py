# SPDX-License-Identifier: Apache-2.0
"""Routes: other computations of the same sums, where they are faster than cuDNN's plans.

A route takes the place of one primitive where that is lowered for CUDA, so that derivatives, `vmap`
and sharding know nothing of it. It has three parts, all of them functions of a spec:

    is_possible   whether it computes this convolution, for which its module has the proof
    is_faster     the rule by which it is taken, from figures of docs/decisions.md
    compute       the computation, in terms of `lax` or of another convolution of cuDNN's, from the
                  primitive's operands, a spec, a layout and what computes other convolutions

Nothing depends on a local timing, or on whether there is a GPU, so that every process of a job
lowers to the same program.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax

from . import (
    _route_blocks,
    _route_fft,
    _route_matmul,
    _route_shifts,
    _route_space_to_depth,
    _route_toeplitz,
)
from ._options import ALGORITHMS
from ._spec import ConvSpec, Layout

FEWEST_ELEMENTS = 1 << 19
"""Of the larger image, x or y, below which nothing is gained: a step more is one launch more."""


class Kind(NamedTuple):
    """What there is to a route of one name."""

    is_possible: Callable[[str, ConvSpec], bool]
    is_faster: Callable[[str, ConvSpec], bool]
    compute: Callable[..., jax.Array]
    is_cudnns: bool
    """Whether it is computed by another convolution, cuDNN's in its turn, and not by XLA."""
    is_for_channels_last: bool = False
    """Whether it is not worth a copy of images whose channels are not last."""
    saves_a_pass: bool = True
    """Whether it saves more than a pass over the result, which a fused epilogue does."""


KINDS = {
    "matmul": Kind(
        _route_matmul.is_possible, _route_matmul.is_faster, _route_matmul.compute, is_cudnns=False
    ),
    "space_to_depth": Kind(
        _route_space_to_depth.is_possible, _route_space_to_depth.is_faster,
        _route_space_to_depth.compute, is_cudnns=True,
    ),
    "blocks": Kind(
        _route_blocks.is_possible, _route_blocks.is_faster, _route_blocks.compute, is_cudnns=True,
        is_for_channels_last=True, saves_a_pass=False,
    ),
    "shifts": Kind(
        _route_shifts.is_possible, _route_shifts.is_faster, _route_shifts.compute, is_cudnns=False
    ),
    "toeplitz": Kind(
        _route_toeplitz.is_possible, _route_toeplitz.is_faster, _route_toeplitz.compute,
        is_cudnns=True,
    ),
    "fft": Kind(_route_fft.is_possible, _route_fft.is_faster, _route_fft.compute, is_cudnns=False),
}  # fmt: skip
"""The routes by name, those first that are preferred."""


def choose(op: str, spec: ConvSpec, layout: Layout) -> str:
    """Name the route by which a primitive is computed; nothing if it is cuDNN's as it is.

    One whose options name a plan is, since the name is one of its plans'.
    """
    if spec.options.algorithm_for(op) not in ALGORITHMS:
        return ""
    if max(math.prod(spec.x_shape), math.prod(spec.y_shape)) < FEWEST_ELEMENTS:
        return ""
    allowed = ((name, kind) for name, kind in KINDS.items() if spec.options.allows_route(name))
    for name, kind in allowed:
        if kind.is_for_channels_last and not layout.is_channels_last:
            continue
        if kind.is_possible(op, spec) and kind.is_faster(op, spec):
            return name
    return ""
