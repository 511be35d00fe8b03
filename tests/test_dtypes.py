# SPDX-License-Identifier: Apache-2.0
"""Precision is resolved as `lax` resolves it, and permits TF32 where XLA:GPU would."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dtype_table
import jaxcudnn
from jaxcudnn._dtypes import allows_tf32, computed_in, is_exact
from jaxcudnn._spec import ConvSpec
from test_spec import equation

P = lax.Precision
FLOATS = [
    "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64",
]  # fmt: skip
# Shapes, since an array here would start JAX on the CPU before a session can choose the GPU.
X, W = (jax.ShapeDtypeStruct((1, 1, size), jnp.float32) for size in (3, 2))
NAMES = ["default", "high", "highest", "bfloat16", "tensorfloat32", "float32"]
PRESETS = ["TF32_TF32_F32", "BF16_BF16_F32_X3", "F32_F32_F32", "F16_F16_F32", "ANY_F8_ANY_F8_F32"]
ARGUMENTS = [
    *NAMES, "fastest", "bfloat16_3x", *P, *itertools.product(P, P), ("high", "highest"), *PRESETS,
    lax.DotAlgorithmPreset.TF32_TF32_F32, lax.DotAlgorithm(jnp.float32, jnp.float32, jnp.float32),
]  # fmt: skip


def spec_of(precision=None, x=X, w=W) -> ConvSpec:
    def conv(x, w):
        return jaxcudnn.conv_general_dilated(x, w, (1,), "VALID", precision=precision)

    return equation(conv, x, w).params["spec"]


def written_by_lax(precision=None) -> tuple[lax.Precision, ...]:
    """The two operands' precision in the module that XLA gets."""
    conv = jax.jit(lambda x, w: lax.conv_general_dilated(x, w, (1,), "VALID", precision=precision))
    text = conv.lower(X, W).as_text()
    return tuple(P[name] for name in re.findall(r"#stablehlo<precision (\w+)>", text))


@pytest.mark.parametrize("precision", ARGUMENTS, ids=str)
@pytest.mark.parametrize("setting", [None, "highest"])
def test_argument_is_read_as_by_lax(precision, setting):
    with jax.default_matmul_precision(setting):
        assert spec_of(precision).precision == written_by_lax(precision)


@pytest.mark.parametrize("setting", [None, *NAMES, *PRESETS])
def test_setting_is_read_as_by_lax(setting):
    with jax.default_matmul_precision(setting):
        assert spec_of().precision == written_by_lax()


def test_lists_are_pairs_too():
    assert spec_of(["high", P.HIGHEST]).precision == (P.HIGH, P.HIGHEST)


@pytest.mark.parametrize("first, second", list(itertools.product(P, P)))
def test_tf32_is_for_float32_that_does_not_ask_for_the_highest_precision(first, second):
    allowed = allows_tf32("float32", "float32", (first, second))
    assert allowed == (P.HIGHEST not in (first, second))


@pytest.mark.parametrize(
    "unchanged", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int4"]
)
def test_tf32_is_allowed_for_what_it_does_not_change(unchanged: str):
    assert allows_tf32(unchanged, unchanged, (P.HIGHEST, P.HIGHEST))
    assert not allows_tf32("float32", unchanged, (P.HIGHEST, P.DEFAULT))


@pytest.mark.parametrize("integer", ["int16", "uint16", "int32"])
def test_tf32_never_rounds_integers(integer: str):
    assert not allows_tf32(integer, integer, (P.DEFAULT, P.DEFAULT))


def test_setting_takes_effect_when_tracing():
    conv = jax.jit(lambda x, w: jaxcudnn.conv_general_dilated(x, w, (1,), "VALID"))
    with jax.default_matmul_precision("highest"):
        traced = conv.trace(X, W)
    (outer,) = [eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "conv_fprop"]
    assert outer.params["spec"].precision == (P.HIGHEST, P.HIGHEST)
    assert "precision HIGHEST" in traced.lower().as_text()
    assert "precision HIGHEST" not in conv.lower(X, W).as_text()


COMPUTED = [  # operands, result, and what cuDNN is given
    ("bfloat16", "bfloat16", "bfloat16"),
    ("bfloat16", "float32", "float32"),
    ("bfloat16", "float16", "float32"),
    ("float16", "float16", "float16"),
    ("float32", "float32", "float32"),
    ("float32", "float64", "float64"),
    ("float64", "float64", "float64"),
    ("float8_e4m3fn", "float8_e4m3fn", "float32"),
    ("float8_e4m3fn", "float16", "float16"),
    ("float8_e5m2", "bfloat16", "bfloat16"),
    ("float8_e5m2", "float32", "float32"),
    ("float4_e2m1fn", "bfloat16", "bfloat16"),
    ("int8", "int8", None),
    ("int8", "int32", None),
    ("int8", "float32", "float32"),
    ("int8", "bfloat16", "bfloat16"),
    ("int16", "float32", "float32"),
    ("int32", "float32", None),
    ("int32", "float64", "float64"),
]


@pytest.mark.parametrize("operands, result, given", COMPUTED)
def test_cudnn_rounds_no_operand_and_only_the_whole_sum(operands, result, given):
    assert computed_in(operands, operands, result) == given


def test_operands_of_two_dtypes_are_given_in_the_wider():
    assert computed_in("float32", "bfloat16", "bfloat16") == "float32"
    assert computed_in("float16", "bfloat16", "float32") == "float32"


@pytest.mark.parametrize("source, target", list(itertools.product(FLOATS, FLOATS)))
def test_exact_means_that_no_number_changes(source: str, target: str):
    """Against the conversion of all numbers of a dtype, or for wide ones of some 60,000."""
    bits = jnp.finfo(source).bits
    unsigned = {4: "uint8", 8: "uint8", 16: "uint16"}.get(bits)
    if unsigned:
        numbers = np.arange(2**bits, dtype=unsigned).view(jnp.dtype(source))
    else:
        tiny, huge = jnp.finfo(source).smallest_subnormal, jnp.finfo(source).max
        ends = np.array([tiny, huge, 1 + jnp.finfo(source).eps], source)
        numbers = np.concatenate([ends, np.random.default_rng(0).standard_normal(60000)])
        numbers = numbers.astype(source)
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = numbers[np.isfinite(numbers.astype(np.float64))]
        converted = numbers.astype(target).astype(np.float64)
    assert is_exact(source, target) == np.array_equal(converted, numbers.astype(np.float64))


def test_the_table_in_the_docs():
    assert dtype_table.with_table(dtype_table.PAGE.read_text()) == dtype_table.PAGE.read_text()
