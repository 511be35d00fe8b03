# SPDX-License-Identifier: Apache-2.0
"""JAX's transformations of a convolution, and of each other, against `lax` under the same ones.

Operands are small integers and everything is a polynomial in them, so that values are compared
with ==. What test_batching.py and test_gradients.py show of `vmap` and derivatives is not repeated.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

import jaxcudnn
from cases import integers
from jaxcudnn._spec import ConvSpec
from lax_case import assert_same
from test_readings import WRITTEN_BY_JAX, draw_call

NHWC = ("NHWC", "OHWI", "NHWC")
HWIO = ("NHWC", "HWIO", "NHWC")
X, W = (2, 4, 3, 4), (4, 3, 3, 2)
STEPS = 3

Conv = Callable[[jax.Array, jax.Array], jax.Array]


def conv(functions: Any) -> Conv:
    """A convolution whose result has the shape of its input, with groups and a dilation."""
    return partial(
        functions.conv_general_dilated,
        window_strides=(1, 1),
        padding=((2, 2), (1, 1)),
        rhs_dilation=(2, 1),
        dimension_numbers=NHWC,
        feature_group_count=2,
    )


def squares(conv: Conv) -> Conv:
    return lambda x, w: jnp.sum(conv(x, w) ** 2)


def pulled_back(conv: Conv):
    """The gradients, for a cotangent that is x."""
    return lambda x, w: jax.vjp(conv, x, w)[1](x)


def stacked(x: jax.Array, b: int = 2) -> jax.Array:
    return jnp.stack([x * (i + 1) for i in range(b)])


def scanned(conv: Conv):
    """The same filter step after step: x shrinks to -1, 0 and 1, so that numbers stay small."""

    def step(x, w):
        y = conv(x - 2 * jnp.round(x / 2), w)
        return y, y

    return lambda x, w: lax.scan(step, x, stacked(w, STEPS))


def with_own_rule(conv: Conv) -> Conv:
    """A rule that doubles gradients, so that a rule of JAX's own making would be seen."""
    f = jax.custom_vjp(conv)

    def backward(residuals, ct):
        return tuple(2 * gradient for gradient in jax.vjp(conv, *residuals)[1](ct))

    f.defvjp(lambda x, w: (conv(x, w), (x, w)), backward)
    return f


def with_own_tangents(conv: Conv) -> Conv:
    f = jax.custom_jvp(conv)
    f.defjvp(lambda primals, tangents: (conv(*primals), 2 * jax.jvp(conv, primals, tangents)[1]))
    return f


def transposed(conv: Conv):
    def run(x, w):
        of_x, of_w = (lambda x: conv(x, w)), (lambda w: conv(x, w))
        return jax.linear_transpose(of_x, x)(x), jax.linear_transpose(of_w, w)(x)

    return run


def linearized(conv: Conv):
    def run(x, w):
        y, tangent = jax.linearize(conv, x, w)
        return y, tangent(w.sum() * x, w), tangent(x, w)

    return run


def gradient_penalty(conv: Conv):
    """Of the input's gradient, by the filter: a gradient of second order that networks train on."""
    return jax.grad(lambda x, w: jnp.sum(jax.grad(squares(conv))(x, w)), 1)


def checkpointed(conv: Conv, **policy: Any):
    body = jax.checkpoint(lambda x, w: conv(conv(x, w) % 2, w), **policy)
    return jax.grad(lambda x, w: jnp.sum(body(x, w) ** 2), (0, 1))


saved = jax.checkpoint_policies.save_only_these_names("y")
TRANSFORMS: dict[str, Callable[[Conv], Callable]] = {
    "jacfwd": lambda conv: jax.jacfwd(conv, (0, 1)),
    "jacrev": lambda conv: jax.jacrev(conv, (0, 1)),
    "jacfwd of jacrev": lambda conv: jax.jacfwd(jax.jacrev(squares(conv), 0), 1),
    "jacrev of jacfwd": lambda conv: jax.jacrev(jax.jacfwd(squares(conv), 0), 1),
    "hessian": lambda conv: jax.hessian(squares(conv), 1),
    "linearize": linearized,
    "linear_transpose": transposed,
    "gradient of a gradient": gradient_penalty,
    "jvp of a gradient": lambda conv: lambda x, w: jax.jvp(
        jax.grad(squares(conv), (0, 1)), (x, w), (x, w)
    ),
    "gradient of a jvp": lambda conv: jax.grad(
        lambda x, w: jnp.sum(jax.jvp(squares(conv), (x, w), (x, w))[1]), (0, 1)
    ),
    "vmap of jacrev": lambda conv: lambda x, w: jax.vmap(jax.jacrev(conv, 1), (0, None))(
        stacked(x), w
    ),
    "vmap of a gradient": lambda conv: lambda x, w: jax.vmap(jax.grad(squares(conv), (0, 1)))(
        stacked(x), stacked(w)
    ),
    "nested vmap of gradients": lambda conv: lambda x, w: jax.vmap(
        jax.vmap(pulled_back(conv), (None, 0)), (0, None)
    )(stacked(x), stacked(w)),
    "vmap of a gradient of a gradient": lambda conv: lambda x, w: jax.vmap(
        gradient_penalty(conv), (0, None)
    )(stacked(x), w),
    "gradient of a vmap": lambda conv: lambda x, w: jax.grad(
        lambda xs, w: jnp.sum(jax.vmap(conv, (0, None))(xs, w) ** 2), (0, 1)
    )(stacked(x), w),
    "jvp of a vmap": lambda conv: lambda x, w: jax.jvp(
        jax.vmap(conv), (stacked(x), stacked(w)), (stacked(x), stacked(w))
    ),
    "scan": scanned,
    "vmap of a scan": lambda conv: lambda x, w: jax.vmap(scanned(conv), (0, None))(stacked(x), w),
    "gradient of a scan": lambda conv: jax.grad(
        lambda x, w: jnp.sum(scanned(conv)(x, w)[1] ** 2), (0, 1)
    ),
    "jvp of a loop": lambda conv: lambda x, w: jax.jvp(
        lambda x, w: lax.fori_loop(0, STEPS, lambda _, y: conv(y, w) % 3, x), (x, w), (x, w)
    ),
    "map": lambda conv: lambda x, w: lax.map(lambda x: conv(x, w), stacked(x, 3)),
    "gradient of a choice": lambda conv: jax.grad(
        lambda x, w: lax.cond(w.sum() > 0, conv, lambda x, w: conv(2 * x, w), x, w).sum(), (0, 1)
    ),
    "vmap of a choice": lambda conv: lambda x, w: jax.vmap(
        lambda x, take: lax.cond(take, conv, lambda x, w: x, x, w)
    )(stacked(x), jnp.array([True, False])),
    "remat": checkpointed,
    "remat, nothing saved": partial(
        checkpointed, policy=jax.checkpoint_policies.nothing_saveable
    ),
    "remat, everything saved": partial(
        checkpointed, policy=jax.checkpoint_policies.everything_saveable
    ),
    "remat, one name saved": lambda conv: checkpointed(
        lambda x, w: checkpoint_name(conv(x, w), "y"), policy=saved
    ),
    "jvp of remat": lambda conv: lambda x, w: jax.jvp(jax.checkpoint(conv), (x, w), (x, w)),
    "vmap of remat": lambda conv: lambda x, w: jax.vmap(checkpointed(conv), (0, None))(
        stacked(x), w
    ),
    "custom_vjp": lambda conv: pulled_back(with_own_rule(conv)),
    "vmap of custom_vjp": lambda conv: lambda x, w: jax.vmap(
        pulled_back(with_own_rule(conv)), (0, None)
    )(stacked(x), w),
    "custom_jvp": lambda conv: jax.grad(squares(with_own_tangents(conv)), (0, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform(name: str):
    arguments = integers(1, X), integers(2, W)
    computed, expected = (
        jax.jit(TRANSFORMS[name](conv(functions)))(*arguments) for functions in (jaxcudnn, lax)
    )
    jax.tree.map(assert_same, computed, expected)
    assert all(jnp.max(jnp.abs(leaf)) < 2**24 for leaf in jax.tree.leaves(computed))
    assert any(leaf.any() for leaf in jax.tree.leaves(computed))


def specs(jaxpr: core.Jaxpr) -> list[ConvSpec]:
    """Of all convolutions in a jaxpr, none of which may be one of `lax`'s."""
    inner = [sub for eqn in jaxpr.eqns for sub in core.jaxprs_in_params(eqn.params)]
    assert all(eqn.primitive.name != "conv_general_dilated" for eqn in jaxpr.eqns)
    own = [eqn.params["spec"] for eqn in jaxpr.eqns if eqn.primitive.name.startswith("conv_")]
    return own + [spec for sub in inner for spec in specs(sub)]


SECOND_ORDER: dict[str, Callable[[Conv], Callable]] = {
    name: TRANSFORMS[name]
    for name in (
        "gradient of a gradient",
        "jvp of a gradient",
        "gradient of a jvp",
        "vmap of a gradient of a gradient",
        "hessian",
    )
} | {
    "third order": lambda conv: jax.grad(
        lambda x, w: jnp.sum(gradient_penalty(lambda x, w: conv(x, w) ** 2)(x, w) ** 2), (0, 1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("order", SECOND_ORDER)
@pytest.mark.parametrize("name", WRITTEN_BY_JAX)
def test_windows_stay_those_of_the_forward_convolution(name: str, order: str):
    """Second derivatives written with `lax` slide windows as large as the image."""
    x_shape, w_shape, strides, dilation, groups = WRITTEN_BY_JAX[name]
    conv = partial(
        jaxcudnn.conv_general_dilated, window_strides=strides, padding="SAME",
        rhs_dilation=dilation, dimension_numbers=HWIO, feature_group_count=groups,
    )  # fmt: skip
    operands = (jax.ShapeDtypeStruct(shape, "float32") for shape in (x_shape, w_shape))
    found = specs(jax.make_jaxpr(SECOND_ORDER[order](conv))(*operands).jaxpr)
    assert len(found) >= 3
    assert {(spec.x_shape[2:], spec.w_shape[2:]) for spec in found} == {(x_shape[1:3], w_shape[:2])}


@pytest.mark.parametrize("seed", range(3000, 3040))
def test_derivatives_of_any_call_keep_its_windows(seed: int):
    """Also of calls that are gradients or transposed convolutions themselves, and of phases."""
    lhs, rhs, arguments = draw_call(seed)
    conv = partial(jaxcudnn.conv_general_dilated, **arguments)
    forward, second = (
        {spec.w_shape[2:] for spec in specs(jax.make_jaxpr(function)(lhs, rhs).jaxpr)}
        for function in (conv, gradient_penalty(conv))
    )
    assert second <= forward


def general(**arguments: Any):
    return "conv_general_dilated", arguments


# A function and its arguments, the shapes of lhs and rhs, and whether it is differentiated: lax
# writes no gradients where it cannot say what is left over after the last stride.
SYMBOLIC: dict[str, tuple] = {
    "images": (
        general(window_strides=(2, 1), padding="SAME"),
        lambda b: (b, 4, 6, 5),
        (6, 4, 3, 2),
        True,
    ),
    "images-grouped": (
        general(window_strides=(2, 1), padding="SAME", feature_group_count=2),
        lambda b: (b, 4, 6, 5),
        (6, 2, 3, 2),
        True,
    ),
    "images-in-groups": (
        general(window_strides=(1, 1), padding="VALID", batch_group_count=2),
        lambda b: (2 * b, 4, 6, 5),
        (6, 4, 3, 2),
        True,
    ),
    "images-dilated": (
        general(
            window_strides=(2, 1),
            padding=((1, 2), (0, -1)),
            lhs_dilation=(2, 3),
            rhs_dilation=(2, 1),
        ),
        lambda b: (b, 4, 6, 5),
        (6, 4, 3, 2),
        True,
    ),
    "sizes": (
        general(window_strides=(1, 1), padding="SAME"),
        lambda b: (2, 4, b, b + 1),
        (6, 4, 3, 2),
        True,
    ),
    "sizes-valid": (
        general(window_strides=(1, 1), padding="VALID"),
        lambda b: (2, 4, b, 5),
        (6, 4, 3, 2),
        False,
    ),
    "sizes-strided": (
        general(window_strides=(2, 2), padding=((1, 1), (2, 0)), rhs_dilation=(2, 1)),
        lambda b: (b, 4, b, 5),
        (6, 4, 3, 2),
        False,
    ),
    "sizes-spread": (
        general(window_strides=(1, 1), padding=((1, 1), (2, 2)), lhs_dilation=(2, 2)),
        lambda b: (2, 4, b, 5),
        (6, 4, 3, 2),
        True,
    ),
    "transposed-images": (
        ("conv_transpose", {"strides": (2,), "padding": "SAME"}),
        lambda b: (b, 12, 4),
        (4, 4, 5),
        True,
    ),
    "transposed-sizes": (
        ("conv_transpose", {"strides": (2,), "padding": "SAME"}),
        lambda b: (3, b, 4),
        (4, 4, 5),
        True,
    ),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_exported_with_symbolic_sizes(name: str):
    (function, arguments), x_shape, w_shape, differentiated = SYMBOLIC[name]

    def run(functions: Any):
        conv = partial(getattr(functions, function), **arguments)
        return lambda x, w: (conv(x, w), *(gradients(conv)(x, w) if differentiated else ()))

    def gradients(conv: Conv):
        return jax.grad(lambda x, w: jnp.sum(conv(x, w) ** 2), (0, 1))

    shapes = x_shape(*export.symbolic_shape("b")), w_shape
    x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    exported = export.export(jax.jit(run(jaxcudnn)), platforms=("cpu",))(x, w)
    for b in (4, 7):
        operands = integers(1, x_shape(b)), integers(2, w_shape)
        computed, expected = exported.call(*operands), jax.jit(run(lax))(*operands)
        jax.tree.map(assert_same, computed, expected)


@pytest.mark.parametrize("stride, padding", [(1, 1), (2, 0), (1, "same")])
def test_convolution_exported_with_symbolic_sizes(stride: int, padding: Any):
    def conv(x, w):
        return jaxcudnn.convolution(x, w, None, stride, padding, 1, False, 0, 1)

    w = integers(1, (6, 4, 3, 3))
    x = jax.ShapeDtypeStruct(export.symbolic_shape("b, 4, h, 8", constraints=["h>=3"]), "float32")
    exported = export.export(jax.jit(conv))(x, w)
    for shape in ((2, 4, 6, 8), (1, 4, 9, 8)):
        image = integers(0, shape)
        assert_same(exported.call(image, w), conv(image, w))


@pytest.mark.parametrize("kept", ["in memory", "as bytes"])
def test_everything_exported_with_symbolic_images_and_sizes(kept: str):
    """A call, its gradients, and both gradients by cuDNN's names, in one program."""
    if kept == "as bytes":
        pytest.importorskip(
            "flatbuffers", reason="flatbuffers, which JAX serialises by, is missing"
        )
    numbers: dict[str, Any] = {"padding": 1, "stride": 2}

    def run(functions):
        def conv(x, w):
            return functions.conv_general_dilated(x, w, (2, 2), ((1, 1), (1, 1)))

        def program(x, w, dy):
            if functions is lax:
                by_name = jax.vjp(conv, x, w)[1](dy)
            else:
                by_name = (
                    jaxcudnn.conv_dgrad(dy, w, x.shape[2:], **numbers),
                    jaxcudnn.conv_wgrad(x, dy, w.shape[2:], **numbers),
                )
            return conv(x, w), jax.grad(squares(conv), (0, 1))(x, w), by_name

        return jax.jit(program)

    scope = export.SymbolicScope()
    symbolic = ("n, 4, 2*h, 2*w", "6, 4, 3, 3", "n, 6, h, w")
    arguments = (
        jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), "float32")
        for shape in symbolic
    )
    program = export.export(run(jaxcudnn), platforms=("cpu",))(*arguments)
    if kept == "as bytes":
        program = export.deserialize(program.serialize())
    for n, h, w in ((2, 3, 4), (3, 5, 2)):
        shapes = (n, 4, 2 * h, 2 * w), (6, 4, 3, 3), (n, 6, h, w)
        operands = [integers(i, shape) for i, shape in enumerate(shapes)]
        jax.tree.map(assert_same, program.call(*operands), run(lax)(*operands))


def test_a_symbolic_filter():
    """That covers the whole image."""

    def program(x, dy):
        return jaxcudnn.conv_wgrad(x, dy, x.shape[2:], padding=0)

    scope = export.SymbolicScope()
    arguments = (
        jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), "float32")
        for shape in ("n, 4, h, w", "n, 6, 1, 1")
    )
    exported = export.export(jax.jit(program))(*arguments)
    for shape in ((2, 4, 3, 5), (1, 4, 2, 2)):
        x, dy = integers(0, shape), integers(1, (shape[0], 6, 1, 1))
        assert_same(exported.call(x, dy), program(x, dy))


UNDECIDED = {
    "whether anything is left": (0, "h", "h", "'h - 2' > '0'"),
    "what is left over": (1, "h", "floordiv(h - 1, 2) + 1", "- 2*floordiv(h - 1, 2) + h"),
}


@pytest.mark.parametrize("name", UNDECIDED)
def test_sizes_of_which_too_little_is_known_are_refused(name: str):
    padding, size, out, reason = UNDECIDED[name]
    h, p = export.symbolic_shape(f"{size}, {out}")
    dy, w = jax.ShapeDtypeStruct((2, 6, p), "float32"), jnp.ones((6, 4, 3))

    def gradient(dy, w):
        sizes: Any = (h,)
        return jaxcudnn.conv_dgrad(dy, w, sizes, padding=padding, stride=1 + padding)

    rule = r"^jaxcudnn.conv_dgrad: symbolic sizes must .* got shapes \(2, 4, h\) and \(6, 4, 3\) "
    with pytest.raises(ValueError, match=f"{rule}.*{re.escape(reason)}.*; give constraints"):
        jax.eval_shape(gradient, dy, w)
