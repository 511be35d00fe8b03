# SPDX-License-Identifier: Apache-2.0
"""What each device computes of a convolution that is split over a mesh."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import _activations, _halo, _sharding
from ._dtypes import accumulator
from ._halo import Line
from ._sharding import Split
from ._spec import ROLES, ConvSpec, Epilogue, Layout

Bind = Callable[..., jax.Array]
"""Computes a whole convolution, with its epilogue, on one device."""


def compute(
    a: jax.Array,
    b: jax.Array,
    *addends: jax.Array,
    op: str,
    spec: ConvSpec,
    layout: Layout,
    epilogue: Epilogue,
    split: Split,
    mesh: Mapping[str, int],
    bind: Bind,
) -> jax.Array:
    """Compute a device's part of the result from its parts of the operands.

    Args:
      a: the part of the first operand.
      b: the part of the second.
      *addends: parts of residual and bias, those that `epilogue` says there are.
      op: "fprop", "dgrad" or "wgrad".
      spec: of the whole convolution.
      layout: of it.
      epilogue: of it.
      split: how it is split.
      mesh: the sizes of mesh axes.
      bind: computes what one device does.
    """
    local = _sharding.local_spec(spec, split, mesh)
    result = ROLES[op][2]
    finish: list[Callable[[jax.Array], jax.Array]] = []
    for dimension in range(spec.num_spatial):
        axes = split.get(_sharding.positions(dimension), ())
        if not axes:
            continue
        given: dict[str, Any] = {
            "layout": layout, "dimension": dimension,
            "line": Line(axes, _sharding.parts(split, _sharding.positions(dimension), mesh)),
        }  # fmt: skip
        if op == "dgrad":
            a, local, own_part = _halo.dgrad(a, local, **given)
            finish.append(own_part)
        else:
            if op == "wgrad":
                b = _halo.own(b, local, **given)
            a, local = _halo.fprop(a, local, **given)
    summed = sum((split.get(factor, ()) for factor in _sharding.summed(op, spec)), ())
    if not summed and not finish:
        return bind(a, b, *addends, op=op, spec=local, layout=layout, epilogue=epilogue)
    if summed:
        local = _with_wide_sums(local, op)
    y = bind(a, b, op=op, spec=local, layout=layout, epilogue=Epilogue())
    for own_part in finish:
        y = own_part(y)
    if summed:
        y = lax.convert_element_type(lax.psum(y, summed), spec.dtype(result))
    if epilogue == Epilogue():
        return y
    return _activations.finish(y, *addends, epilogue=epilogue, axis=layout.axis(result, 1))


def _with_wide_sums(spec: ConvSpec, op: str) -> ConvSpec:
    """Have a device's sums kept in 16 bits or more, since they are still to be added up."""
    first, second, result = ROLES[op]
    dtype = spec.dtype(result)
    if jnp.dtype(dtype).itemsize > 1:
        return spec
    wide = accumulator(spec.dtype(first), spec.dtype(second), dtype)
    return replace(spec, dtypes=spec.dtypes._replace(**{result: wide}))
