# SPDX-License-Identifier: Apache-2.0
"""Shapes and values of the public functions, computed by the formulas in `lax`."""

import doctest
import re
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import cases
import jaxcudnn
import oracle
from cases import Case, normal, parametrize
from jaxcudnn import _api
from tolerance import assert_close

FLIPPED = cases.named(
    "1d-strided-dilated", "2d", "2d-scrambled", "2d-grouped-strided", "3d", "no-images"
)


def check(computed, role: str, a, b, case: Case, *, flip: bool = False) -> None:
    exact, magnitude = oracle.compute(role, a, b, case, flip=flip)
    assert_close(computed, exact, magnitude, dtype=str(a.dtype), length=case.lengths[role])


@parametrize(dtypes=cases.DTYPES)
def test_shape_and_dtype_are_those_of_lax(case: Case, dtype: str):
    operands = [jax.ShapeDtypeStruct(case.shape(role), dtype) for role in "xw"]
    assert jax.eval_shape(case.conv, *operands) == jax.eval_shape(case.lax_conv, *operands)


@parametrize(dtypes=cases.DTYPES)
def test_values_are_the_definition(case: Case, dtype: str):
    x, w = case.operands("y", dtype=dtype)
    check(case.conv(x, w), "y", x, w, case)


@pytest.mark.parametrize("role", ["x", "w"])
@parametrize(cases.CUDNN_CASES)
def test_gradient_functions_are_the_definition(case: Case, role: str):
    a, b = case.operands(role)
    check(case.cudnn(role)(a, b), role, a, b, case)


def test_gradient_over_which_xla_ended_the_process():
    """It has two taps and a stride of two, and in the other dimension more taps than rows."""
    tricky = cases.case("", (1, 16), (5, 2), ((3, 1), (1, 1)), strides=(1, 2))
    dy, w = tricky.operands("x")
    check(jax.jit(tricky.cudnn("x"))(dy, w), "x", dy, w, tricky)


@pytest.mark.parametrize("role", ["x", "w", "y"])
@parametrize(FLIPPED)
def test_convolution_mode_reverses_the_window(case: Case, role: str):
    a, b = case.operands(role)
    computed = case.cudnn(role, convolution_mode="CONVOLUTION")(a, b)
    check(computed, role, a, b, case, flip=True)


@pytest.mark.parametrize("role", ["x", "w"])
@parametrize(cases.named("2d-grouped-strided", "3d"), dtypes=["bfloat16", "float16"])
def test_gradient_functions_in_16_bits(case: Case, role: str, dtype: str):
    a, b = case.operands(role, dtype=dtype)
    check(case.cudnn(role)(a, b), role, a, b, case)


@parametrize(cases.named("1d-last", "2d-scrambled", "2d-depthwise", "3d"))
def test_conv_fprop_is_conv_general_dilated(case: Case):
    x, w = case.operands("y")
    np.testing.assert_array_equal(case.cudnn("y")(x, w), case.conv(x, w))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("role", ["y", "x", "w"])
def test_sums_are_kept_in_float32(role: str, dtype: str):
    """Adding 1 to 4096 changes nothing in 16 bits, so a 16-bit sum would stop below 16384."""
    length = 16384
    n, c, k = {"y": (1, length, 1), "x": (1, 1, length), "w": (length, 1, 1)}[role]
    case = cases.case("long sum", (1, 1), (1, 1), n=n, c=c, k=k)
    a, b = (jnp.ones(case.shape(operand), dtype) for operand in cases.OPERANDS[role])
    function = jax.jit(case.cudnn(role))
    assert function(a, b).item() == length
    # XLA may sum in float32 on CPU without being asked, but not everywhere.
    assert re.search(
        r"stablehlo.convolution.*-> tensor<[\dx]*xf32>", function.lower(a, b).as_text()
    )


def test_numpy_operands_are_taken_as_lax_takes_them():
    def convolved(module: ModuleType) -> jax.Array:
        # float64, which becomes float32
        x, w = np.ones((1, 2, 4, 4)), np.ones((3, 2, 2, 2))
        return module.conv_general_dilated(x, w, (1, 1), "VALID")

    assert convolved(jaxcudnn).dtype == convolved(lax).dtype
    np.testing.assert_array_equal(convolved(jaxcudnn), convolved(lax))


def test_objects_that_become_arrays_are_operands():
    class Parameter:
        def __jax_array__(self):
            return jnp.ones((3, 2, 2, 2))

    x = jnp.ones((1, 2, 4, 4))
    assert jaxcudnn.conv_fprop(x, Parameter(), padding=0).shape == (1, 3, 3, 3)  # pyright: ignore


def test_a_window_of_size_0_gives_zeros():
    x, w = normal(0, (1, 2, 4), "float32"), jnp.ones((3, 2, 0))
    y, vjp = jax.vjp(lambda x, w: jaxcudnn.conv_fprop(x, w, padding=1), x, w)
    dx, dw = vjp(jnp.ones_like(y))
    assert y.shape == (1, 3, 7) and dw.shape == w.shape
    assert not y.any() and not dx.any()


@pytest.mark.parametrize("element_type", [None, "float32", jnp.float32, float])
def test_arguments_that_ask_for_nothing_special_are_accepted(element_type):
    x, w = normal(0, (1, 2, 4, 4), "float32"), normal(1, (3, 2, 2, 2), "float32")
    strides: Any = np.array([1, 1])
    padding, ones, nothing = ((0, 0), (0, 0)), [1, 1], None
    y = jaxcudnn.conv_general_dilated(
        x, w, strides, padding, (1, 1), ones, nothing, 1, 1, nothing, element_type, nothing
    )
    np.testing.assert_array_equal(y, jaxcudnn.conv_general_dilated(x, w, (1, 1), "VALID"))


class Enumerator:
    """As those of cuDNN's, whose name says what they are."""

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name


@pytest.mark.parametrize(
    "arguments",
    [
        {"padding": 1},
        {"padding": [1, 1]},
        {"padding": np.array([1, 1])},
        {"pre_padding": 1, "post_padding": (1, 1)},
        {"padding": 1, "stride": [1, 1], "dilation": (1, 1)},
        {"padding": 1, "convolution_mode": Enumerator("CROSS_CORRELATION")},
        {"padding": 1, "convolution_mode": "cross_correlation"},
        {"padding": 1, "compute_data_type": "float32"},
        {"padding": 1, "compute_data_type": "NOT_SET"},
        {"padding": 1, "compute_data_type": jnp.float32},
        {"padding": 1, "compute_data_type": np.dtype("float32")},
        {"padding": 1, "compute_data_type": Enumerator("FLOAT")},
        {"padding": 1, "name": "stem"},
        {"padding": 1, "precision": "highest"},
        {"padding": 1, "dimension_numbers": ("NCHW", "OIHW", "NCHW")},
    ],
    ids=str,
)  # fmt: skip
def test_cudnn_arguments_that_mean_the_same(arguments):
    x, w = normal(0, (1, 2, 4, 4), "float32"), normal(1, (3, 2, 3, 3), "float32")
    expected = lax.conv_general_dilated(x, w, (1, 1), ((1, 1), (1, 1)))
    np.testing.assert_allclose(
        jaxcudnn.conv_fprop(x, w, **arguments), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("role", cases.OPERANDS)
def test_descales_multiply_the_sum_before_it_is_rounded(role: str, dtype: str):
    """The sum by itself is infinite in float16."""
    first, second = {
        "y": ("image_descale", "weight_descale"),
        "x": ("loss_descale", "filter_descale"),
        "w": ("image_descale", "loss_descale"),
    }[role]
    c = cases.case("one", (1,), (1,), n=9 if role == "w" else 1, c=1 if role != "y" else 9,
             k=1 if role != "x" else 9)  # fmt: skip
    a, b = (jnp.full(array.shape, 120, dtype) for array in c.operands(role))
    compute = c.cudnn(role, preferred_element_type="float16", **{first: 0.5, second: 0.25})
    with jax.numpy_dtype_promotion("strict"):
        result = compute(a, b)
    assert result.dtype == "float16" and result.ravel().tolist() == [9 * 120 * 120 / 8]


def test_name_is_a_named_scope():
    x, w = jnp.ones((1, 2, 4)), jnp.ones((3, 2, 2))
    stem = jax.jit(lambda x, w: jaxcudnn.conv_fprop(x, w, padding=0, name="stem"))
    assert "/stem/" in stem.lower(x, w).as_text(debug_info=True)


def test_documented_examples():
    assert doctest.testmod(_api).attempted > 0
    assert doctest.testmod(_api).failed == 0
