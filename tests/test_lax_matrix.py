# SPDX-License-Identifier: Apache-2.0
"""JAX's own tests of its convolutions, on ours: values, refusals, derivatives and `vmap`.

Operands are small integers, so that everything is compared with == to what `lax` computes on the
CPU. How many cases that is, lax_case.py says; how many passed, pytest's summary.
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.test_util import check_grads

import conftest
from cases import integers
from lax_case import FUNCTIONS, MatrixCase, assert_same, derivatives, parametrize, stack
from lax_matrix import GRADIENTS, NHWC, VALUES, VMAP, WIDE_INEXACT
from tolerance import LINEAR_DIFFERENCES

OURS = FUNCTIONS is not lax
LAX_EXCEPTIONS = (TypeError, ValueError, RuntimeError, AssertionError)
EXCEPTIONS = (TypeError, ValueError) if OURS else LAX_EXCEPTIONS


@parametrize(VALUES)
def test_values(case: MatrixCase):
    with case.x64():
        lhs, rhs = case.operands()
        assert_same(jax.jit(case.of(FUNCTIONS))(lhs, rhs), jax.jit(case.of(lax))(lhs, rhs))


@parametrize(GRADIENTS)
def test_derivatives(case: MatrixCase):
    with case.x64():
        arguments = case.arguments_of_derivatives()
        computed, expected = (derivatives(case.of(f))(*arguments) for f in (FUNCTIONS, lax))
        jax.tree.map(assert_same, computed, expected)


def is_differenced(case: MatrixCase) -> bool:
    return case.seed % 10 == 0 and case.dtype in WIDE_INEXACT


@parametrize(GRADIENTS, keep=is_differenced)
def test_derivatives_against_differences(case: MatrixCase):
    """JAX does it in 16 bits as well, where a tolerance shows less than equality above does."""
    with case.x64():
        lhs, rhs = case.operands()
        conv = jax.jit(case.of(FUNCTIONS))
        for function, operand in (
            (lambda lhs: conv(lhs, rhs), lhs),
            (lambda rhs: conv(lhs, rhs), rhs),
        ):
            check_grads(function, [operand], order=2, modes=["fwd", "rev"], **LINEAR_DIFFERENCES)


@parametrize(VMAP)
def test_vmap(case: MatrixCase):
    operands = case.operands()
    mapped = jax.jit(jax.vmap(case.of(FUNCTIONS), case.mapped))
    assert_same(mapped(*operands), stack(case, operands))


def draw(seed: int, *shape: int) -> jax.Array:
    return integers(seed, shape)


def test_no_spatial_dimension_is_a_matrix_product():
    lhs, rhs = draw(1, 10, 5), draw(2, 5, 7)
    computed = FUNCTIONS.conv_general_dilated(
        lhs, rhs, window_strides=(), padding="VALID", dimension_numbers=("NC", "IO", "NC")
    )
    np.testing.assert_array_equal(computed, np.dot(lhs, rhs))


def test_gradient_without_spatial_dimensions():
    lhs, rhs = jnp.ones((2, 5)), jnp.ones((5, 10))
    dimension_numbers = lax.ConvDimensionNumbers((0, 1), (1, 0), (0, 1))

    def conv(lhs, rhs):
        return FUNCTIONS.conv_general_dilated(
            lhs, rhs, (), (), lhs_dilation=(), rhs_dilation=(), dimension_numbers=dimension_numbers
        )

    y, pullback = jax.vjp(conv, lhs, rhs)
    dlhs, drhs = pullback(jnp.ones_like(y))
    np.testing.assert_array_equal(dlhs, 10 * lhs)
    np.testing.assert_array_equal(drhs, 2 * rhs)


def test_padding_may_be_a_list():
    y = FUNCTIONS.conv_general_dilated(
        jnp.ones((1, 1, 28, 28)), jnp.ones((1, 1, 3, 3)), (1, 1), [(0, 0), (0, 0)], (1, 1)
    )
    np.testing.assert_array_equal(y, 9 * jnp.ones((1, 1, 26, 26)))


def test_gradients_of_a_wider_result_have_the_operands_dtype():
    x, w = jnp.ones((1, 8, 4), jnp.bfloat16), jnp.ones((3, 4, 8), jnp.bfloat16)

    def loss(functions):
        return lambda x, w: jnp.sum(functions.conv_general_dilated(
            x, w, window_strides=(1,), padding="VALID", rhs_dilation=(1,),
            dimension_numbers=("NLC", "LIO", "NLC"), preferred_element_type=jnp.float32,
        ))  # fmt: skip

    computed, expected = (jax.grad(loss(f), argnums=(0, 1))(x, w) for f in (FUNCTIONS, lax))
    jax.tree.map(assert_same, computed, expected)


def test_per_example_gradients():
    w, x = draw(1, 3, 3, 1, 5), draw(2, 10, 1, 5, 5, 1)

    def conv(functions):
        return lambda w, x: functions.conv_general_dilated(
            x, w, (1, 1), "SAME", (1, 1), (1, 1), NHWC
        )

    def gradient(conv):
        return jax.jit(jax.grad(lambda w, x: jnp.sum(conv(w, x) ** 2)))

    ours, theirs = conv(FUNCTIONS), conv(lax)
    mapped = jax.vmap(ours, (None, 0))(w, x)
    np.testing.assert_array_equal(mapped[:, 0], theirs(w, x[:, 0]))
    per_example = jax.vmap(gradient(ours), (None, 0))(w, x)
    one = gradient(theirs)
    np.testing.assert_array_equal(per_example, np.stack([one(w, example) for example in x]))


def test_vmap_where_images_are_not_the_first_dimension():
    w, x = draw(1, 3, 3, 1, 4), draw(2, 3, 5, 7, 5, 1)

    def conv(functions):
        return lambda x: functions.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("HNWC", "HWIO", "HWNC")
        )

    expected = conv(lax)(jnp.moveaxis(x, 0, 1).reshape(5, 21, 5, 1))
    mapped = jax.vmap(conv(FUNCTIONS))(x)
    np.testing.assert_array_equal(jnp.moveaxis(mapped, 0, 2).reshape(5, 5, 21, 4), expected)


X, W = (2, 4, 6, 6), (6, 4, 3, 3)
GEOMETRY: dict[str, Any] = {"window_strides": (1, 1), "padding": ((1, 1), (1, 1))}
GENERAL = {"lhs_dilation": (1, 1), "rhs_dilation": (1, 1)}
TRANSPOSED: dict[str, Any] = {"strides": (1, 1), "padding": "SAME"}
AXES = lax.ConvDimensionNumbers((0, 1, 2), (0, 1, 2), (0, 1, 2))
REFUSED = {  # a function, shapes of lhs and rhs, and what else is changed
    "ranks": ("conv_general_dilated", X, W[:3], {}),
    "ranks-axes": ("conv_general_dilated", X[:3], W, {
        "dimension_numbers": AXES, "window_strides": (1,), "padding": ((0, 0),)}),
    "strides-too-few": ("conv", X, W, {"window_strides": [1], "padding": "SAME"}),
    "strides-too-many": ("conv_general_dilated", X, W, {"window_strides": (1, 1, 1)}),
    "padding-of-numbers": ("conv_general_dilated", X, W, {"padding": (3, 3)}),
    "padding-too-short": ("conv_general_dilated", X, W, {"padding": ((1, 1),)}),
    "padding-unknown": ("conv", X, W, {"padding": "FULL"}),
    "padding-crops-too-much": ("conv_general_dilated", X, W, {"padding": ((-4, -3), (0, 0))}),
    "padding-name-with-lhs-dilation": ("conv_general_dilated", X, W, {
        "padding": "SAME", "lhs_dilation": (2, 1)}),
    "features-zero": ("conv_general_dilated", X, W, {"feature_group_count": 0}),
    "features-divide-no-channels": ("conv_general_dilated", X, W, {"feature_group_count": 3}),
    "features-divide-no-outputs": ("conv_general_dilated", X, (6, 1, 3, 3), {
        "feature_group_count": 4}),
    "features-of-other-inputs": ("conv_general_dilated", X, W, {"feature_group_count": 2}),
    "inputs": ("conv_with_general_padding", X, (6, 3, 3, 3), {}),
    "batches-zero": ("conv_general_dilated", X, W, {"batch_group_count": 0}),
    "batches-divide-no-images": ("conv_general_dilated", X, W, {"batch_group_count": 3}),
    "batches-divide-no-outputs": ("conv_general_dilated", X, (5, 4, 3, 3), {
        "batch_group_count": 2}),
    "both-groups": ("conv_general_dilated", X, (6, 2, 3, 3), {
        "feature_group_count": 2, "batch_group_count": 2}),
    "dimension-numbers-two": ("conv_general_dilated", X, W, {
        "dimension_numbers": ("NCHW", "OIHW")}),
    "dimension-numbers-a-string": ("conv_general_dilated", X, W, {"dimension_numbers": "NCHW"}),
    "dimension-numbers-no-strings": ("conv_general_dilated", X, W, {
        "dimension_numbers": ((0, 1, 2, 3),) * 3}),
    "dimension-numbers-short": ("conv_general_dilated", X, W, {
        "dimension_numbers": ("NCH", "OIH", "NCH")}),
    "dimension-numbers-without-n": ("conv_general_dilated", X, W, {
        "dimension_numbers": ("XCHW", "OIHW", "NCHW")}),
    "dimension-numbers-twice": ("conv_general_dilated", X, W, {
        "dimension_numbers": ("NCHH", "OIHH", "NCHH")}),
    "dimension-numbers-of-other-positions": ("conv_general_dilated", X, W, {
        "dimension_numbers": ("NCHW", "OIHD", "NCHW")}),
    "transpose-ranks": ("conv_transpose", X, W[:3], {}),
    "transpose-rank-1": ("conv_transpose", (4,), (4,), {"strides": ()}),
    "transpose-no-default-layout": ("conv_transpose", (1,) * 6, (1,) * 6, {"strides": (1,) * 4}),
    "transpose-inputs": ("conv_transpose", X, (3, 3, 5, 6), {}),
    "transpose-padding-unknown": ("conv_transpose", X, (3, 3, 6, 5), {"padding": "FULL"}),
}  # fmt: skip


def refused(name: str):
    function, lhs_shape, rhs_shape, changes = REFUSED[name]
    arguments = TRANSPOSED if function == "conv_transpose" else GEOMETRY
    arguments = arguments | (GENERAL if function == "conv_with_general_padding" else {})
    return function, (jnp.ones(lhs_shape), jnp.ones(rhs_shape)), arguments | changes


@pytest.mark.parametrize("name", REFUSED)
def test_refused_as_by_lax(name: str):
    function, operands, arguments = refused(name)
    with pytest.raises(LAX_EXCEPTIONS):
        getattr(lax, function)(*operands, **arguments)
    with pytest.raises(EXCEPTIONS) as error:
        getattr(FUNCTIONS, function)(*operands, **arguments)
    assert str(error.value).startswith(f"jaxcudnn.{function}: " if OURS else "")


@pytest.mark.parametrize("function", ["conv", "conv_general_dilated", "conv_with_general_padding"])
def test_what_is_changed_above_is_accepted(function: str):
    general = GENERAL if function == "conv_with_general_padding" else {}
    getattr(FUNCTIONS, function)(jnp.ones(X), jnp.ones(W), **GEOMETRY, **general)
    FUNCTIONS.conv_transpose(jnp.ones(X), jnp.ones((3, 3, 6, 5)), **TRANSPOSED)


def test_the_summary_counts_cases():
    def report(name: str):
        return SimpleNamespace(nodeid=f"tests/test_{name}.py::test_values[conv-0]")

    lines: list[str] = []
    reporter: Any = SimpleNamespace(write_line=lines.append, stats={})
    conftest.pytest_terminal_summary(reporter)
    reporter.stats["passed"] = [report("forward")]
    conftest.pytest_terminal_summary(reporter)
    assert lines == []
    reporter.stats["passed"] += [report("lax_matrix"), report("gpu_lax_matrix")]
    reporter.stats |= {"failed": [report("lax_matrix")], "error": [report("lax_matrix")]}
    reporter.stats["skipped"] = [report("gpu_lax_matrix")]
    conftest.pytest_terminal_summary(reporter)
    assert lines == ["JAX's own tests of convolutions: 2 passed, 2 failed, 1 skipped"]
