# SPDX-License-Identifier: Apache-2.0
"""An input gradient of stride 1 as a forward convolution with the reversed filter.

An input gradient of stride 1 is a convolution of dy with the filter reversed, its inputs and
outputs exchanged within each group. In one dimension, with dilation d, low padding lo and R taps,

    dx[i] = sum over r of w[r] dy[i + lo - d r] = sum over r' of w[R - 1 - r'] dy[i + d r' - lo']

where r' = R - 1 - r and lo' = d (R - 1) - lo, which is the low padding; the high one likewise.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, NamedTuple

import jax

from ._axes import fold, unfold
from ._dtypes import Dtypes
from ._spec import ConvSpec, Layout


class Fprop(NamedTuple):
    """A forward convolution of dy that computes an input gradient."""

    spec: ConvSpec
    layout: Layout

    def filter(self, w: jax.Array) -> jax.Array:
        """Give the filter's array, whose outputs and inputs `layout` exchanges."""
        if self.spec.groups == 1 or self.spec.is_depthwise:
            return w
        inputs, outputs = self.layout.w[:2]  # of w, before they are exchanged
        groups = unfold(w, outputs, self.spec.groups)
        return fold(groups, outputs, inputs)


def fprop_of_dgrad(spec: ConvSpec, layout: Layout) -> Fprop | None:
    """Give the forward convolution for an input gradient; None if there is none."""
    spans = [d * (w - 1) for d, w in zip(spec.dilation, spec.w_shape[2:], strict=True)]
    padding = tuple(
        (span - low, span - high) for span, (low, high) in zip(spans, spec.padding, strict=True)
    )
    if set(spec.strides) != {1} or any(pad < 0 for pads in padding for pad in pads):
        return None
    fprop = replace(
        spec,
        x_shape=spec.y_shape,
        w_shape=(spec.x_shape[1], spec.w_shape[0] // spec.groups, *spec.w_shape[2:]),
        padding=padding,
        flip=not spec.flip,
        options=replace(spec.options, algorithm=spec.options.algorithm_for("dgrad")),
        dtypes=Dtypes(x=spec.dtypes.y, w=spec.dtypes.w, y=spec.dtypes.x),
    )
    outputs, inputs, *window = layout.w
    w = layout.w if spec.is_depthwise else (inputs, outputs, *window)
    return Fprop(fprop, Layout(x=layout.y, w=w, y=layout.x))


def prefers_fprop(spec: ConvSpec, dtype: str, *, allow_tf32: bool, is_copied: bool) -> bool:
    """Say whether cuDNN's forward plans are the faster ones for an input gradient.

    They are for depthwise convolutions, and in TF32 if the filter is not as cuDNN wants it, so that
    it is copied whichever it is (docs/decisions.md).
    """
    return spec.is_depthwise or (dtype == "float32" and allow_tf32 and is_copied)


def has_fprop(op: str, spec: ConvSpec) -> bool:
    """Say whether an operation is a forward convolution if it is an input gradient."""
    axes = tuple(range(spec.num_spatial + 2))
    return op != "dgrad" or fprop_of_dgrad(spec, Layout(axes, axes, axes)) is not None


def by_fprop(compute: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Have a route compute input gradients, which `has_fprop`, as what they are."""

    @wraps(compute)
    def computed(
        *operands: jax.Array, op: str, spec: ConvSpec, layout: Layout, **params: Any
    ) -> jax.Array:
        fprop = fprop_of_dgrad(spec, layout) if op == "dgrad" else None
        if fprop:
            op, spec, layout = "fprop", fprop.spec, fprop.layout
        return compute(*operands, op=op, spec=spec, layout=layout, **params)

    return computed
