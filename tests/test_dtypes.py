# SPDX-License-Identifier: Apache-2.0
"""Precision is resolved as `lax` resolves it, and permits TF32 where XLA:GPU would."""

import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxcudnn
from jaxcudnn._dtypes import DTYPES, allows_tf32
from jaxcudnn._spec import ConvSpec
from test_spec import equation

P = lax.Precision
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
    assert allows_tf32("float32", (first, second)) == (P.HIGHEST not in (first, second))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_nothing_is_forbidden_in_16_bits(dtype: str):
    assert spec_of("highest", X.update(dtype=dtype), W.update(dtype=dtype)).allow_tf32


def test_setting_takes_effect_when_tracing():
    conv = jax.jit(lambda x, w: jaxcudnn.conv_general_dilated(x, w, (1,), "VALID"))
    with jax.default_matmul_precision("highest"):
        traced = conv.trace(X, W)
    (outer,) = [eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "conv_fprop"]
    assert not outer.params["spec"].allow_tf32
    assert "precision HIGHEST" in traced.lower().as_text()
    assert "precision HIGHEST" not in conv.lower(X, W).as_text()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_accumulates_in_float32(dtype: str):
    assert DTYPES[dtype].accumulate == "float32"
