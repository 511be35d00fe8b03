# SPDX-License-Identifier: Apache-2.0
"""From a `ConvSpec` to XLA's custom call on CUDA: attributes, memory layouts and workspace."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir

from . import (
    _activations,
    _fusion,
    _load,
    _memory,
    _plans,
    _reference,
    _route_reversed,
    _routes,
    _taps,
)
from ._dtypes import allows_tf32, computed_in, is_integer
from ._installation import left_to_xla
from ._options import ALGORITHMS, Options, xla_is_deterministic
from ._spec import ROLES, ConvSpec, Epilogue, Layout, Role, Shape
from ._splitting import compute_in_pieces

WORKSPACE_BUDGET = 64 << 20
"""Bytes that a program reserves which is lowered where there is no GPU to ask for the plan. The
plan is then chosen where the program runs, among those that fit."""

LEAST_WORKSPACE_LIMIT = 1 << 30
ARRAYS_IN_WORKSPACE = 2
"""Bytes of scratch memory that a plan may need if the user sets no limit: so many, or so many times
what the arrays take, for plans that bring all of them into another order."""

LARGEST = 2**31 - 1
"""The largest size, stride, padding or dilation that cuDNN is given."""

MOST_ELEMENTS = 2**31 - 1
"""The most elements of an array that one call of cuDNN is given."""

ANY_NUMBER = 0
"""Of images, in attributes: as many as the arrays hold where the program runs."""

_NONE = Epilogue()

_ALIGNMENT = 256  # of every part of the workspace, as XLA aligns its own buffers


class Step(NamedTuple):
    """One convolution of those that a primitive is lowered to."""

    spec: ConvSpec
    attributes: dict[str, Any] | None
    """Of the custom call; None if there is none."""
    reason: str
    """Why it is left to `lax`, as the end of a sentence; empty if it is not."""
    unfused: str = ""
    """Why its epilogue is left to XLA, likewise."""
    route: str = ""
    """The name of the route by which it is computed, or of which it is a part."""


def lower_cuda(op: str, reference: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Give the lowering rule for CUDA of one primitive.

    Args:
      op: what the extension calls the operation: "fprop", "dgrad" or "wgrad".
      reference: the same operation in terms of `lax`, for what cuDNN cannot do.
    """
    return isolated(partial(_lower, op=op, reference=reference))


def lower_formula(op: str, reference: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Give the lowering rule for CUDA of one primitive where it is left to XLA."""
    return isolated(partial(by_formula, op=op, reference=reference))


def isolated(compute: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Give the lowering rule of a function, whose own calls of `lax` are XLA's."""
    rule = mlir.lower_fun(compute, multiple_results=False)

    def lower(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        with left_to_xla(ctx) as context:
            return rule(context, *operands, **params)

    return lower


def steps(
    op: str,
    reference: Callable[..., jax.Array],
    *,
    spec: ConvSpec,
    layout: Layout,
    epilogue: Epilogue = _NONE,
) -> list[Step]:
    """Say what one primitive is lowered to, by doing so.

    Args:
      op: as in `lower_cuda`.
      reference: as in `lower_cuda`.
      spec: that of the primitive.
      layout: that of the primitive.
      epilogue: that of the primitive, if it has one.
    """
    found: list[Step] = []
    given = {"op": op, "reference": reference, "spec": spec, "layout": layout}
    lower = partial(_lower, **given, report=found.append)
    first, second, result = (
        jax.ShapeDtypeStruct(layout.to_array(role, spec.shape(role)), jnp.dtype(spec.dtype(role)))
        for role in ROLES[op]
    )
    addends = [result] * epilogue.residual
    if epilogue.bias:
        addends.append(jax.ShapeDtypeStruct((spec.shape(ROLES[op][2])[1],), result.dtype))
    if epilogue != _NONE:
        lower = partial(lower_with_epilogue, **given, epilogue=epilogue, report=found.append)
    jax.eval_shape(lower, first, second, *addends)
    return found


def lower_with_epilogue(
    a: jax.Array,
    b: jax.Array,
    *addends: jax.Array,
    op: str,
    reference: Callable[..., jax.Array],
    spec: ConvSpec,
    layout: Layout,
    epilogue: Epilogue,
    report: Callable[[Step], None] = lambda step: None,
) -> jax.Array:
    """Compute a convolution and its epilogue by one call of cuDNN, or the epilogue by XLA.

    Args:
      a: the primitive's first operand.
      b: its second.
      *addends: residual and bias, those of the two that `epilogue` says there are.
      op: as in `lower_cuda`.
      reference: as in `lower_cuda`.
      spec: that of the primitive.
      layout: that of the primitive.
      epilogue: that of the primitive, which has one.
      report: is told of each step.
    """
    result = ROLES[op][2]
    reason = _unfused(op, spec, layout, epilogue)
    if not reason:
        fused = _fusion.completed(op, epilogue)
        form = _Form(spec, layout, _attributes(op, spec, layout, fused))
        workspace = _workspace(form.attributes, is_last=False)
        if workspace is not None:
            report(Step(spec, form.attributes, ""))

            def by_cudnn(a: jax.Array, b: jax.Array, *addends: jax.Array) -> jax.Array:
                if fused.bias and not epilogue.bias:
                    addends = (*addends, jnp.zeros((spec.shape(result)[1],), spec.dtype(result)))
                if _fusion.takes_any_address(op, epilogue):
                    return _call(a, b, *addends, workspace=workspace, form=form)
                # XLA passes slices in place, and so the result; past a barrier it does neither.
                operands = map(lax.optimization_barrier, (a, b, *addends))
                return lax.optimization_barrier(_call(*operands, workspace=workspace, form=form))

            def otherwise(a: jax.Array, b: jax.Array, *addends: jax.Array) -> jax.Array:
                y = reference(a, b, spec=spec, layout=layout, convolve=_convolve(op, spec))
                axis = layout.axis(result, 1)
                return _activations.finish(y, *addends, epilogue=epilogue, axis=axis)

            return _where_cudnn_can(spec, by_cudnn, otherwise, a, b, *addends)
        reason = "cuDNN has no plan for both together that the options allow"
    y = _lower(
        a, b, op=op, reference=reference, spec=spec, layout=layout,
        report=lambda step: report(step._replace(unfused=reason)),
    )  # fmt: skip
    return _activations.finish(y, *addends, epilogue=epilogue, axis=layout.axis(result, 1))


def _unfused(op: str, spec: ConvSpec, layout: Layout, epilogue: Epilogue) -> str:
    """Say why cuDNN is not asked for a convolution with its epilogue; nothing if it is.

    What a fused epilogue saves is a pass over the result at most, and less where XLA can have it in
    the kernel that writes the result. Routes are taken where they save more.
    """
    if refusal(op, spec):
        return "the convolution is left to lax"
    if _has_its_images(spec) and not _holds_all(spec):
        return "an array is too large for one call of cuDNN"
    if _computed_in(op, spec) != spec.dtype(ROLES[op][2]):
        return "cuDNN computes it in another dtype than the result's"
    route = _route(op, spec, layout)
    if route and _routes.KINDS[route].saves_a_pass:
        return f"the convolution is computed by the route {route}"
    return _fusion.fused_form(op, spec, epilogue, has_device=_load.local_device() is not None)


def _lower(
    a: jax.Array,
    b: jax.Array,
    *,
    op: str,
    reference: Callable[..., jax.Array],
    spec: ConvSpec,
    layout: Layout,
    report: Callable[[Step], None] = lambda step: None,
) -> jax.Array:
    """Compute by cuDNN, whole or in pieces, or else by whatever XLA has."""
    *operands, _ = ROLES[op]
    by_xla = partial(by_formula, op=op, reference=reference, spec=spec, layout=layout)
    reason = _unsuitable(spec)
    if not reason and _has_its_images(spec):
        computed = compute_in_pieces(
            dict(zip(operands, (a, b), strict=True)),
            spec=spec,
            layout=layout,
            limit=MOST_ELEMENTS,
            compute=lambda arrays, piece: _lower(
                *(arrays[role] for role in operands),
                op=op, reference=reference, spec=piece, layout=layout, report=report,
            ),
        )  # fmt: skip
        if computed is not None:
            return computed
    reason = reason or _too_large(spec) or _without_dtype(op, spec)
    if not reason:
        route = _route(op, spec, layout)
        if route:
            return _by_route(route, a, b, op=op, spec=spec, layout=layout, report=report)
        for form in _forms(op, spec, layout):
            workspace = _workspace(form.attributes, is_last=form.is_own)
            if workspace is not None:
                report(Step(form.spec, form.attributes, ""))

                def by_cudnn(a, b, form=form, workspace=workspace):
                    return _call(a, form.filter(b), workspace=workspace, form=form)

                return _where_cudnn_can(spec, by_cudnn, by_xla, a, b)
        reason = "cuDNN has no plan for it that the options allow"
    report(Step(spec, None, reason))
    return by_xla(a, b)


def by_formula(
    a: jax.Array,
    b: jax.Array,
    *,
    op: str,
    reference: Callable[..., jax.Array],
    spec: ConvSpec,
    layout: Layout,
) -> jax.Array:
    """Compute one primitive by whatever XLA has."""
    return reference(a, b, spec=spec, layout=layout, convolve=_convolve(op, spec))


def _convolve(op: str, spec: ConvSpec) -> Callable[..., jax.Array]:
    """Give `lax`'s convolution, or what stands for it where XLA has none for GPUs."""
    has_kernel = _taps.is_needless(spec.num_spatial, spec.dtype(ROLES[op][2]))
    return lax.conv_general_dilated if has_kernel else _taps.convolve


def _has_its_images(spec: ConvSpec) -> bool:
    """Say whether the number of images is known, and not symbolic as `jax.export` may have it."""
    return isinstance(spec.x_shape[0], int)


def _holds_all(spec: ConvSpec) -> bool:
    """Say whether one call of cuDNN can be given all of each array."""
    return max(math.prod(spec.shape(role)) for role in ("x", "w", "y")) <= MOST_ELEMENTS


def _route(op: str, spec: ConvSpec, layout: Layout) -> str:
    return _routes.choose(op, spec, layout) if _has_its_images(spec) else ""


def _where_cudnn_can(
    spec: ConvSpec,
    by_cudnn: Callable[..., jax.Array],
    otherwise: Callable[..., jax.Array],
    *operands: jax.Array,
) -> jax.Array:
    """Compute by cuDNN, unless there turn out to be no images, or too many for one call.

    XLA knows their number when it compiles the program, and keeps one of the two.
    """
    if _has_its_images(spec):
        return by_cudnn(*operands)
    most = MOST_ELEMENTS // max(math.prod(spec.shape(role)[1:]) for role in "xy")
    images = jnp.asarray(spec.x_shape[0])
    return lax.cond((1 <= images) & (images <= most), by_cudnn, otherwise, *operands)


def _by_route(
    name: str, *operands: jax.Array, report: Callable[[Step], None], **params: Any
) -> jax.Array:
    """Compute by a route, whose other convolutions are cuDNN's like any other."""
    kind = _routes.KINDS[name]
    if not kind.is_cudnns:
        report(Step(params["spec"], None, "", route=name))

    def convolve(a: jax.Array, b: jax.Array, *, op: str, **params: Any) -> jax.Array:
        return _lower(
            a, b, op=op, reference=getattr(_reference, op), **params,
            report=lambda step: report(step._replace(route=name)),
        )  # fmt: skip

    return kind.compute(*operands, convolve=convolve, **params)


def refusal(op: str, spec: ConvSpec) -> str:
    """Say why cuDNN is not asked for a convolution; nothing if it is."""
    return _unsuitable(spec) or _too_large(spec) or _without_dtype(op, spec)


def _unsuitable(spec: ConvSpec) -> str:
    """Say why neither cuDNN may be asked nor for pieces of it.

    Symbolic sizes, as `jax.export` has them, are not known when it would have to be asked. The
    number of images alone may be: the extension reads it off the arrays.
    """
    sizes = _known_sizes(spec)
    if not all(isinstance(size, int) for size in sizes):
        return "a size is symbolic"
    if not 1 <= spec.num_spatial <= _taps.MOST_SPATIAL:
        most = _taps.MOST_SPATIAL
        return f"cuDNN takes 1 to {most} spatial dimensions, and it has {spec.num_spatial}"
    if 0 in (*sizes, *spec.y_shape[1:]):
        return "an array is empty"
    return ""


def _known_sizes(spec: ConvSpec) -> Shape:
    """Give the sizes of images and filters, without the number of images if that is symbolic."""
    return (*(spec.x_shape if _has_its_images(spec) else spec.x_shape[1:]), *spec.w_shape)


def _too_large(spec: ConvSpec) -> str:
    """Say which number cuDNN would lose high bits of, and then divide by what is left."""
    padded = (size + sum(pads) for size, pads in zip(spec.x_shape[2:], spec.padding, strict=True))
    most = max(*_known_sizes(spec), *padded, *spec.strides, *spec.dilation)
    return f"cuDNN keeps numbers in 32 bits, and it has one of {most}" if most > LARGEST else ""


def _without_dtype(op: str, spec: ConvSpec) -> str:
    """Say why no dtype is one in which cuDNN computes this exactly."""
    if _computed_in(op, spec) is not None:
        return ""
    first, second, result = (spec.dtype(role) for role in ROLES[op])
    if is_integer(result):
        return "cuDNN computes wrong numbers from integers to integers"
    return f"cuDNN computes in no dtype that keeps all of {first} and {second} for a {result} sum"


class _Form(NamedTuple):
    """What cuDNN may be asked for a convolution."""

    spec: ConvSpec
    layout: Layout
    attributes: dict[str, Any]
    filter: Callable[[jax.Array], jax.Array] = lambda second: second
    """Of the second operand."""
    is_own: bool = True
    """Whether it is the operation itself, after which there is no other to be had."""


def _forms(op: str, spec: ConvSpec, layout: Layout) -> Iterator[_Form]:
    """Give the forms of a convolution, the one that is expected to be the fastest first."""
    own = _attributes(op, spec, layout)
    if op == "dgrad" and own["algorithm"] in ALGORITHMS:
        fprop = _route_reversed.fprop_of_dgrad(spec, layout)
        memory = layout.memory_order("w", channels_first=own["channels_first"])
        is_copied = memory != tuple(range(len(memory)))
        is_preferred = _route_reversed.prefers_fprop(
            spec, own["dtype"], allow_tf32=own["allow_tf32"], is_copied=is_copied
        )
        if fprop and is_preferred and not _too_large(fprop.spec):
            attributes = _attributes("fprop", fprop.spec, fprop.layout)
            yield _Form(fprop.spec, fprop.layout, attributes, fprop.filter, is_own=False)
    yield _Form(spec, layout, own)


def _call(*operands: jax.Array, workspace: int, form: _Form) -> jax.Array:
    """Call cuDNN, with so many bytes of workspace."""
    spec, layout, attributes = form.spec, form.layout, form.attributes
    *roles, result = ROLES[attributes["op"]]

    def memory(role: Role) -> Shape:
        return layout.memory_order(role, channels_first=attributes["channels_first"])

    orders = [memory(role) for role in roles]
    if attributes["residual"]:
        orders.append(memory(result))
    if attributes["bias"]:
        orders.append((0,))
    out = jax.ShapeDtypeStruct(layout.to_array(result, spec.shape(result)), attributes["dtype"])
    attributes = {"schema": _load.SCHEMA, **attributes}
    call = jax.ffi.ffi_call(
        _load.TARGET,
        (out, jax.ShapeDtypeStruct((workspace,), jnp.uint8)),
        input_layouts=orders,
        output_layouts=[memory(result), (0,)],
    )
    # The workspace is a result only so that XLA plans its memory with everything else.
    computed, _ = call(
        *(lax.convert_element_type(operand, attributes["dtype"]) for operand in operands),
        **{name: _ffi_attribute(value) for name, value in attributes.items()},
    )
    return lax.convert_element_type(computed, spec.dtype(result))


def _workspace(attributes: dict[str, Any], *, is_last: bool) -> int | None:
    """Give the bytes of scratch memory to reserve, or None if cuDNN has no plan.

    If this is the last that is asked for, the user is told why there is none.

    Beside what the plan needs there is room for copies of filter and bias: parameters are often
    slices of one flat vector, which XLA passes in place, at addresses that fast plans refuse.
    """
    _load.native()
    device = _load.local_device()
    if device is None or has_any_number_of_images(attributes):
        attributes["workspace_limit"] = needed = min(
            WORKSPACE_BUDGET, attributes["workspace_limit"]
        )
    else:
        needed = _plans.workspace(attributes, device, is_last=is_last)
        if needed is None:
            return None
    sizes = [math.prod(attributes["w"])]
    if attributes["bias"]:
        sizes.append(attributes[ROLES[attributes["op"]][2]][1])
    itemsize = jnp.dtype(attributes["dtype"]).itemsize
    return _round_up(needed) + sum(_round_up(size * itemsize) for size in sizes)


def _round_up(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _computed_in(op: str, spec: ConvSpec) -> str | None:
    first, second, result = ROLES[op]
    dtype = computed_in(spec.dtype(first), spec.dtype(second), spec.dtype(result))
    return _memory.widened(op, spec, dtype)


def _attributes(
    op: str, spec: ConvSpec, layout: Layout | None = None, epilogue: Epilogue = _NONE
) -> dict[str, Any]:
    """Describe a convolution as the extension reads it, with at least two spatial dimensions.

    Without a layout the arrays are taken to be as cuDNN likes them.

    A missing one comes first: with the long dimension first instead, cuDNN has no tensor-core plan
    for some filter gradients.
    """
    first, second, _ = ROLES[op]
    dtype = _computed_in(op, spec)
    assert dtype is not None
    missing = max(0, 2 - spec.num_spatial)
    one, zero = [1] * missing, [0] * missing

    def lifted(role: Role) -> list[int]:
        first, second, *rest = spec.shape(role)
        return [first if isinstance(first, int) else ANY_NUMBER, second, *one, *rest]

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
        "channels_first": layout is not None and _memory.is_channels_first(op, spec, layout, dtype),
        "dtype": dtype,
        "allow_tf32": spec.options.allow_tf32
        and allows_tf32(spec.dtype(first), spec.dtype(second), spec.precision),
        "activation": epilogue.activation,
        "bias": epilogue.bias,
        "residual": epilogue.residual,
        "workspace_limit": spec.options.workspace_limit or _workspace_limit(spec, dtype),
        **_options_of(spec.options, op),
    }


def has_any_number_of_images(attributes: dict[str, Any]) -> bool:
    """Say whether a call is for as many images as there will be."""
    return attributes["x"][0] == ANY_NUMBER


def _workspace_limit(spec: ConvSpec, dtype: str) -> int:
    if not _has_its_images(spec):
        return LEAST_WORKSPACE_LIMIT
    elements = sum(math.prod(spec.shape(role)) for role in ("x", "w", "y"))
    return max(LEAST_WORKSPACE_LIMIT, ARRAYS_IN_WORKSPACE * elements * jnp.dtype(dtype).itemsize)


def _options_of(options: Options, op: str) -> dict[str, Any]:
    """Say how the plan is chosen, and which may be."""
    budget = options.tuning_budget
    return {
        "algorithm": options.algorithm_for(op),
        "deterministic": options.deterministic or xla_is_deterministic(),
        "allow_reduced_precision_reduction": options.allow_reduced_precision_reduction,
        "allow_runtime_compilation": options.allow_runtime_compilation,
        "exclude_engines": ",".join(options.exclude_engines),
        "verify": options.verify,
        "tuning_candidates": budget.candidates,
        "tuning_candidate_us": _microseconds(budget.candidate_milliseconds),
        "tuning_us": _microseconds(budget.milliseconds),
    }


def _microseconds(milliseconds: float) -> int:
    return round(min(1000 * milliseconds, 2.0**62))  # an attribute has 64 bits


def _ffi_attribute(value: Any) -> Any:
    return np.asarray(value, np.int64) if isinstance(value, list) else value


_load.register()
