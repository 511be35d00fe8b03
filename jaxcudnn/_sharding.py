# SPDX-License-Identifier: Apache-2.0
"""How each convolution splits over a mesh of devices.

A convolution has these indices, its factors, each of which belongs to two roles or, of groups, to
all three:

    images N        x and y        summed over in wgrad
    inputs C        x and w        summed over in fprop
    outputs K       w and y        summed over in dgrad
    groups G        x, w and y     outermost in the channels of x and y and in the first of w
    positions       x and y        summed over in wgrad; neighbours need some of each other's
    window          w              not split

To split a factor over mesh axes is to give each device a part of it, in all arrays that have it.
Where the factor is one that the operation sums over, the sums of all devices are added up. A mesh
axis splits one factor at most; where arrays arrive with an axis in several, the factor that moves
the fewest bytes keeps it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from jax.sharding import PartitionSpec

from ._spec import ROLES, ConvSpec, Epilogue, Layout, Role

Axes = tuple[str, ...]
"""Names of mesh axes, from the outermost."""

Split = Mapping[str, Axes]
"""The mesh axes that split each factor, of factors that are split."""

IMAGES, INPUTS, OUTPUTS, GROUPS = "n", "c", "k", "g"
MAPPED = "b"
"""An axis over which `vmap` maps a convolution."""

_SUMMED = {"fprop": INPUTS, "dgrad": OUTPUTS, "wgrad": IMAGES}


class Tensor(NamedTuple):
    """An operand or a result, as it is divided before anything is decided."""

    factors: tuple[tuple[str, ...], ...]
    """Of each axis, from the outermost."""
    axes: tuple[Axes, ...]
    """The mesh axes over which each axis is divided."""
    bytes: int


def positions(dimension: int) -> str:
    """Name the factor of one spatial dimension, counted from 0."""
    return f"s{dimension}"


def factors(spec: ConvSpec, role: Role) -> tuple[tuple[str, ...], ...]:
    """Give the factors of each logical dimension of x, w or y.

    A dimension of one position has a factor of its own, which is not split.
    """
    is_grouped = spec.groups > 1
    inputs = (GROUPS, INPUTS) if spec.w_shape[1] > 1 else (GROUPS,)
    outputs = (GROUPS, OUTPUTS) if spec.w_shape[0] > spec.groups else (GROUPS,)
    inputs, outputs = (inputs, outputs) if is_grouped else ((INPUTS,), (OUTPUTS,))
    if role == "w":
        return (outputs, (INPUTS,), *((f"r{i}",) for i in range(spec.num_spatial)))
    pairs = enumerate(zip(spec.x_shape[2:], spec.y_shape[2:], strict=True))
    spatial = ((positions(i) if min(pair) > 1 else f"{role}{i}",) for i, pair in pairs)
    return ((IMAGES,), inputs if role == "x" else outputs, *spatial)


def factor_sizes(spec: ConvSpec) -> dict[str, int]:
    """Give the sizes of all factors but positions and window, which have one for each role."""
    return {
        IMAGES: spec.x_shape[0],
        INPUTS: spec.w_shape[1],
        OUTPUTS: spec.w_shape[0] // spec.groups,
        GROUPS: spec.groups,
    }


def array_factors(spec: ConvSpec, layout: Layout, role: Role) -> tuple[tuple[str, ...], ...]:
    """Give the factors of each axis of the user's array."""
    logical = factors(spec, role)
    axes = getattr(layout, role)
    return tuple(logical[axes.index(axis)] for axis in range(len(axes)))


def summed(op: str, spec: ConvSpec) -> tuple[str, ...]:
    """Give the factors that an operation sums over, in the order in which operands have them."""
    if op != "wgrad":
        return (_SUMMED[op],)
    return (IMAGES, *(positions(i) for i in range(spec.num_spatial)))


def partition_spec(split: Split, dimensions: Sequence[Sequence[str]]) -> PartitionSpec:
    """Say how an array with these factors is divided."""
    divided = (sum((split.get(factor, ()) for factor in each), ()) for each in dimensions)
    return PartitionSpec(*(axes or None for axes in divided))


def axes_of(spec: PartitionSpec, rank: int) -> tuple[Axes, ...]:
    """Give the mesh axes over which each axis of an array is divided."""
    entries = (*spec, *[None] * rank)[:rank]
    return tuple(
        () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        for entry in entries
    )


def operand_factors(
    op: str, spec: ConvSpec, layout: Layout, epilogue: Epilogue
) -> list[tuple[tuple[str, ...], ...]]:
    """Give the factors of each axis of each operand, and of the result."""
    first, second, result = (array_factors(spec, layout, role) for role in ROLES[op])
    channels = result[layout.axis(ROLES[op][2], 1)]
    return [first, second, *[result] * epilogue.residual, *[(channels,)] * epilogue.bias, result]


def choose(
    tensors: Sequence[Tensor], spec: ConvSpec, mesh: Mapping[str, int], mapped: int = 1
) -> tuple[dict[str, Axes], Axes]:
    """Choose the factor that each mesh axis splits.

    Args:
      tensors: operands and result.
      spec: of the convolution.
      mesh: the sizes of mesh axes.
      mapped: how many such convolutions there are, along a mapped axis.

    Returns:
      The split, and the axes that divide an array and can split nothing.
    """
    sizes = {MAPPED: mapped, **factor_sizes(spec)}
    largest_first = sorted(tensors, key=lambda tensor: -tensor.bytes)
    votes: dict[str, dict[str, int]] = {}
    for tensor in largest_first:
        for axis, factor in _wanted(tensor, sizes, mesh):
            counts = votes.setdefault(axis, {})
            counts[factor] = counts.get(factor, 0) + tensor.bytes
    winners = {
        axis: max(counts, key=lambda factor: counts[factor]) for axis, counts in votes.items()
    }
    split: dict[str, Axes] = {}
    for tensor in largest_first:
        for axis, factor in _wanted(tensor, sizes, mesh):
            if winners[axis] == factor and axis not in split.get(factor, ()):
                split[factor] = (*split.get(factor, ()), axis)
    split = {factor: _even(axes, sizes.get(factor), mesh) for factor, axes in split.items()}
    if spec.groups > 1 and parts(split, GROUPS, mesh) < spec.groups:
        # A part of each group's channels is in as many pieces as there are groups.
        split = {factor: axes for factor, axes in split.items() if factor not in (INPUTS, OUTPUTS)}
    split = {factor: axes for factor, axes in split.items() if axes}
    used = set(sum(split.values(), ()))
    dividing = (axis for tensor in tensors for axes in tensor.axes for axis in axes)
    unused = tuple(dict.fromkeys(a for a in dividing if a not in used and mesh[a] > 1))
    return split, unused


def _wanted(tensor: Tensor, sizes: Mapping[str, int], mesh: Mapping[str, int]):
    """Give the mesh axes of a tensor with the factor that each would split."""
    for dimension, axes in zip(tensor.factors, tensor.axes, strict=True):
        remaining = [axis for axis in axes if mesh[axis] > 1]
        for factor in dimension:
            if factor not in sizes:
                if factor.startswith("s"):
                    yield from ((axis, factor) for axis in remaining)
                break
            taken = _even(tuple(remaining), sizes[factor], mesh)
            yield from ((axis, factor) for axis in taken)
            remaining = remaining[len(taken) :]
            if math.prod(mesh[axis] for axis in taken) < sizes[factor]:
                break


def _even(axes: Axes, size: int | None, mesh: Mapping[str, int]) -> Axes:
    """Give the first of these axes, as many as divide a factor evenly; positions need not be."""
    if size is None:
        return axes
    for index, axis in enumerate(axes):
        if size % mesh[axis]:
            return axes[:index]
        size //= mesh[axis]
    return axes


def parts(split: Split, factor: str, mesh: Mapping[str, int]) -> int:
    """Say into how many parts a factor is split."""
    return math.prod(mesh[axis] for axis in split.get(factor, ()))


def local_spec(spec: ConvSpec, split: Split, mesh: Mapping[str, int]) -> ConvSpec:
    """Give what one device computes, positions aside."""
    n, c, k, g = (parts(split, factor, mesh) for factor in (IMAGES, INPUTS, OUTPUTS, GROUPS))
    images, channels, *spatial = spec.x_shape
    outputs, inputs, *window = spec.w_shape
    return replace(
        spec,
        x_shape=(images // n, channels // (c * g), *spatial),
        w_shape=(outputs // (k * g), inputs // c, *window),
        groups=spec.groups // g,
    )


def describe(spec: ConvSpec, op: str) -> str:
    """Describe a convolution for a message."""
    first, second, result = (f"{role} {spec.shape(role)}" for role in ROLES[op])
    grouped = f" in {spec.groups} groups" if spec.groups > 1 else ""
    return f"{op} from {first} and {second} to {result}{grouped}"
