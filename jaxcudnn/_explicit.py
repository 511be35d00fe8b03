# SPDX-License-Identifier: Apache-2.0
"""Convolutions of arrays whose types say how they are divided: explicit sharding.

How arrays are divided is known when the convolution is traced, so it becomes a `jax.shard_map` in
which each device computes its part. JAX differentiates that.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import jax
from jax.sharding import AxisType

from . import _per_device, _sharding
from ._per_device import Bind
from ._sharding import MAPPED, Axes, Split, Tensor
from ._spec import ROLES, ConvSpec, Epilogue, Layout


def is_explicit(*arrays: jax.Array) -> bool:
    """Say whether the type of an array says that it is divided."""
    return any(axes for array in arrays for axes in jax.typeof(array).sharding.spec.partitions)


def convolve(
    *arrays: jax.Array,
    op: str,
    spec: ConvSpec,
    layout: Layout,
    epilogue: Epilogue,
    bind: Bind,
    mapped_axes: Sequence[int | None] | None = None,
) -> jax.Array:
    """Compute a convolution of which some operand is divided over explicit mesh axes.

    Args:
      *arrays: the operands, then residual and bias, those that `epilogue` says there are.
      op: "fprop", "dgrad" or "wgrad".
      spec: of the whole convolution.
      layout: of it.
      epilogue: of it.
      bind: computes what one device does.
      mapped_axes: those over which `vmap` maps the arrays. The result's is the first.

    Raises:
      ValueError: if it cannot be computed in parts that are divided so.
    """
    types = [jax.typeof(array) for array in arrays]
    mesh = next(type_.sharding.mesh for type_ in types if any(type_.sharding.spec.partitions))
    sizes = dict(mesh.shape)
    *operands, result = _sharding.operand_factors(op, spec, layout, epilogue)
    mapped = 1
    if mapped_axes is not None:
        for index, axis in enumerate(mapped_axes):
            if axis is not None:
                operands[index] = (*operands[index][:axis], (MAPPED,), *operands[index][axis:])
                mapped = arrays[index].shape[axis]
        result = ((MAPPED,), *result)
    tensors = [
        Tensor(each, _sharding.axes_of(type_.sharding.spec, type_.ndim), type_.size)
        for each, type_ in zip(operands, types, strict=True)
    ]
    split, unused = _sharding.choose(tensors, spec, sizes, mapped)
    _check(tensors, split, unused, sizes, op, spec)
    compute = partial(
        _per_device.compute, op=op, spec=spec, layout=layout, epilogue=epilogue, split=split,
        mesh=sizes, bind=bind,
    )  # fmt: skip
    if mapped_axes is not None:
        compute = jax.vmap(compute, tuple(mapped_axes))
    in_specs = tuple(_sharding.partition_spec(split, each) for each in operands)
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    names = {name for name, kind in kinds if kind == AxisType.Explicit}
    divided = jax.shard_map(
        compute,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=_sharding.partition_spec(split, result),
        axis_names=names,
    )

    def run(*arrays: jax.Array) -> jax.Array:
        return divided(*map(jax.sharding.reshard, arrays, in_specs))

    return jax.jit(run, inline=True)(*arrays)


def _check(
    tensors: Sequence[Tensor],
    split: Split,
    unused: Axes,
    mesh: Mapping[str, int],
    op: str,
    spec: ConvSpec,
) -> None:
    """Check that nothing has to move but what types do not say is divided."""
    for tensor in tensors:
        for factors, axes in zip(tensor.factors, tensor.axes, strict=True):
            given = sum((split.get(factor, ()) for factor in factors), ())
            if any(mesh[axis] > 1 and axis not in given for axis in axes):
                raise ValueError(
                    f"jaxcudnn.conv_{op}: a mesh axis must divide operands by the same one of "
                    f"images, channels, groups and positions, and evenly, got "
                    f"{_sharding.describe(spec, op)} divided by {_in_words(tensors)}; use "
                    f"jax.sharding.reshard"
                )
    for i, (x, y) in enumerate(zip(spec.x_shape[2:], spec.y_shape[2:], strict=True)):
        count = _sharding.parts(split, _sharding.positions(i), mesh)
        result = {"x": x, "y": y}.get(ROLES[op][2], count)
        if result % count:
            raise ValueError(
                f"jaxcudnn.conv_{op}: the number of devices must divide the result's positions, "
                f"got {result} over {count} devices in {_sharding.describe(spec, op)}; change the "
                f"padding, or use jax.sharding.reshard"
            )


def _in_words(tensors: Sequence[Tensor]) -> str:
    return " and ".join(
        "P(" + ", ".join("+".join(map(repr, axes)) or "None" for axes in tensor.axes) + ")"
        for tensor in tensors
    )
