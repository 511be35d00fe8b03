# SPDX-License-Identifier: Apache-2.0
"""Derivatives against the definition, against differences and against each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.test_util import check_grads

import cases
import oracle
from cases import OPERANDS, Case, integers, normal, parametrize
from tolerance import DIFFERENCES, assert_close


@parametrize()
def test_jitted_values_and_vjp_are_the_definition(case: Case):
    @jax.jit
    def derivatives(x, w, dy):
        y, vjp = jax.vjp(case.conv, x, w)
        return y, *vjp(dy)

    x, w = case.operands("y")
    dy = normal(3, case.y_shape, "float32")
    known = {"x": x, "w": w, "y": dy}
    for role, result in zip("yxw", derivatives(x, w, dy), strict=True):
        a, b = (known[operand] for operand in OPERANDS[role])
        exact, magnitude = oracle.compute(role, a, b, case)
        assert_close(result, exact, magnitude, dtype="float32", length=case.lengths[role])


@parametrize()
def test_jvp_is_the_product_rule(case: Case):
    x, w = case.operands("y", integers)
    dx, dw = integers(5, case.x_shape), integers(6, case.w_shape)
    y, dy = jax.jvp(case.conv, (x, w), (dx, dw))
    np.testing.assert_array_equal(y, case.conv(x, w))
    np.testing.assert_array_equal(dy, case.conv(dx, w) + case.conv(x, dw))


@parametrize()
def test_second_order_against_differences(case: Case):
    check_grads(case.conv, case.operands("y"), order=2, modes=["fwd", "rev"], **DIFFERENCES)


@parametrize(cases.named("1d-strided-dilated", "2d-grouped-strided"))
def test_derivatives_of_a_nonlinear_function_are_those_of_lax(case: Case):
    def hessian(conv):
        return jax.jit(jax.hessian(lambda x, w: jnp.sum(jnp.tanh(conv(x, w))), argnums=(0, 1)))

    x, w = case.operands("y")
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4),
        hessian(case.conv)(x, w),
        hessian(case.lax_conv)(x, w),
    )


@parametrize()
def test_adjoint_identities(case: Case):
    """<fprop(x, w), dy> = <x, dgrad(dy, w)> = <w, wgrad(x, dy)>, in integers and so exactly."""
    x, w = case.operands("y", integers)
    y, vjp = jax.vjp(case.conv, x, w)
    dy = integers(3, y.shape)
    dx, dw = vjp(dy)

    def inner(a, b) -> float:
        return np.vdot(np.asarray(a, np.float64), np.asarray(b, np.float64)).item()

    assert inner(y, dy) == inner(x, dx) == inner(w, dw)


@pytest.mark.parametrize("operand", [0, 1])
@pytest.mark.parametrize("computed", ["y", "x", "w"])
@parametrize(cases.named("2d-scrambled", "2d-grouped-strided", "3d-grouped-dilated"))
def test_transposes_close_over_the_three_functions(case: Case, computed: str, operand: int):
    """Each entry of the table of transposes: the cotangent takes the computed role, exactly."""
    operands = case.operands(computed, integers)
    ct = integers(4, case.shape(computed))
    _, vjp = jax.vjp(case.cudnn(computed), *operands)

    wanted, other = OPERANDS[computed][operand], OPERANDS[computed][1 - operand]
    known = {computed: ct, other: operands[1 - operand]}
    expected = case.cudnn(wanted)(*(known[role] for role in OPERANDS[wanted]))
    np.testing.assert_array_equal(vjp(ct)[operand], expected)


def primitives(jaxpr: core.Jaxpr) -> set[str]:
    inner = [sub for eqn in jaxpr.eqns for sub in core.jaxprs_in_params(eqn.params)]
    return {eqn.primitive.name for eqn in jaxpr.eqns}.union(*map(primitives, inner))


def test_third_order_needs_no_other_convolution():
    (case,) = cases.named("2d-grouped-strided")
    x, w = case.operands("y")

    def loss(x, w):
        return jnp.sum(case.conv(x, w) ** 3)

    def third(x, w):
        second = jax.grad(lambda x, w: jnp.sum(jax.grad(loss, 0)(x, w) ** 2), 1)
        return jax.jvp(second, (x, w), (x, w))

    names = primitives(jax.make_jaxpr(third)(x, w).jaxpr)
    assert {"conv_fprop", "conv_dgrad", "conv_wgrad"} <= names
    assert "conv_general_dilated" not in names


def test_rematerialisation():
    (case,) = cases.named("2d-last")
    x, w = case.operands("y")

    def gradient(conv):
        return jax.jit(jax.grad(lambda w: jnp.sum(jnp.sin(conv(x, w)))))(w)

    np.testing.assert_allclose(
        gradient(jax.checkpoint(case.conv)), gradient(case.conv), rtol=1e-6, atol=1e-6
    )


@parametrize(dtypes=["bfloat16", "float16"])
def test_gradients_have_the_operands_dtype(case: Case, dtype: str):
    x, w = case.operands("y", dtype=dtype)
    gradients = jax.eval_shape(jax.grad(lambda x, w: jnp.sum(case.conv(x, w)), (0, 1)), x, w)
    assert [(g.shape, g.dtype) for g in gradients] == [(x.shape, x.dtype), (w.shape, w.dtype)]
