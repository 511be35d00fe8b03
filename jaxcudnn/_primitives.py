# SPDX-License-Identifier: Apache-2.0
"""The three primitives, and how JAX transforms them.

A convolution is one trilinear form, <dy, conv(x, w)>, linear in x, in w and in dy. Each primitive
takes arrays for two of the roles x, w and y and computes what pairs with the third:

    primitive         computes   transposed in its 1st operand   transposed in its 2nd operand
    fprop(x, w)       y          dgrad(ct, w)                    wgrad(x, ct)
    dgrad(dy, w)      dx         fprop(ct, w)                    wgrad(ct, dy)
    wgrad(x, dy)      dw         dgrad(dy, ct)                   fprop(x, ct)

Every entry is one rule: put the cotangent in the role that the primitive computed, and compute the
role that is asked for. The three close over differentiation of any order and either mode.

Each of the form's indices other than positions belongs to two roles: images N to x and y, input
channels C to x and w, output channels K to w and y. `vmap` over one operand folds the mapped axis
into the index that this operand shares with the result. Over both operands it makes groups, which
are an index that all three roles share.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from . import _explicit, _lowering, _partitioning, _reference
from ._axes import fold, unfold
from ._explicit import is_explicit
from ._spec import ROLES, ConvSpec, Epilogue, Layout, Role
from ._varying import equally_varying, vary_as

conv_fprop_p = Primitive("conv_fprop")
conv_dgrad_p = Primitive("conv_dgrad")
conv_wgrad_p = Primitive("conv_wgrad")


class _Operation(NamedTuple):
    primitive: Primitive
    name: str
    reference: Callable[..., jax.Array]

    @property
    def operands(self) -> tuple[Role, Role]:
        return ROLES[self.name][:2]


_COMPUTING: dict[Role, _Operation] = {
    "y": _Operation(conv_fprop_p, "fprop", _reference.fprop),
    "x": _Operation(conv_dgrad_p, "dgrad", _reference.dgrad),
    "w": _Operation(conv_wgrad_p, "wgrad", _reference.wgrad),
}


def fprop(x: jax.Array, w: jax.Array, *, spec: ConvSpec, layout: Layout) -> jax.Array:
    """Compute y from x and w."""
    return compute({"x": x, "w": w}, spec=spec, layout=layout)


def dgrad(dy: jax.Array, w: jax.Array, *, spec: ConvSpec, layout: Layout) -> jax.Array:
    """Compute dx from dy and w."""
    return compute({"y": dy, "w": w}, spec=spec, layout=layout)


def wgrad(x: jax.Array, dy: jax.Array, *, spec: ConvSpec, layout: Layout) -> jax.Array:
    """Compute dw from x and dy."""
    return compute({"x": x, "y": dy}, spec=spec, layout=layout)


def compute(arrays: Mapping[Role, jax.Array], *, spec: ConvSpec, layout: Layout) -> jax.Array:
    """Compute the one role of x, w and y that `arrays` leaves out.

    Arrays are those of the user: `layout` says which logical dimension each axis is.
    """
    (result,) = {"x", "w", "y"} - set(arrays)
    operation = _COMPUTING[result]
    operands = equally_varying(*(arrays[role] for role in operation.operands))
    if is_explicit(*operands):
        return _explicit.convolve(
            *operands, op=operation.name, spec=spec, layout=layout, epilogue=Epilogue(), bind=bind
        )
    return operation.primitive.bind(*operands, spec=spec, layout=layout)


def _abstract_eval(
    a: ShapedArray, b: ShapedArray, *, result: Role, spec: ConvSpec, layout: Layout
) -> ShapedArray:
    for aval, role in zip((a, b), _COMPUTING[result].operands, strict=True):
        expected = layout.to_array(role, spec.shape(role))
        dtype = spec.dtype(role)
        assert aval.shape == expected and aval.dtype == dtype, (aval, role, expected, spec)
    assert a.manual_axis_type.varying == b.manual_axis_type.varying, (a, b)
    # An update, and not a new aval, keeps the mesh axes over which the operands vary.
    return a.update(
        shape=layout.to_array(result, spec.shape(result)),
        dtype=jnp.dtype(spec.dtype(result)),
        weak_type=a.weak_type and b.weak_type,
    )


def _jvp(primals, tangents, *, result: Role, spec: ConvSpec, layout: Layout):
    """Differentiate by the product rule, through `compute` so that types vary as they should."""
    roles = _COMPUTING[result].operands
    arrays = dict(zip(roles, primals, strict=True))
    terms = [
        compute(arrays | {role: tangent}, spec=spec, layout=layout)
        for role, tangent in zip(roles, tangents, strict=True)
        if not isinstance(tangent, ad.Zero)
    ]
    out = compute(arrays, spec=spec, layout=layout)
    first, *others = equally_varying(*terms)
    return out, sum(others, first)


def _transpose(
    ct: jax.Array, a, b, *, result: Role, wanted: int, spec: ConvSpec, layout: Layout
) -> jax.Array:
    """Compute the cotangent of operand number `wanted`, of which only the aval is known."""
    roles = _COMPUTING[result].operands
    other = 1 - wanted
    gradient = compute({result: ct, roles[other]: (a, b)[other]}, spec=spec, layout=layout)
    if is_explicit(gradient):  # as a cotangent may be of what is not
        gradient = jax.sharding.reshard(gradient, (a, b)[wanted].aval.sharding)
    return gradient


class _Fold(NamedTuple):
    axis: int
    """The logical dimension that takes the mapped axis in."""
    outer: int
    """How much of that dimension stays outside the mapped axis, as in `fold`."""


def _folds(spec: ConvSpec, roles: frozenset[Role]) -> dict[Role, _Fold]:
    """Say where a mapped axis goes in each of the roles that have it.

    Groups stay outermost in the dimensions that they divide; new ones go outside the old.
    """
    return {
        frozenset("xy"): {"x": _Fold(0, 1), "y": _Fold(0, 1)},
        frozenset("wy"): {"w": _Fold(0, spec.groups), "y": _Fold(1, spec.groups)},
        frozenset("xw"): {"x": _Fold(1, spec.groups), "w": _Fold(1, 1)},
        frozenset("xwy"): {"x": _Fold(1, 1), "w": _Fold(0, 1), "y": _Fold(1, 1)},
    }[roles]


def _batched_spec(spec: ConvSpec, folds: dict[Role, _Fold], b: int) -> ConvSpec:
    def scaled(role: Role) -> tuple[int, ...]:
        axis = folds[role].axis if role in folds else None
        return tuple(size * b if i == axis else size for i, size in enumerate(spec.shape(role)))

    groups = spec.groups * b if len(folds) == 3 else spec.groups
    return replace(spec, x_shape=scaled("x"), w_shape=scaled("w"), groups=groups)


def _batch(
    arrays: tuple[jax.Array, jax.Array],
    mapped_axes: tuple[int | None, int | None],
    *,
    result: Role,
    spec: ConvSpec,
    layout: Layout,
) -> tuple[jax.Array, int]:
    if is_explicit(*arrays):
        y = _explicit.convolve(
            *arrays, op=_COMPUTING[result].name, spec=spec, layout=layout, epilogue=Epilogue(),
            bind=bind, mapped_axes=mapped_axes,
        )  # fmt: skip
        return y, 0
    operands = dict(zip(_COMPUTING[result].operands, arrays, strict=True))
    mapped = {
        role: axis for role, axis in zip(operands, mapped_axes, strict=True) if axis is not None
    }
    b = next(operands[role].shape[axis] for role, axis in mapped.items())
    if b == 0:  # no number of groups is 0 times another
        empty = jnp.zeros((0, *layout.to_array(result, spec.shape(result))), spec.dtype(result))
        return vary_as(empty, arrays[0]), 0

    folds = _folds(spec, frozenset({result, *mapped}))
    for role, source in mapped.items():
        axis, outer = folds[role]
        operands[role] = fold(operands[role], source, layout.axis(role, axis), outer)
    y = compute(operands, spec=_batched_spec(spec, folds, b), layout=layout)
    axis, outer = folds[result]
    axis = layout.axis(result, axis)
    return unfold(y, axis, b, outer), axis


def _register(result: Role, operation: _Operation) -> None:
    primitive = operation.primitive
    primitive.def_impl(partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(partial(_abstract_eval, result=result))
    ad.defbilinear(
        primitive,
        partial(_transpose, result=result, wanted=0),
        partial(_transpose, result=result, wanted=1),
    )
    ad.primitive_jvps[primitive] = partial(_jvp, result=result)
    batching.primitive_batchers[primitive] = partial(_batch, result=result)
    formula = mlir.lower_fun(operation.reference, multiple_results=False)
    mlir.register_lowering(primitive, formula)
    divisible = partial(_partitioning.divisible, bind=bind, op=operation.name)
    mlir.register_lowering(primitive, divisible(formula, formula), platform="cpu")
    cuda = _lowering.lower_cuda(operation.name, operation.reference)
    of_xla = _lowering.lower_formula(operation.name, operation.reference)
    mlir.register_lowering(primitive, divisible(cuda, of_xla), platform="cuda")
    _partitioning.needs_devices(primitive)


def bind(
    a: jax.Array, b: jax.Array, *, op: str, spec: ConvSpec, layout: Layout, epilogue: Epilogue
) -> jax.Array:
    """Compute what one device does of a convolution that is split, and that has no epilogue."""
    assert epilogue == Epilogue(), epilogue
    first, second, _ = ROLES[op]
    return compute({first: a, second: b}, spec=spec, layout=layout)


for _result, _operation in _COMPUTING.items():
    _register(_result, _operation)
