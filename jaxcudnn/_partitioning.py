# SPDX-License-Identifier: Apache-2.0
"""Convolutions in programs that XLA divides among devices: automatic sharding.

XLA decides how arrays are divided after JAX has lowered a program, so a convolution there is a call
of JAX's `custom_partitioning`: it tells XLA which dimensions belong together, and is told how they
are divided. Programs for one device have none of that, and neither has what is inside
`jax.shard_map`.
"""

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import jax
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding

from . import _per_device, _sharding
from ._options import xla_is_deterministic
from ._per_device import Bind
from ._sharding import Axes, Tensor
from ._spec import ConvSpec, Epilogue, Layout

try:  # without it JAX does not say which devices a program is for; there is no public way
    from jax._src.dispatch import prim_requires_devices_during_lowering as _requiring_devices
except ImportError:
    _requiring_devices = None

Rule = Callable[..., Any]
"""A lowering rule."""

_SPLIT = "jaxcudnn_split"
"""The frontend attribute that tells calls apart which differ in nothing else that XLA is shown."""


def needs_devices(primitive: Primitive) -> None:
    """Have JAX say for which devices a program with this primitive is lowered."""
    if _requiring_devices is not None:
        _requiring_devices.add(primitive)


def divisible(whole: Rule, formula: Rule, bind: Bind, **fixed: Any) -> Rule:
    """Give the lowering rule of a primitive that XLA may have to divide.

    Args:
      whole: its rule where one device computes all of it.
      formula: a rule that is in XLA's own operations, which it can divide.
      bind: computes a part on one device.
      **fixed: parameters that the primitive does not have, since they are always the same.
    """
    partitioned = mlir.lower_fun(partial(_partitioned, bind=bind, **fixed), multiple_results=False)

    def lower(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        if not _is_divided(ctx):
            return whole(ctx, *operands, **params)
        if not _is_partitionable(ctx):
            return formula(ctx, *operands, **params)
        return partitioned(ctx, *operands, **params)

    return lower


def _is_divided(ctx: mlir.LoweringRuleContext) -> bool:
    """Say whether XLA is to divide this part of a program among devices."""
    axes = ctx.module_context.axis_context
    if isinstance(axes, mlir.SPMDAxisContext):
        automatic = set(axes.mesh.shape) - axes.manual_axes
        return math.prod(axes.mesh.shape[name] for name in automatic) > 1
    if axes.num_devices == 1 or not isinstance(axes, mlir.ShardingContext):
        return False
    # Types say how arrays are divided over explicit axes, and these are not divided.
    types = ctx.avals_in[0].sharding.mesh.axis_types
    return not types or any(kind != AxisType.Explicit for kind in types)


def _is_partitionable(ctx: mlir.LoweringRuleContext) -> bool:
    """Say whether XLA can be told how to divide a call of ours.

    Not where a program is exported, since a Python function does the telling, nor where some mesh
    axes are manual and others are not.
    """
    module = ctx.module_context
    axes = module.axis_context
    return (
        _requiring_devices is not None
        and isinstance(axes, mlir.ShardingContext)
        and axes.device_assignment is not None
        and axes.abstract_mesh is not None
        and not module.lowering_parameters.for_export
        and jax.config.jax_use_shardy_partitioner  # pyright: ignore[reportAttributeAccessIssue]
    )


def _partitioned(
    *arrays: jax.Array,
    bind: Bind,
    op: str,
    spec: ConvSpec,
    layout: Layout,
    epilogue: Epilogue = Epilogue(),  # noqa: B008
) -> jax.Array:
    params = {"op": op, "spec": spec, "layout": layout, "epilogue": epilogue}
    call = custom_partitioning(lambda *arrays: bind(*arrays, **params))
    call.def_partition(partial(_partition, bind=bind, **params), sharding_rule=_rule(**params))
    # XLA's cache of compiled programs can be told not to look at the function.
    told = (sorted(params.items(), key=lambda item: item[0]), xla_is_deterministic())
    digest = hashlib.sha256(repr(told).encode()).hexdigest()
    with set_xla_metadata(**{_SPLIT: digest}):
        return call(*arrays)


def _rule(op: str, spec: ConvSpec, layout: Layout, epilogue: Epilogue) -> SdyShardingRule:
    """Tell XLA which dimensions belong together."""
    tensors = _sharding.operand_factors(op, spec, layout, epilogue)
    # Of a dimension with two factors XLA would split the inner over a part of a mesh axis, too,
    # which has no name.
    *operands, result = (ArrayMapping(*(each[0] for each in tensor)) for tensor in tensors)
    order = list(dict.fromkeys(each[0] for tensor in tensors for each in tensor))
    summed = set(_sharding.summed(op, spec))
    positions = {_sharding.positions(i) for i in range(spec.num_spatial)} - summed
    named = {*_sharding.factor_sizes(spec), *positions, *summed}
    return SdyShardingRule(
        tuple(operands),
        (result,),
        reduction_factors=tuple(f for f in order if f in summed),
        permutation_factors=tuple(f for f in order if f in positions),
        need_replication_factors=tuple(f for f in order if f not in named),
    )


def _partition(
    mesh: Mesh, operands: tuple[Any, ...], result: Any, *, bind: Bind, **params: Any
) -> tuple[Mesh, Callable[..., jax.Array], NamedSharding, tuple[NamedSharding, ...]]:
    """Say how operands and result are to be divided, and what each device computes."""
    op, spec = params["op"], params["spec"]
    arrays = (*operands, result)
    factors = _sharding.operand_factors(**params)
    tensors = [
        Tensor(each, _sharding.axes_of(array.sharding.spec, array.ndim), _bytes(array))
        for each, array in zip(factors, arrays, strict=True)
    ]
    split, unused = _sharding.choose(tensors, spec, mesh.shape)
    if unused:
        _warn_of_replication(unused, op, spec, mesh.shape)
    shardings = [NamedSharding(mesh, _sharding.partition_spec(split, each)) for each in factors]
    compute = partial(_per_device.compute, split=split, mesh=dict(mesh.shape), bind=bind, **params)
    automatic = mesh.abstract_mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))

    def part(*arrays: jax.Array) -> jax.Array:
        # Parts have no types that say how they are divided, over whatever axes.
        with jax.sharding.use_abstract_mesh(automatic):
            return compute(*arrays)

    return mesh, part, shardings[-1], tuple(shardings[:-1])


def _bytes(array: Any) -> int:
    return array.size * array.dtype.itemsize


@cache
def _told_of_replication() -> list[bool]:
    return []


def _warn_of_replication(unused: Axes, op: str, spec: ConvSpec, mesh: Mapping[str, int]) -> None:
    """Warn once in a process."""
    if _told_of_replication():
        return
    _told_of_replication().append(True)
    axes = ", ".join(f"{axis!r} of {mesh[axis]} devices" for axis in unused)
    warnings.warn(
        f"jaxcudnn: arrays of a convolution must be divided by images, channels, groups or "
        f"positions, and all but positions evenly, to be computed in parts, got "
        f"{_sharding.describe(spec, op)} divided otherwise over the mesh axis {axes}. All devices "
        f"along it compute the same, as of other convolutions like it; choose sizes that the "
        f"number of devices divides, or shard other dimensions",
        RuntimeWarning,
        stacklevel=2,
    )
