# SPDX-License-Identifier: Apache-2.0
"""Derivatives of `conv_bias_act`, and what is kept for them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import aot
import cases
import jaxcudnn
from aot import shaped
from cases import Case, integers, normal, parametrize
from epilogues import FROM_INPUT, NAMES, channels_shape, conv
from jaxcudnn import _activations, _load
from test_gradients import primitives

NHWC = cases.CHANNELS_LAST[2]
(CASE,) = cases.named("2d-grouped-strided")
KINKED = ("relu", "relu6", "leaky_relu", "elu")

# Central differences in float64 with step h err by h^2 / 6 third derivatives and by 1e-16 / h times
# values. Those differenced here are up to a thousand, which makes 2e-6 and 1e-9 at this step.
DIFFERENCES: dict[str, Any] = {"eps": 1e-4, "atol": 1e-5, "rtol": 1e-5}

# Those of `jax.nn`, which JAX differentiates by itself.
OF_JAX = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "leaky_relu": jax.nn.leaky_relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
    "elu": jax.nn.elu,
    "softplus": jax.nn.softplus,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}


def operands(case: Case, draw=normal, dtype="float32") -> list[jax.Array]:
    """x, w, bias and residual."""
    shapes = case.x_shape, case.w_shape, channels_shape(case), case.y_shape
    return [draw(seed, shape, dtype) for seed, shape in enumerate(shapes)]


def by_jax(case: Case, activation: str, convolve: Any = None):
    """The same function of the same operands, without the package unless it convolves."""
    convolve = convolve or case.lax_conv

    def f(x, w, bias, residual):
        shape = [1] * residual.ndim
        shape[case.axes("y")[1]] = -1
        return OF_JAX[activation](convolve(x, w) + residual + bias.reshape(shape))

    return f


def assert_trees_close(ours, theirs, tolerance=2e-5) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), ours, theirs
    )


@pytest.mark.parametrize("activation", NAMES)
class TestEveryActivation:
    def test_gradients_are_those_of_jax(self, activation: str):
        """Of all four operands, in both modes; those of cotangents and tangents alone, too."""
        arrays, tangents = operands(CASE), operands(CASE, lambda s, *a: normal(s + 9, *a))
        ct = normal(5, CASE.y_shape, "float32")

        def derivatives(f):
            y, pullback = jax.vjp(f, *arrays)
            alone = [
                jax.jvp(lambda one, i=i: f(*arrays[:i], one, *arrays[i + 1 :]), (a,), (t,))[1]
                for i, (a, t) in enumerate(zip(arrays, tangents, strict=True))
            ]
            return y, pullback(ct), jax.jvp(f, arrays, tangents)[1], alone

        ours, theirs = (
            jax.jit(functools.partial(derivatives, f))()
            for f in (conv(CASE, activation), by_jax(CASE, activation))
        )
        assert_trees_close(ours, theirs)

    def test_second_and_third_derivatives_are_those_of_jax(self, activation: str):
        arrays, tangents = operands(CASE), operands(CASE, lambda s, *a: normal(s + 9, *a))

        def derivatives(f):
            def along(order, *arrays):
                if order == 0:
                    return jnp.sum(f(*arrays) ** 2)
                inner = functools.partial(along, order - 1)
                return jax.jvp(inner, arrays, tuple(tangents))[1]

            reverse = jax.grad(functools.partial(along, 1), (0, 1, 2, 3))(*arrays)
            return reverse, along(2, *arrays), along(3, *arrays)

        ours, theirs = (
            jax.jit(functools.partial(derivatives, f))()
            for f in (conv(CASE, activation), by_jax(CASE, activation))
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-3), ours, theirs
        )

    def test_at_kinks_and_far_out_they_are_those_of_jax(self, activation: str):
        points = [-200.0, -20.0, -1.0, -0.0, 0.0, 1.0, 6.0, 20.0, 200.0]
        z = jnp.array(points).reshape(1, 1, -1)
        one = jnp.ones((1, 1, 1))
        f = lambda z: jaxcudnn.conv_bias_act(z, one, activation=activation, padding="VALID")  # noqa: E731
        ours, theirs = (jax.vjp(g, z)[1](jnp.ones_like(z))[0] for g in (f, OF_JAX[activation]))
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
        if activation == "relu":
            np.testing.assert_array_equal(ours.ravel(), [0, 0, 0, 0, 0, 1, 1, 1, 1])

    def test_what_is_kept(self, activation: str):
        """The output, or the input where that is needed, and no comparison with it."""
        y, pullback = jax.vjp(conv(CASE, activation), *operands(CASE, dtype="bfloat16"))
        kept = [leaf for leaf in jax.tree.leaves(pullback) if isinstance(leaf, jax.Array)]
        full = [leaf for leaf in kept if leaf.shape == CASE.y_shape]
        assert all(leaf.dtype == "bfloat16" for leaf in kept)
        assert len({id(leaf) for leaf in full}) == len(full) == 1
        assert (full[0] is y) == (activation not in FROM_INPUT)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_vmapped_gradients(activation: str):
    x, w, bias, residual = operands(CASE)
    xs = normal(11, (2, *x.shape), "float32")
    f = jax.grad(lambda *arrays: jnp.sum(conv(CASE, activation)(*arrays) ** 2), (0, 1, 2, 3))
    for axes in [(0, None, None, None), (0, 0, None, None), (None, None, None, 0)]:
        arrays = [
            a if axis is None else jnp.stack([a, a[..., ::-1] * 0.5])
            for a, axis in zip((x, w, bias, residual), axes, strict=True)
        ]
        mapped = jax.jit(jax.vmap(f, axes))(*arrays)
        for i in range(2):
            picked = (a if axis is None else a[i] for a, axis in zip(arrays, axes, strict=True))
            assert_trees_close([g[i] for g in mapped], list(f(*picked)), 1e-4)
    whole = jax.grad(lambda xs: jnp.sum(jax.vmap(lambda x: conv(CASE, activation)(x, w))(xs)))
    assert_trees_close(
        whole(xs)[1], jax.grad(lambda x: jnp.sum(conv(CASE, activation)(x, w)))(xs[1])
    )


@pytest.mark.parametrize("activation", [*sorted(set(NAMES) - set(KINKED)), None])
def test_against_differences(activation):
    """To second order, in both modes. Where there are kinks, differences are no oracle."""
    with jax.enable_x64(True):
        arrays = operands(CASE, dtype="float64")
        check_grads(conv(CASE, activation), arrays, order=2, modes=["fwd", "rev"], **DIFFERENCES)


@parametrize()
def test_every_case(case: Case):
    """With relu, in integers and so exactly. `lax`'s own are wrong for some before jax 0.12."""
    arrays = operands(case, integers)
    ct = integers(5, case.y_shape)
    ours, theirs = (
        jax.jit(lambda ct, *arrays, f=f: jax.vjp(f, *arrays)[1](ct))(ct, *arrays)
        for f in (conv(case), by_jax(case, "relu", case.conv))
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_transposed(activation: str):
    x, w = normal(1, (2, 5, 4, 3), "float32"), normal(2, (3, 2, 3, 6), "float32") / 4
    bias, residual = normal(3, (6,), "float32"), normal(4, (2, 10, 8, 6), "float32")
    geometry: dict[str, Any] = {"strides": (2, 2), "padding": "SAME"}

    def ours(x, w, bias, residual):
        return jaxcudnn.conv_transpose_bias_act(x, w, bias, residual, activation, **geometry)

    def theirs(x, w, bias, residual):
        y = jax.lax.conv_transpose(x, w, **geometry)
        return OF_JAX[activation](y + residual + bias.reshape(1, 1, 1, -1))

    def hessian_product(f, *arrays):
        gradient = jax.grad(lambda *arrays: jnp.sum(f(*arrays) ** 2), (0, 1, 2, 3))
        return jax.jvp(gradient, arrays, arrays)

    arrays = x, w, bias, residual
    text = str(jax.make_jaxpr(ours)(*arrays))
    assert "op=dgrad" in text
    assert_trees_close(
        jax.jit(functools.partial(hessian_product, ours))(*arrays),
        jax.jit(functools.partial(hessian_product, theirs))(*arrays),
        1e-3,
    )


class TestLinear:
    """Without an activation it is linear in all but the filter, or in all but the input."""

    @pytest.mark.parametrize("constant", [0, 1])
    def test_is_transposed(self, constant: int):
        case = CASE
        arrays = operands(case, integers)
        fixed = arrays.pop(constant)
        bias_shape = [1] * len(case.y_shape)
        bias_shape[case.axes("y")[1]] = -1

        def ours(first, bias, residual):
            images, filters = (first, fixed) if constant else (fixed, first)
            return conv(case, None)(images, filters, bias, residual)

        def theirs(first, bias, residual):
            images, filters = (first, fixed) if constant else (fixed, first)
            return case.lax_conv(images, filters) + residual + bias.reshape(bias_shape)

        ct = integers(5, case.y_shape)
        found, wanted = (jax.linear_transpose(f, *arrays)(ct) for f in (ours, theirs))
        jax.tree.map(np.testing.assert_array_equal, found, wanted)

    def test_an_activation_is_not(self):
        x, w, bias, residual = operands(CASE)
        with pytest.raises(NotImplementedError, match=r"Transpose rule .* 'activate'"):
            jax.linear_transpose(lambda x: conv(CASE, "relu")(x, w, bias, residual), x)(residual)


class TestRounding:
    def test_gradients_have_the_operands_dtype(self):
        arrays = operands(CASE, dtype="bfloat16")
        f = jax.grad(lambda *arrays: jnp.sum(conv(CASE)(*arrays)), (0, 1, 2, 3))
        found = jax.eval_shape(f, *arrays)
        assert [(g.shape, g.dtype) for g in found] == [(a.shape, a.dtype) for a in arrays]

    def test_a_wider_result(self):
        x, w = (a.astype("bfloat16") for a in operands(CASE)[:2])
        bias, residual = operands(CASE)[2:]
        f = conv(CASE, "gelu", preferred_element_type="float32")
        gradients = jax.grad(lambda *arrays: jnp.sum(f(*arrays)), (0, 1, 2, 3))(
            x, w, bias, residual
        )
        assert [g.dtype.name for g in gradients] == ["bfloat16"] * 2 + ["float32"] * 2

    @pytest.mark.parametrize("activation", ["relu", None])
    def test_a_bias_gradient_is_summed_in_float32(self, activation):
        """Of 4096 ones, which bfloat16 would stop to count at 256."""
        x, w = jnp.ones((1, 1, 4096), "bfloat16"), jnp.ones((1, 1, 1), "bfloat16")
        f = lambda b: jaxcudnn.conv_bias_act(x, w, b, None, activation, padding="VALID").sum()  # noqa: E731
        assert jax.grad(f)(jnp.ones(1, "bfloat16")).item() == 4096

    def test_tangents_are_summed_in_float32(self):
        """1 + eps / 4 - 1 is nothing if it is rounded in between."""
        eps = float(jnp.finfo("bfloat16").eps)
        one = jnp.ones((1, 1, 1), "bfloat16")
        f = lambda x, b, r: jaxcudnn.conv_bias_act(x, one, b, r, padding="VALID")  # noqa: E731
        tangents = one, jnp.full(1, eps / 4, one.dtype), -one
        _, dy = jax.jvp(f, (one, jnp.ones(1, one.dtype), one), tangents)
        assert dy.item() == eps / 4


class TestStructure:
    def test_backward_pass_needs_no_other_convolution(self):
        arrays = operands(CASE)
        loss = lambda *arrays: jnp.sum(conv(CASE, "gelu")(*arrays) ** 2)  # noqa: E731
        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2, 3)))(*arrays)
        names = [eqn.primitive.name for eqn in jaxpr.eqns]
        convolutions = sorted(name for name in names if name.startswith("conv"))
        assert convolutions == ["conv_bias_act", "conv_dgrad", "conv_wgrad"]

    def test_gelu_alone_is_a_plain_convolution_under_differentiation(self):
        x, w, *_ = operands(CASE)
        jaxpr = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(conv(CASE, "gelu")(x, w))))(x)
        assert primitives(jaxpr.jaxpr) >= {"conv_fprop", "activate", "activation_grad"}

    def test_rematerialisation(self):
        arrays = operands(CASE)
        f = conv(CASE, "silu")

        def gradients(f):
            return jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1, 2, 3)))(*arrays)

        assert_trees_close(gradients(jax.checkpoint(f)), gradients(f), 1e-6)

    def test_integers_have_none(self):
        x, w = jnp.ones((1, 1, 4), "int32"), jnp.ones((1, 1, 1), "int32")
        f = lambda s: (s * jaxcudnn.conv_bias_act(x, w, padding="VALID").astype("float32")).sum()  # noqa: E731
        assert jax.grad(f)(2.0) == 4

    def test_symbolic_zeros_cost_nothing(self):
        t, saved = jnp.ones(3), jnp.arange(3.0)
        _, pullback = jax.vjp(
            lambda t: _activations.activation_grad(t, saved, "relu", "float32"), t
        )
        np.testing.assert_array_equal(pullback(t)[0], [0, 1, 1])


LAYERS = 6


def network(layer, weights, x):
    for w, b in weights:
        x = layer(x, w, b)
    return x


def ours(x, w, b):
    return jaxcudnn.conv_bias_act(x, w, b, padding="SAME", dimension_numbers=NHWC)


def ours_with_residual(x, w, b):
    return jaxcudnn.conv_bias_act(x, w, b, x, padding="SAME", dimension_numbers=NHWC)


def theirs(convolve, x, w, b, residual=False):
    y = convolve(x, w, (1, 1), "SAME", dimension_numbers=NHWC)
    return jax.nn.relu(y + (x if residual else 0) + b.reshape(1, 1, 1, -1))


def training_step(layer, weights, x):
    loss = lambda weights: jnp.mean(jnp.square(network(layer, weights, x).astype("float32")))  # noqa: E731
    return jax.grad(loss)(weights)


class TestMemory:
    """The most that a training step holds is no more than under `lax` or without fusion."""

    @pytest.mark.parametrize("residual", [False, True])
    def test_on_cpu(self, residual: bool):
        x = shaped((8, 32, 32, 16), "float32")
        weights = [(shaped((16, 3, 3, 16), "float32"), shaped((16,), "float32"))] * LAYERS

        def temporary(layer) -> int:
            compiled = jax.jit(functools.partial(training_step, layer)).lower(weights, x).compile()
            analysis = compiled.memory_analysis()
            assert analysis is not None
            return analysis.temp_size_in_bytes

        lax_layer = functools.partial(theirs, jax.lax.conv_general_dilated, residual=residual)
        assert temporary(ours_with_residual if residual else ours) <= temporary(lax_layer)

    @pytest.mark.parametrize("residual", [False, True])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_for_an_h200(self, monkeypatch, dtype: str, residual: bool):
        aot.require_plugin()
        monkeypatch.setattr(_load, "local_device", lambda: None)
        # No workspace is reserved, of which lax's convolutions have none before they are tuned.
        monkeypatch.setattr("jaxcudnn._lowering.WORKSPACE_BUDGET", 0)
        x = shaped((32, 56, 56, 64), dtype)
        weights = [(shaped((64, 3, 3, 64), dtype), shaped((64,), dtype))] * LAYERS

        def compiled(layer):
            return aot.compile(functools.partial(training_step, layer), weights, x)

        fused = compiled(ours_with_residual if residual else ours)
        assert (
            fused.operations == ["dgrad"] * (LAYERS - 1) + ["fprop"] * LAYERS + ["wgrad"] * LAYERS
        )
        forward = [call.attributes for call in fused.calls if call.attributes["op"] == "fprop"]
        assert all(call["activation"] == "relu" and call["bias"] for call in forward)
        for convolve in (jax.lax.conv_general_dilated, jaxcudnn.conv_general_dilated):
            plain = compiled(functools.partial(theirs, convolve, residual=residual))
            assert fused.temporary_bytes <= plain.temporary_bytes
