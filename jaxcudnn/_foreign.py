# SPDX-License-Identifier: Apache-2.0
"""Convolutions that other code writes with `lax`: whether they are cuDNN's, and as what."""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray

from . import _epilogue, _lowering, _primitives, _readings, _reference, _taps
from ._dtypes import resolve_precision
from ._installation import LaxConvolution, in_force
from ._readings import Call
from ._spec import ROLES, ConvSpec, Epilogue, Layout

WRITTEN_IN_LAX = "it is written with jax.lax"
EXCLUDED = "it is excluded from what jaxcudnn.install reaches"

_OPERATIONS = {
    _primitives.conv_fprop_p: "fprop",
    _primitives.conv_dgrad_p: "dgrad",
    _primitives.conv_wgrad_p: "wgrad",
}


class Operation(NamedTuple):
    """One primitive of this package, with what it is bound with."""

    op: str
    spec: ConvSpec
    layout: Layout
    epilogue: Epilogue = Epilogue()

    def lowered(self) -> list[_lowering.Step]:
        """Give what it is lowered to on CUDA."""
        reference = getattr(_reference, self.op)
        return _lowering.steps(
            self.op, reference, spec=self.spec, layout=self.layout, epilogue=self.epilogue
        )


def operation(primitive: Any, params: Mapping[str, Any]) -> Operation | None:
    """Read an equation of this package's; None if it is of another's."""
    if primitive is _epilogue.conv_bias_act_p:
        return Operation(params["op"], params["spec"], params["layout"], params["epilogue"])
    op = _OPERATIONS.get(primitive)
    return None if op is None else Operation(op, params["spec"], params["layout"])


def decide(
    types: Sequence[Any],
    params: Mapping[str, Any],
    marks: Mapping[str, Any] | None,
) -> Call | str:
    """Read a call of `lax`'s if it is to be cuDNN's on a single device; else say why it is not.

    Args:
        types: those of the operands and the result.
        params: those of `lax.conv_general_dilated_p`.
        marks: the equation's metadata.
    """
    lhs, rhs, out = types
    installation = in_force(marks)
    if installation is None:
        return WRITTEN_IN_LAX
    if installation.excludes(_described(lhs, rhs, out, params)):
        return EXCLUDED
    call = _read(lhs, rhs, out, params)
    return call if isinstance(call, str) else _refusal(call) or call


def _described(
    lhs: ShapedArray, rhs: ShapedArray, out: ShapedArray, params: Mapping[str, Any]
) -> LaxConvolution:
    geometry = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers",
                "feature_group_count", "batch_group_count")  # fmt: skip
    return LaxConvolution(
        lhs_shape=lhs.shape,
        rhs_shape=rhs.shape,
        out_shape=out.shape,
        dtype=lhs.dtype.name,
        result_dtype=out.dtype.name,
        **{name: params[name] for name in geometry},
    )


def _read(
    lhs: ShapedArray, rhs: ShapedArray, out: ShapedArray, params: Mapping[str, Any]
) -> Call | str:
    """Turn the parameters of `lax`'s primitive into a call, or say why there is none."""
    sharded = any(axes for aval in (lhs, rhs, out) for axes in aval.sharding.spec.partitions)
    if sharded:
        return "its arrays are sharded over explicit mesh axes"
    layout = Layout(*params["dimension_numbers"])
    (_, *of_image), (_, *of_result) = (
        layout.to_logical(role, aval.shape) for role, aval in (("x", lhs), ("y", out))
    )
    padding = (number for pair in params["padding"] for number in pair)
    if not all(isinstance(size, int) for size in (*of_image, *rhs.shape, *of_result, *padding)):
        return "a size is symbolic"
    precision = params["precision"]
    if precision is None:  # lax has read jax_default_matmul_precision already
        precision = lax.Precision.DEFAULT
    return Call(
        lhs_shape=layout.to_logical("x", lhs.shape),
        rhs_shape=layout.to_logical("w", rhs.shape),
        strides=tuple(params["window_strides"]),
        padding=tuple((low, high) for low, high in params["padding"]),
        lhs_dilation=tuple(params["lhs_dilation"]),
        rhs_dilation=tuple(params["rhs_dilation"]),
        feature_groups=params["feature_group_count"],
        batch_groups=params["batch_group_count"],
        layout=layout,
        dtype=lhs.dtype.name,
        result_dtype=out.dtype.name,
        precision=resolve_precision("jaxcudnn.install", precision),
    )


@lru_cache(maxsize=4096)
def operations(call: Call) -> tuple[Operation, ...]:
    """Give the operations that compute a call: one, or some if it is complex or has phases."""
    operands = (
        jax.ShapeDtypeStruct(call.layout.to_array(role, shape), jnp.dtype(call.dtype))
        for role, shape in (("x", call.lhs_shape), ("w", call.rhs_shape))
    )
    jaxpr = jax.make_jaxpr(partial(_readings.convolve, call=call))(*operands).jaxpr
    found = (operation(equation.primitive, equation.params) for equation in jaxpr.eqns)
    return tuple(filter(None, found))


def _refusal(call: Call) -> str:
    """Say why XLA computes a call as it is written: cuDNN computes no part of it, and XLA can."""
    reasons = []
    for each in operations(call):
        *_, result = ROLES[each.op]
        steps = each.lowered()
        if not all(step.reason for step in steps):
            return ""
        if not _taps.is_needless(each.spec.num_spatial, each.spec.dtype(result)):
            return ""
        reasons += [step.reason for step in steps]
    return "; ".join(dict.fromkeys(reasons))
