# SPDX-License-Identifier: Apache-2.0
"""Epilogues that cuDNN computes: against the definition in float64, and against two programs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import cases
import jaxcudnn
import oracle
from aot import parse_attributes
from cases import Case, case, integers, normal
from epilogues import ACTIVATIONS, ADDENDS, channels_shape, conv, exact_sum
from jaxcudnn import _load
from jaxcudnn._fusion import PRECOMPILED
from tolerance import APPROXIMATED, EVALUATED, assert_close_activated

pytestmark = pytest.mark.gpu

NHWC = cases.CHANNELS_LAST[2]
PLAIN = case("3x3", (10, 12), (3, 3), "SAME", c=32, k=32, dimension_numbers=NHWC)
LAYERS = [
    PLAIN,
    case("1x1", (14, 14), (1, 1), c=64, k=32, dimension_numbers=NHWC),
    case("strided", (15, 14), (3, 3), "SAME", c=32, k=64, strides=(2, 2), dimension_numbers=NHWC),
    case("nchw", (10, 12), (3, 3), "SAME", c=32, k=32),
    case("hwio", (10, 12), (3, 3), "SAME", c=32, k=32, dimension_numbers=("NHWC", "HWIO", "NHWC")),
    case("scrambled", (10, 12), (3, 3), "SAME", c=32, k=32,
         dimension_numbers=("HNCW", "WIHO", "CWNH")),
    case("asymmetric-dilated", (10, 12), (3, 3), ((3, 1), (0, 2)), c=32, k=32, dilation=(2, 1),
         dimension_numbers=NHWC),
    case("grouped", (10, 12), (3, 3), "SAME", c=64, k=64, groups=2, dimension_numbers=NHWC),
    case("depthwise", (10, 12), (3, 3), "SAME", c=32, k=32, groups=32, dimension_numbers=NHWC),
    case("odd-channels", (9, 9), (3, 3), "SAME", c=17, k=19, dimension_numbers=NHWC),
    case("stem", (16, 16), (7, 7), ((3, 3), (3, 3)), c=3, k=64, strides=(2, 2),
         dimension_numbers=NHWC),
    case("1d", (40,), (5,), "SAME", c=32, k=32, dimension_numbers=cases.CHANNELS_LAST[1]),
    case("3d", (6, 5, 4), (3, 3, 3), "SAME", c=16, k=32, dimension_numbers=cases.CHANNELS_LAST[3]),
]  # fmt: skip

KINDS = [
    pytest.param("bfloat16", None, id="bfloat16"),
    pytest.param("float16", None, id="float16"),
    pytest.param("float32", lax.Precision.DEFAULT, id="tf32"),
    pytest.param("float32", lax.Precision.HIGHEST, id="float32"),
]
over_kinds = pytest.mark.parametrize(("dtype", "precision"), KINDS)


def operands(case: Case, dtype: str, how=normal, with_bias=True, with_residual=True) -> list[Any]:
    """x, w, bias and residual."""
    return [
        how(1, case.x_shape, dtype),
        how(2, case.w_shape, dtype),
        how(3, channels_shape(case), dtype) if with_bias else None,
        how(4, case.y_shape, dtype) if with_residual else None,
    ]


def fused(f, *arrays) -> list[str]:
    """The activations of the custom calls that have an epilogue, '' for none."""
    lines = jax.jit(f).lower(*arrays).as_text().splitlines()
    found = [parse_attributes(line) for line in lines if f"custom_call @{_load.TARGET}(" in line]
    return [each["activation"] for each in found if each["bias"] or each["activation"]]


def absolute(array):
    return None if array is None else abs(array)


def check_activated(computed, activation, case: Case, arrays, dtype: str, precision) -> None:
    x, w, bias, residual = arrays
    exact, magnitude = oracle.compute("y", x, w, case)
    assert_close_activated(
        computed,
        ACTIVATIONS[activation],
        exact_sum(case, exact, bias, residual),
        exact_sum(case, magnitude, absolute(bias), absolute(residual)),
        dtype=dtype,
        length=case.lengths["y"],
        tf32=dtype == "float32" and precision == lax.Precision.DEFAULT,
        evaluated=EVALUATED if activation in (None, *PRECOMPILED) else APPROXIMATED,
    )


@over_kinds
@pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.name)
def test_relu(case: Case, dtype: str, precision):
    """With every addend: exactly for integers, of which each sum is exact in float32."""
    f = jax.jit(conv(case, "relu", precision=precision))
    arrays = operands(case, dtype, integers)
    exact, _ = oracle.compute("y", arrays[0], arrays[1], case)
    total = exact_sum(case, exact, *arrays[2:])
    # In two programs the convolution is rounded, too.
    unchanged = np.all(exact == exact.astype(jnp.dtype(dtype)).astype(np.float64))
    if unchanged or fused(f, *arrays):
        np.testing.assert_array_equal(f(*arrays), np.maximum(total, 0).astype(dtype))
    arrays = operands(case, dtype)
    check_activated(f(*arrays), "relu", case, arrays, dtype, precision)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("activation", ["relu", None])
@pytest.mark.parametrize("with_bias, with_residual", ADDENDS[1:])
def test_precompiled_engines_are_found(dtype, activation, with_bias, with_residual):
    arrays = operands(PLAIN, dtype, normal, with_bias, with_residual)
    f = conv(PLAIN, activation, options={"allow_runtime_compilation": False})
    assert fused(f, *arrays) == [activation or ""]
    check_activated(jax.jit(f)(*arrays), activation, PLAIN, arrays, dtype, lax.Precision.DEFAULT)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_epilogue(activation, dtype: str):
    """Every activation with each combination of addends, in one program."""

    @jax.jit
    def run(x, w, bias, residual):
        return [
            conv(PLAIN, activation)(x, w, bias if b else None, residual if r else None)
            for b, r in ADDENDS
        ]

    arrays = operands(PLAIN, dtype)
    for (b, r), computed in zip(ADDENDS, run(*arrays), strict=True):
        given = [*arrays[:2], arrays[2] if b else None, arrays[3] if r else None]
        check_activated(computed, activation, PLAIN, given, dtype, lax.Precision.DEFAULT)


@pytest.mark.parametrize(
    "activation", sorted(str(a) for a in {*ACTIVATIONS} - {*PRECOMPILED, None, "relu6"})
)
def test_engines_are_compiled_where_the_budget_allows_it(activation: str):
    """For one dtype, since each takes a second or more."""
    arrays = operands(PLAIN, "bfloat16")
    f = conv(PLAIN, activation, options={"tuning_budget": jaxcudnn.TuningBudget(milliseconds=3000)})
    assert fused(f, *arrays) == [activation]
    check_activated(
        jax.jit(f)(*arrays), activation, PLAIN, arrays, "bfloat16", lax.Precision.DEFAULT
    )


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_slices_of_larger_arrays(activation: str):
    """Which XLA may pass in place, at addresses that kernels compiled at run time refuse."""
    arrays = operands(PLAIN, "bfloat16")
    f = conv(PLAIN, activation, options={"tuning_budget": jaxcudnn.TuningBudget(milliseconds=3000)})
    assert fused(f, *arrays) == [activation]
    one = jnp.ones(1, "bfloat16")
    flat = [jnp.concatenate([one, jnp.ravel(array), one]) for array in arrays]

    @jax.jit
    def inside(into, *flat):
        shaped = (a[1:-1].reshape(b.shape) for a, b in zip(flat, arrays, strict=True))
        return lax.dynamic_update_slice(into, f(*shaped).ravel(), (1,))

    result = inside(jnp.ones(arrays[3].size + 2, "bfloat16"), *flat)
    assert result[0] == result[-1] == 1
    computed = result[1:-1].reshape(PLAIN.y_shape)
    check_activated(computed, activation, PLAIN, arrays, "bfloat16", lax.Precision.DEFAULT)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_is_not_finite(dtype: str):
    """relu passes NaN on, as `jax.nn.relu` does, and infinity."""
    x, w, bias, residual = operands(PLAIN, dtype, integers)
    special = jnp.asarray([np.nan, np.inf, -np.inf], dtype)
    residual = jnp.asarray(residual).at[0, 0, 0, :3].set(special)
    assert fused(conv(PLAIN), x, w, bias, residual) == ["relu"]
    y = jax.jit(conv(PLAIN))(x, w, bias, residual)
    np.testing.assert_array_equal(np.asarray(y[0, 0, 0, :3], np.float32), [np.nan, np.inf, 0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_the_input_as_residual(activation: str, dtype: str):
    """Several times in a row, so that buffers are reused where they may be."""

    def f(x, w, bias):
        for _ in range(3):
            x = conv(PLAIN, activation)(x, w, bias, x)
        return x

    def plain(x, w, bias):
        for _ in range(3):
            z = lax.conv_general_dilated(x, w, **PLAIN.arguments) + x + bias.reshape(1, 1, 1, -1)
            x = jax.nn.relu(z) if activation == "relu" else jax.nn.silu(z)
        return x

    x, w, bias, _ = operands(PLAIN, dtype)
    w = w / 32
    wanted = jax.jit(plain)(*(a.astype("float32") for a in (x, w, bias)))
    tolerance = 8 * float(jnp.finfo("bfloat16").eps) if dtype == "bfloat16" else 1e-2  # TF32
    np.testing.assert_allclose(
        jax.jit(f)(x, w, bias).astype("float32"), wanted, rtol=tolerance, atol=tolerance
    )
    exact = jax.jit(lambda x, w: conv(PLAIN)(x, w, None, x))(x, w)
    check_activated(exact, "relu", PLAIN, [x, w, None, x], dtype, lax.Precision.DEFAULT)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("activation", ["relu", None, "gelu"])
@pytest.mark.parametrize("strides", [(1, 1), (2, 2)])
def test_transposed(strides, activation, dtype: str):
    """Against the definition: the input's gradient of the convolution the other way round."""
    size = tuple(8 * s for s in strides)
    forward = case("", size, (3, 3), "SAME", c=32, k=64, strides=strides, dimension_numbers=NHWC)
    dy, w = forward.operands("x", normal, dtype)
    bias, residual = normal(3, (32,), dtype), normal(4, forward.x_shape, dtype)
    low_high = [(3 - 1 - low, 3 - 1 - high) for low, high in forward.pads]
    padding = [
        (low, high + n - (s * (p - 1) + 1 + low + high - 2))
        for (low, high), n, s, p in zip(low_high, size, strides, (8, 8), strict=True)
    ]
    y = jax.jit(
        functools.partial(
            jaxcudnn.conv_transpose_bias_act, strides=strides, padding=padding,
            dimension_numbers=NHWC, transpose_kernel=True, activation=activation,
        )
    )(dy, w, bias, residual)  # fmt: skip
    exact, magnitude = oracle.compute("x", dy, w, forward)
    addends = [np.asarray(a, np.float64) for a in (bias, residual)]
    assert_close_activated(
        y,
        ACTIVATIONS[activation],
        exact + sum(addends),
        magnitude + sum(map(np.abs, addends)),
        dtype=dtype,
        length=forward.lengths["x"],
        tf32=dtype == "float32",
        evaluated=APPROXIMATED,
    )


@pytest.mark.parametrize("axes", [(0, None, None, 0), (0, None, None, None), (0, 0, 0, 0)], ids=str)
def test_vmap(axes):
    arrays = operands(PLAIN, "float32", integers)
    stacked = [
        a if axis is None else jnp.stack([a, -a, 2 * a])
        for a, axis in zip(arrays, axes, strict=True)
    ]
    mapped = jax.jit(jax.vmap(conv(PLAIN), axes))(*stacked)
    for i in range(3):
        picked = [a if axis is None else a[i] for a, axis in zip(stacked, axes, strict=True)]
        exact, _ = oracle.compute("y", picked[0], picked[1], PLAIN)
        wanted = np.maximum(exact_sum(PLAIN, exact, *picked[2:]), 0)
        np.testing.assert_array_equal(mapped[i], wanted)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "gelu", "silu", "tanh"])
def test_derivatives_to_second_order(activation: str):
    """Against the same function in float64 on the CPU, none of it by cuDNN."""
    small = case("", (6, 7), (3, 3), "SAME", c=16, k=16, strides=(2, 1), dimension_numbers=NHWC)

    def second(*arrays):
        def loss(*arrays):
            return jnp.sum(conv(small, activation, precision="highest")(*arrays) ** 2)

        gradient = jax.grad(loss, (0, 1, 2, 3))
        return jax.jvp(gradient, arrays, tuple(arrays))

    x, w, bias, residual = operands(small, "float32")
    arrays = x, w / 12, bias, residual
    computed = jax.jit(second)(*arrays)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wanted = jax.jit(second)(*(jnp.asarray(np.asarray(a), "float64") for a in arrays))
    for ours, exact in zip(jax.tree.leaves(computed), jax.tree.leaves(wanted), strict=True):
        # Of cuDNN's activations in between: see tolerance.py.
        scale = float(np.max(np.abs(exact)))
        np.testing.assert_allclose(ours, exact, rtol=0, atol=4 * APPROXIMATED * scale)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_training_step_computes_what_it_does_in_two(dtype: str):
    x, w, bias, residual = operands(PLAIN, dtype, integers)

    def gradients(f):
        return jax.jit(
            jax.grad(lambda *a: jnp.sum(f(*a).astype("float32") / 8), (0, 1, 2, 3))
        )(x, w, bias, residual)  # fmt: skip

    def plain(x, w, bias, residual):
        z = PLAIN.conv(x.astype("float32"), w.astype("float32")) + residual.astype("float32")
        return jax.nn.relu(z + bias.astype("float32").reshape(1, 1, 1, -1))

    jax.tree.map(np.testing.assert_array_equal, gradients(conv(PLAIN)), gradients(plain))


def test_explain_and_tune():
    arrays = operands(PLAIN, "bfloat16")
    f = conv(PLAIN)
    with jaxcudnn.options(algorithm="measure"):
        jaxcudnn.tune(f, *arrays, progress=False)
        (row,) = jaxcudnn.explain(f)(*arrays)
    assert (row.epilogue, row.unfused, row.route) == ("residual + bias + relu", "", "cuDNN")
    assert row.plan and row.microseconds
