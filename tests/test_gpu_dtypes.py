# SPDX-License-Identifier: Apache-2.0
"""Every dtype on the GPU with small integers, compared with == to the definition."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcudnn
import oracle
from cases import CHANNELS_LAST, OPERANDS, Case, case, integers, parametrize
from test_lowering import calls

pytestmark = pytest.mark.gpu

CASES = [
    case("1d-dilated", (9,), (3,), ((2, 0),), c=6, k=10, dilation=(2,),
         dimension_numbers=CHANNELS_LAST[1]),
    case("2d-strided-grouped", (9, 8), (3, 2), ((1, 1), (2, 0)), c=16, k=32, n=3, groups=2,
         strides=(2, 1), dimension_numbers=CHANNELS_LAST[2]),
    case("2d-first-one-channel", (9, 8), (3, 3), "SAME", c=1, k=5),
    case("3d", (5, 4, 6), (2, 2, 1), "SAME", c=4, k=8, dimension_numbers=CHANNELS_LAST[3]),
    case("0d", (), (), (), c=4, k=8, dimension_numbers=("NC", "OI", "NC")),
    case("4d", (3, 2, 3, 2), (2, 1, 2, 1), ((1, 0),) * 4, c=3, k=2,
         dimension_numbers=("NABDEC", "OABDEI", "NABDEC")),
]  # fmt: skip
FLOATS = [
    ("float64", None), ("float16", "float32"), ("bfloat16", "float32"), ("bfloat16", "float16"),
    ("float32", "float64"), ("float8_e4m3fn", "float32"), ("float8_e4m3fn", "bfloat16"),
    ("float8_e4m3fn", "float16"), ("float8_e5m2", "float32"), ("float8_e5m2", None),
    ("complex64", None), ("complex128", None),
]  # fmt: skip
INTEGERS = [
    ("int8", "int32"), ("int8", None), ("int8", "float32"), ("int8", "bfloat16"), ("int16", None),
    ("int32", None), ("int64", None), ("uint8", "int32"), ("uint8", None), ("bool", None),
]  # fmt: skip


def small(seed: int, shape: Any, dtype: str) -> jax.Array:
    """Numbers so small that their sums are exact in 8 bits, and not negative if unsigned."""
    drawn = np.random.default_rng(seed).integers(-1, 2, shape)
    return jnp.asarray(abs(drawn) if dtype[0] in "ub" else drawn).astype(dtype)


def check(case: Case, dtype: str, result_dtype: str | None) -> None:
    """All three operations in one program, in every dtype that this takes."""
    with jax.enable_x64(True):
        arrays = {role: small(i, case.shape(role), dtype) for i, role in enumerate("xwy")}
        operands = {role: [arrays[name] for name in names] for role, names in OPERANDS.items()}
        functions = {
            role: case.cudnn(role, preferred_element_type=result_dtype) for role in OPERANDS
        }
        results = jax.jit(lambda given: {role: functions[role](*given[role]) for role in given})
        for role, computed in results(operands).items():
            real = (np.real(np.asarray(operand)) for operand in operands[role])
            exact, _ = oracle.compute(role, *real, case=case)
            wanted = result_dtype or dtype
            assert computed.dtype == wanted
            np.testing.assert_array_equal(computed, exact.astype(wanted), err_msg=role)


@parametrize(CASES)
@pytest.mark.parametrize("dtype, result_dtype", FLOATS)
def test_floats(case: Case, dtype: str, result_dtype: str | None):
    check(case, dtype, result_dtype)


@parametrize(CASES)
@pytest.mark.parametrize("dtype, result_dtype", INTEGERS)
def test_integers(case: Case, dtype: str, result_dtype: str | None):
    check(case, dtype, result_dtype)


def test_sums_of_int8_beyond_float32_are_exact():
    x = jnp.full((1, 4, 4, 2048), 127, jnp.int8)
    w = jnp.full((8, 1, 1, 2048), 127, jnp.int8).at[:, 0, 0, 0].set(126)
    y = jax.jit(
        lambda x, w: jaxcudnn.conv_general_dilated(
            x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "OHWI", "NHWC"),
            preferred_element_type=jnp.int32,
        )
    )(x, w)  # fmt: skip
    np.testing.assert_array_equal(y, 2048 * 127 * 127 - 127)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("window", [3, 5])
def test_partial_sums_are_not_rounded(window: int, dtype: str):
    """Depthwise filter gradients over many positions, as large as the dtype still counts."""
    conv = case("long", (64, 64), (window, window), "SAME", n=8, c=104, k=104, groups=104,
                dimension_numbers=CHANNELS_LAST[2])  # fmt: skip
    x, dy = integers(0, conv.x_shape, dtype), integers(1, conv.y_shape, dtype)
    exact, _ = oracle.compute("w", x, dy, case=conv)
    np.testing.assert_array_equal(jax.jit(conv.cudnn("w"))(x, dy), exact.astype(dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_a_wider_result(dtype: str):
    """In the dtype of what they are gradients of, each rounded once."""
    conv = case("wide", (9, 9), (3, 3), "SAME", c=8, k=8, n=4)
    x, w = integers(0, conv.x_shape, dtype), integers(1, conv.w_shape, dtype)
    dy = integers(2, conv.y_shape)

    def f(x, w):
        return jaxcudnn.conv_general_dilated(
            x, w, **conv.arguments, preferred_element_type="float32"
        )

    y, pullback = jax.vjp(jax.jit(f), x, w)
    dx, dw = pullback(dy)
    assert (y.dtype, dx.dtype, dw.dtype) == ("float32", dtype, dtype)
    for role, computed, pair in (("y", y, (x, w)), ("x", dx, (dy, w)), ("w", dw, (x, dy))):
        exact, _ = oracle.compute(role, *pair, case=conv)
        np.testing.assert_array_equal(np.asarray(computed), exact.astype(computed.dtype))


@pytest.mark.parametrize("dtype, offset", list(itertools.product(["int8", "float64"], [1, 3])))
def test_slices_of_a_flat_vector(dtype: str, offset: int):
    """Pointers that are multiples of the dtype's size alone."""
    conv = case("slices", (8, 8), (3, 3), "SAME", c=8, k=8, dimension_numbers=CHANNELS_LAST[2])
    with jax.enable_x64(True):
        sizes = math.prod(conv.x_shape), math.prod(conv.w_shape)
        flat = integers(0, (offset + sum(sizes),), "float32").astype(dtype)
        result_dtype = "int32" if dtype == "int8" else None

        @jax.jit
        def f(flat):
            x = flat[offset : offset + sizes[0]].reshape(conv.x_shape)
            w = flat[offset + sizes[0] :].reshape(conv.w_shape)
            return jaxcudnn.conv_general_dilated(
                x, w, **conv.arguments, preferred_element_type=result_dtype
            )

        numbers = np.asarray(flat)[offset:]
        x, w = numbers[: sizes[0]].reshape(conv.x_shape), numbers[sizes[0] :].reshape(conv.w_shape)
        exact, _ = oracle.compute("y", x, w, case=conv)
        np.testing.assert_array_equal(f(flat), exact)


def test_batches_around_the_largest_grid():
    """CUDA's grids end at 65,535 in two of their dimensions."""
    conv = jax.jit(
        lambda x, w: jaxcudnn.conv_general_dilated(
            x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "OHWI", "NHWC")
        )
    )
    grad = jax.jit(jax.grad(lambda x, w: (conv(x, w) ** 2).sum() / 2, argnums=(0, 1)))
    for images in (65_535, 65_536, 65_537):
        x, w = small(0, (images, 4, 3, 4), "float32"), small(1, (4, 2, 2, 4), "float32")
        host, taps = np.asarray(x, np.float64), np.asarray(w, np.float64)
        places = list(itertools.product(range(2), range(2)))
        seen = {(i, j): host[:, i : i + 3, j : j + 2] for i, j in places}
        y = sum(np.einsum("nhwc,oc->nhwo", seen[place], taps[:, *place]) for place in places)
        np.testing.assert_array_equal(conv(x, w), y)
        dx, dw = grad(x, w)
        exact = np.zeros_like(host)
        for i, j in places:
            exact[:, i : i + 3, j : j + 2] += np.einsum("nhwo,oc->nhwc", y, taps[:, i, j])
            np.testing.assert_array_equal(dw[:, i, j], np.einsum("nhwo,nhwc->oc", y, seen[i, j]))
        np.testing.assert_array_equal(dx, exact)


def test_what_cudnn_computes_is_computed_by_cudnn():
    """One custom call for each dtype that the table of dtypes has, for every operation."""
    conv = CASES[1]
    for dtype, result_dtype in (*FLOATS[:9], ("int8", "bfloat16")):
        with jax.enable_x64(True):
            for role in OPERANDS:
                operands = [
                    jax.ShapeDtypeStruct(conv.shape(name), dtype) for name in OPERANDS[role]
                ]
                f = conv.cudnn(role, preferred_element_type=result_dtype)
                assert len(calls(f, *operands)) == 1, (dtype, result_dtype, role)
