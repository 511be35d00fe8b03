# SPDX-License-Identifier: Apache-2.0
"""jax.vmap of the three operations over each operand and both, in integers and so exactly."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from cases import OPERANDS, Case, integers, normal, parametrize

MAPPED = [(0, None), (None, 0), (0, 0)]

every_role = pytest.mark.parametrize("computed", ["y", "x", "w"])


def stacked(case: Case, computed: str, axes: tuple[int | None, ...], b: int) -> list[jax.Array]:
    """The two operands, those that are mapped with a dimension of size b at their axis."""
    operands = []
    for seed, (role, axis) in enumerate(zip(OPERANDS[computed], axes, strict=True)):
        shape = list(case.shape(role))
        if axis is not None:
            shape.insert(axis, b)
        operands.append(integers(seed, shape))
    return operands


def operation(case: Case, computed: str):
    """By cuDNN's name, or where that does not take the padding, by lax's and its transposes."""
    if not case.crops:
        return case.cudnn(computed)
    wanted = jax.ShapeDtypeStruct(case.shape(computed), jnp.float32)
    return {
        "y": case.conv,
        "x": lambda dy, w: jax.linear_transpose(lambda x: case.conv(x, w), wanted)(dy)[0],
        "w": lambda x, dy: jax.linear_transpose(lambda w: case.conv(x, w), wanted)(dy)[0],
    }[computed]


@functools.cache
def compiled(case: Case, computed: str):
    return jax.jit(operation(case, computed))


def one_by_one(function, operands, axes: tuple[int | None, ...], b: int) -> np.ndarray:
    results = []
    for i in range(b):
        picked = (
            a if axis is None else np.take(np.asarray(a), i, axis)
            for a, axis in zip(operands, axes, strict=True)
        )
        results.append(np.asarray(function(*picked)))
    return np.stack(results)


def check(case: Case, computed: str, axes: tuple[int | None, ...], b: int = 3) -> None:
    function = compiled(case, computed)
    operands = stacked(case, computed, axes, b)
    mapped = jax.jit(jax.vmap(function, axes))(*operands)
    np.testing.assert_array_equal(mapped, one_by_one(function, operands, axes, b))


@parametrize()
def test_vmap(case: Case):
    """Of the three operations over each operand and both, compiled as one program."""
    ways = list(itertools.product(OPERANDS, MAPPED))
    operands = [stacked(case, computed, axes, 3) for computed, axes in ways]

    @jax.jit
    def mapped(operands):
        return [
            jax.vmap(operation(case, computed), axes)(*each)
            for (computed, axes), each in zip(ways, operands, strict=True)
        ]

    for (computed, axes), each, result in zip(ways, operands, mapped(operands), strict=True):
        expected = one_by_one(compiled(case, computed), each, axes, 3)
        np.testing.assert_array_equal(result, expected, err_msg=f"{computed}, mapped {axes}")


@every_role
@pytest.mark.parametrize("first", [None, 0, 1, 2, 3, 4])
def test_vmap_over_every_axis(first: int | None, computed: str):
    (case,) = cases.named("2d-grouped-scrambled")
    for second in (None, 0, 1, 2, 3, 4):
        if (first, second) != (None, None):
            check(case, computed, (first, second), b=2)


@every_role
@pytest.mark.parametrize("axes", MAPPED, ids=str)
def test_vmap_over_one(axes: tuple[int | None, ...], computed: str):
    (case,) = cases.named("2d-grouped-strided")
    check(case, computed, axes, b=1)


@every_role
@pytest.mark.parametrize("axes", MAPPED, ids=str)
def test_vmap_over_none(axes: tuple[int | None, ...], computed: str):
    (case,) = cases.named("2d-grouped-strided")
    result = jax.vmap(case.cudnn(computed), axes)(*stacked(case, computed, axes, 0))
    assert result.shape == (0, *case.shape(computed))
    assert result.dtype == jnp.float32


@every_role
@pytest.mark.parametrize("outer, inner", list(itertools.product(MAPPED, MAPPED)), ids=str)
def test_nested_vmap(outer: tuple[int | None, ...], inner: tuple[int | None, ...], computed: str):
    (case,) = cases.named("2d-grouped-scrambled")
    function = compiled(case, computed)
    operands = []
    for seed, (role, a, b) in enumerate(zip(OPERANDS[computed], outer, inner, strict=True)):
        leading = [size for size, axis in ((2, a), (3, b)) if axis is not None]
        operands.append(integers(seed, [*leading, *case.shape(role)]))

    mapped = jax.jit(jax.vmap(jax.vmap(function, inner), outer))(*operands)
    expected = one_by_one(lambda *rows: one_by_one(function, rows, inner, 3), operands, outer, 2)
    np.testing.assert_array_equal(mapped, expected)


def test_out_axes():
    (case,) = cases.named("2d-last")
    operands = stacked(case, "y", (1, None), 3)
    mapped = jax.vmap(case.conv, (1, None), out_axes=2)(*operands)
    np.testing.assert_array_equal(
        jnp.moveaxis(mapped, 2, 0), jax.vmap(case.conv, (1, None))(*operands)
    )


def test_per_example_gradients():
    (case,) = cases.named("2d-grouped-strided")
    x, w = normal(0, (3, *case.x_shape), "float32"), normal(1, case.w_shape, "float32")
    gradient = jax.jit(jax.grad(lambda x, w: jnp.sum(case.conv(x, w) ** 2), argnums=(0, 1)))
    mapped = jax.vmap(gradient, (0, None))(x, w)
    for i in range(3):
        for together, alone in zip(mapped, gradient(x[i], w), strict=True):
            np.testing.assert_allclose(together[i], alone, rtol=1e-5, atol=1e-4)


def test_gradient_of_a_vmap():
    (case,) = cases.named("2d-grouped-strided")
    x, w = normal(0, (3, *case.x_shape), "float32"), normal(1, (3, *case.w_shape), "float32")

    def gradient(conv):
        return jax.grad(lambda w: jnp.sum(jax.vmap(conv)(x, w) ** 2))(w)

    np.testing.assert_allclose(gradient(case.conv), gradient(case.lax_conv), rtol=1e-5, atol=1e-4)
