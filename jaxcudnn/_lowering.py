# SPDX-License-Identifier: Apache-2.0
"""From a `ConvSpec` to XLA's custom call on CUDA: attributes, memory layouts and workspace."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from . import _load
from ._spec import ConvSpec, Layout, Role

WORKSPACE_LIMIT = 1 << 30
"""Bytes; on a machine with a GPU, plans that need more scratch memory are not considered."""

WORKSPACE_BUDGET = 64 << 20
"""Bytes that a program reserves which is lowered where there is no GPU to ask for the plan. The
plan is then chosen where the program runs, among those that fit."""

LARGEST = 2**31 - 1
"""The largest size, stride, padding or dilation that cuDNN is given."""

_ALIGNMENT = 256  # of every part of the workspace, as XLA aligns its own buffers


def lower_cuda(
    op: str, operands: tuple[Role, Role], result: Role, reference: Callable[..., jax.Array]
) -> Callable[..., Any]:
    """Give the lowering rule for CUDA of one primitive.

    Args:
      op: what the extension calls the operation: "fprop", "dgrad" or "wgrad".
      operands: the roles of the primitive's operands.
      result: the role of its result.
      reference: the same operation in terms of `lax`, for what cuDNN cannot do.
    """
    rule = partial(_call, op=op, operands=operands, result=result, reference=reference)
    return mlir.lower_fun(rule, multiple_results=False)


def _call(
    a: jax.Array,
    b: jax.Array,
    *,
    op: str,
    operands: tuple[Role, Role],
    result: Role,
    reference: Callable[..., jax.Array],
    spec: ConvSpec,
    layout: Layout,
) -> jax.Array:
    attributes = _attributes(op, spec)
    dtype = jnp.dtype(spec.dtype)
    filter_bytes = math.prod(spec.w_shape) * dtype.itemsize
    workspace = _workspace(attributes, filter_bytes) if _suits_cudnn(attributes) else None
    if workspace is None:
        return reference(a, b, spec=spec, layout=layout)
    out = jax.ShapeDtypeStruct(layout.to_array(result, spec.shape(result)), dtype)
    call = jax.ffi.ffi_call(
        _load.TARGET,
        (out, jax.ShapeDtypeStruct((workspace,), jnp.uint8)),
        input_layouts=[layout.memory_order(role) for role in operands],
        output_layouts=[layout.memory_order(result), (0,)],
    )
    # The workspace is a result only so that XLA plans its memory with everything else.
    return call(a, b, **{name: _ffi_attribute(value) for name, value in attributes.items()})[0]


def _suits_cudnn(attributes: dict[str, Any]) -> bool:
    """Say whether cuDNN may be asked: it takes neither empty arrays nor numbers beyond 32 bits.

    It does not refuse the latter but loses their high bits, and divides by what is left. Symbolic
    sizes, as `jax.export` has them, are not known when it would have to be asked.
    """
    lists = [value for value in attributes.values() if isinstance(value, list)]
    if not all(isinstance(number, int) for numbers in lists for number in numbers):
        return False
    sides = (attributes[name] for name in ("pre_padding", "post_padding"))
    padded = map(sum, zip(attributes["x"][2:], *sides, strict=True))
    if max(*padded, *(number for numbers in lists for number in numbers)) > LARGEST:
        return False
    return not any(0 in attributes[role] for role in "xwy")


def _workspace(attributes: dict[str, Any], filter_bytes: int) -> int | None:
    """Give the bytes of scratch memory to reserve, or None if cuDNN has no plan.

    Beside what the plan needs there is room for a copy of the filter: filters are often slices of
    one flat parameter vector, which XLA passes in place, at addresses that fast plans refuse.
    """
    _load.native()
    device = _load.local_device()
    if device is None:
        attributes["workspace_limit"] = needed = WORKSPACE_BUDGET
    else:
        plan = _load.plan(attributes, device)
        if plan is None:
            return None
        needed = plan.workspace_size
    return _round_up(needed) + _round_up(filter_bytes)


def _round_up(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _attributes(op: str, spec: ConvSpec) -> dict[str, Any]:
    """Describe a convolution as the extension reads it, with at least two spatial dimensions.

    A missing one comes first: with the long dimension first instead, cuDNN has no tensor-core plan
    for some filter gradients.
    """
    missing = max(0, 2 - spec.num_spatial)
    one, zero = [1] * missing, [0] * missing

    def lifted(role: Role) -> list[int]:
        shape = spec.shape(role)
        return [*shape[:2], *one, *shape[2:]]

    return {
        "op": op,
        "x": lifted("x"),
        "w": lifted("w"),
        "y": lifted("y"),
        "stride": [*one, *spec.strides],
        "pre_padding": [*zero, *(low for low, _ in spec.padding)],
        "post_padding": [*zero, *(high for _, high in spec.padding)],
        "dilation": [*one, *spec.dilation],
        "flip": spec.flip,
        "dtype": spec.dtype,
        "allow_tf32": spec.allow_tf32,
        "workspace_limit": WORKSPACE_LIMIT,
    }


def _ffi_attribute(value: Any) -> Any:
    return np.asarray(value, np.int64) if isinstance(value, list) else value


_load.register()
