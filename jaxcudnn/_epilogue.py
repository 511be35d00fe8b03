# SPDX-License-Identifier: Apache-2.0
"""Convolutions with an epilogue: act(conv(a, b) + residual + bias), rounded once.

The primitive takes a and b, then residual and bias if there are any, for "fprop" or "dgrad": a
transposed convolution. With z for the sum,

    d act(z) = act'(z) (conv(da, b) + conv(a, db) + dresidual + dbias),

so derivatives are those of `_primitives`, and act' comes from the output where `_activations` says
so. Nothing else is then kept for the backward pass than a, b and the output. Where act' needs z, z
is what the primitive computes under differentiation, rounded, and XLA applies the activation to it.

What is not one primitive, or not real and floating-point, is a convolution and then an epilogue.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from . import _activations, _explicit, _lowering, _partitioning, _primitives, _readings, _reference
from ._axes import fold, unfold
from ._readings import Call
from ._spec import ROLES, ConvSpec, Epilogue, Layout, Role
from ._varying import equally_varying

conv_bias_act_p = Primitive("conv_bias_act")

_REFERENCES = {"fprop": _reference.fprop, "dgrad": _reference.dgrad}


class Extras(NamedTuple):
    """What a call has beside its convolution, checked."""

    residual: jax.Array | None = None
    """Of the shape and dtype of the result."""
    bias: jax.Array | None = None
    """Of shape (K,) and the dtype of the result."""
    activation: str | Callable[..., Any] = ""
    """A name of `_activations`, empty for none, or a function of the rounded sum."""

    @property
    def addends(self) -> list[jax.Array]:
        """Residual and bias, those that there are."""
        return [array for array in (self.residual, self.bias) if array is not None]

    @property
    def epilogue(self) -> Epilogue:
        """What may be fused."""
        name = self.activation if isinstance(self.activation, str) else ""
        return Epilogue(name, self.bias is not None, self.residual is not None)


def convolve(lhs: jax.Array, rhs: jax.Array, call: Call, extras: Extras) -> jax.Array:
    """Compute a call and what it has beside."""
    epilogue = extras.epilogue
    fusible = jnp.issubdtype(call.result_dtype, jnp.floating)
    one = _readings.as_one_primitive(lhs, rhs, call) if fusible and epilogue != Epilogue() else None
    if one is None:
        return finish(_readings.convolve(lhs, rhs, call), call.layout, extras)
    y = _bind(
        one.a, one.b, *extras.addends, op=one.op, spec=one.spec, layout=one.layout,
        epilogue=epilogue,
    )  # fmt: skip
    return y if isinstance(extras.activation, str) else extras.activation(y)


def finish(y: jax.Array, layout: Layout, extras: Extras) -> jax.Array:
    """Apply to a convolution's result what a call has beside."""
    if extras.epilogue != Epilogue():
        y = _activations.finish(
            y, *extras.addends, epilogue=extras.epilogue, axis=layout.axis("y", 1)
        )
    return y if isinstance(extras.activation, str) else extras.activation(y)


def _bind(
    *arrays: jax.Array, op: str, spec: ConvSpec, layout: Layout, epilogue: Epilogue
) -> jax.Array:
    if epilogue == Epilogue():
        return _convolve(*arrays, op=op, spec=spec, layout=layout)
    operands = equally_varying(*arrays)
    if _explicit.is_explicit(*operands):
        return _explicit.convolve(
            *operands, op=op, spec=spec, layout=layout, epilogue=epilogue, bind=_bind
        )
    return conv_bias_act_p.bind(*operands, op=op, spec=spec, layout=layout, epilogue=epilogue)


def _convolve(a: jax.Array, b: jax.Array, *, op: str, spec: ConvSpec, layout: Layout) -> jax.Array:
    first, second, _ = ROLES[op]
    return _primitives.compute({first: a, second: b}, spec=spec, layout=layout)


def _unfused(
    a: jax.Array,
    b: jax.Array,
    *addends: jax.Array,
    op: str,
    spec: ConvSpec,
    layout: Layout,
    epilogue: Epilogue,
    convolve: Callable[..., jax.Array] = _convolve,
) -> jax.Array:
    y = convolve(a, b, op=op, spec=spec, layout=layout)
    return _activations.finish(y, *addends, epilogue=epilogue, axis=_channels(op, layout))


def _channels(op: str, layout: Layout) -> int:
    return layout.axis(ROLES[op][2], 1)


def _abstract_eval(
    a: ShapedArray,
    b: ShapedArray,
    *addends: ShapedArray,
    op: str,
    spec: ConvSpec,
    layout: Layout,
    epilogue: Epilogue,
) -> ShapedArray:
    first, second, result = ROLES[op]

    def expected(role: Role) -> tuple[tuple[int, ...], str]:
        return layout.to_array(role, spec.shape(role)), spec.dtype(role)

    shape, dtype = expected(result)
    like_result = [(shape, dtype)] * epilogue.residual
    per_channel = [((spec.shape(result)[1],), dtype)] * epilogue.bias
    wanted = [expected(first), expected(second), *like_result, *per_channel]
    assert [(each.shape, each.dtype) for each in (a, b, *addends)] == wanted, (spec, epilogue)
    return a.update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False)


def _jvp(primals, tangents, *, op: str, spec: ConvSpec, layout: Layout, epilogue: Epilogue):
    first, second, result = ROLES[op]
    arrays = dict(zip((first, second), primals[:2], strict=True))
    terms = [
        _primitives.compute(arrays | {role: tangent}, spec=spec, layout=layout)
        for role, tangent in zip(arrays, tangents[:2], strict=True)
        if not isinstance(tangent, ad.Zero)
    ]
    remaining = list(tangents[2:])
    if epilogue.residual and not isinstance(dresidual := remaining.pop(0), ad.Zero):
        terms.append(dresidual)
    terms = [_activations.accumulated(term) for term in terms]
    if epilogue.bias and not isinstance(dbias := remaining.pop(0), ad.Zero):
        shape = layout.to_array(result, spec.shape(result))
        terms.append(_activations.spread(dbias, shape, _channels(op, layout)))
    total = sum(terms[1:], terms[0])

    dtype, name = spec.dtype(result), epilogue.activation
    bind = partial(_bind, *primals, op=op, spec=spec, layout=layout)
    if not name or _activations.ACTIVATIONS[name].of_output:
        out = saved = bind(epilogue=epilogue)
    else:
        saved = bind(epilogue=replace(epilogue, activation=""))
        out = _activations.activate(saved, name, dtype)
    # Where total varies over fewer mesh axes than the result does.
    total, saved = equally_varying(total, saved)
    return out, _activations.activation_grad(total, saved, name, dtype)


def _transpose(ct: jax.Array, *operands, **params) -> list[Any]:
    """Transpose what has no activation, as a function of all operands that are linear."""
    linear = {i: each.aval for i, each in enumerate(operands) if ad.is_undefined_primal(each)}

    def of_linear(*arrays: jax.Array) -> jax.Array:
        given = dict(enumerate(operands)) | dict(zip(linear, arrays, strict=True))
        return _unfused(*given.values(), **params)

    cotangents = iter(jax.linear_transpose(of_linear, *linear.values())(ct))
    return [next(cotangents) if i in linear else None for i in range(len(operands))]


def _batch(arrays, axes, *, op: str, spec: ConvSpec, layout: Layout, epilogue: Epilogue):
    """Fold an axis of a, and of the residual, into images; otherwise map the two parts."""
    b = next(
        array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None
    )
    others = [axes[1], *axes[2 + epilogue.residual :]]
    is_foldable = axes[0] is not None and all(axis is None for axis in others)
    if _explicit.is_explicit(*arrays):
        y = _explicit.convolve(
            *arrays, op=op, spec=spec, layout=layout, epilogue=epilogue, bind=_bind,
            mapped_axes=axes,
        )  # fmt: skip
        return y, 0
    if b == 0 or not is_foldable:
        unfused = partial(_unfused, op=op, spec=spec, layout=layout, epilogue=epilogue)
        return jax.vmap(unfused, tuple(axes))(*arrays), 0
    first, _, result = ROLES[op]
    images = {0: layout.axis(first, 0)}
    if epilogue.residual:
        images[2] = layout.axis(result, 0)
    folded = list(arrays)
    for index, target in images.items():
        array, axis = arrays[index], axes[index]
        if axis is None:
            array, axis = jnp.broadcast_to(array, (b, *array.shape)), 0
        folded[index] = fold(array, axis, target)
    n, *rest = spec.x_shape
    y = _bind(
        *folded, op=op, spec=replace(spec, x_shape=(b * n, *rest)), layout=layout,
        epilogue=epilogue,
    )  # fmt: skip
    target = layout.axis(result, 0)
    return unfold(y, target, b), target


def _lower(*arrays: jax.Array, op: str, **params) -> jax.Array:
    return _unfused(*arrays, op=op, convolve=_refer, **params)


def _refer(a: jax.Array, b: jax.Array, *, op: str, spec: ConvSpec, layout: Layout) -> jax.Array:
    return _REFERENCES[op](a, b, spec=spec, layout=layout)


def _lower_to_xla(*arrays: jax.Array, op: str, **params) -> jax.Array:
    by_formula = partial(_lowering.by_formula, reference=_REFERENCES[op])
    return _unfused(*arrays, op=op, convolve=by_formula, **params)


def _lower_cuda(*arrays: jax.Array, op: str, **params) -> jax.Array:
    return _lowering.lower_with_epilogue(*arrays, op=op, reference=_REFERENCES[op], **params)


conv_bias_act_p.def_impl(partial(xla.apply_primitive, conv_bias_act_p))
conv_bias_act_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[conv_bias_act_p] = _jvp
ad.primitive_transposes[conv_bias_act_p] = _transpose
batching.primitive_batchers[conv_bias_act_p] = _batch
_formula = mlir.lower_fun(_lower, multiple_results=False)
mlir.register_lowering(conv_bias_act_p, _formula)
for _platform, _whole, _divided in (
    ("cpu", _formula, _formula),
    ("cuda", _lowering.isolated(_lower_cuda), _lowering.isolated(_lower_to_xla)),
):
    _rule = _partitioning.divisible(_whole, _divided, bind=_bind)
    mlir.register_lowering(conv_bias_act_p, _rule, platform=_platform)
_partitioning.needs_devices(conv_bias_act_p)
