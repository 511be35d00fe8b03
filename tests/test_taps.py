# SPDX-License-Identifier: Apache-2.0
"""The convolution that stands in for `lax`'s where XLA has none for GPUs."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax import export, lax

import jaxcudnn
from aot import compile as compile_for_h200
from aot import require_plugin, shaped
from cases import integers
from jaxcudnn import _taps
from test_lowering import calls, lower
from test_readings import draw_call


@pytest.mark.parametrize("dtype", ["int32", "float32"])
@pytest.mark.parametrize("seed", range(3000, 3030))
def test_random_calls(seed: int, dtype: str):
    lhs, rhs, arguments = draw_call(seed)
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, arguments["dimension_numbers"])
    arguments: dict[str, Any] = arguments | {"dimension_numbers": numbers}
    lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
    expected = lax.conv_general_dilated(lhs, rhs, **arguments)
    if expected.size == 0:
        return
    computed = _taps.convolve(lhs, rhs, **arguments, preferred_element_type=dtype)
    np.testing.assert_array_equal(computed, expected)
    assert computed.dtype == dtype


def products(x_shape: tuple[int, ...], w_shape: tuple[int, ...]) -> int:
    """How often the loop over matrix products runs."""
    numbers = lax.ConvDimensionNumbers(*(tuple(range(len(x_shape))),) * 3)
    conv = partial(
        _taps.convolve, window_strides=(1, 1), padding=((1, 1), (1, 1)), dimension_numbers=numbers,
        preferred_element_type="int32",
    )  # fmt: skip
    jaxpr = jax.make_jaxpr(conv)(shaped(x_shape, "int8"), shaped(w_shape, "int8"))
    (loop,) = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    return loop.params["length"]


def test_there_are_as_many_products_as_the_window_or_the_output_has_positions():
    assert products((1, 2, 20, 20), (3, 2, 4, 3)) == 11  # and one before the loop
    assert products((1, 2, 20, 20), (3, 2, 20, 20)) == 9  # a filter gradient


def test_products_do_not_all_take_memory_at_once():
    require_plugin()
    size = 4 * 64 * 64 * 8
    operands = shaped((1, 64, 64, 8), "int8"), shaped((8, 7, 7, 8), "int8")
    program = compile_for_h200(conv_and_gradients((1, 64, 64, 8), "int16"), *operands)
    assert program.temporary_bytes < 8 * size


UNKNOWN_TO_XLA = {
    "integers": ((2, 5, 5, 3), (4, 2, 2, 3), "int16"),
    "no spatial dimension": ((2, 3), (4, 3), "float32"),
    "four spatial dimensions": ((2, 3, 4, 3, 4, 3), (4, 2, 1, 2, 1, 3), "bfloat16"),
}


def conv_and_gradients(x_shape, dtype):
    """The convolution, channels last, and for floats its gradients too."""
    letters = "TDHW"[: len(x_shape) - 2]
    numbers = (f"N{letters}C", f"O{letters}I", f"N{letters}C")

    def conv(x, w):
        return jaxcudnn.conv_general_dilated(
            x, w, (1,) * len(letters), "SAME", dimension_numbers=numbers
        )

    if dtype == "int16":
        return conv
    return jax.grad(lambda x, w: (conv(x, w) ** 2).sum(), argnums=(0, 1))


@pytest.mark.parametrize("name", UNKNOWN_TO_XLA)
def test_no_convolution_is_left_to_xla(name: str):
    x_shape, w_shape, dtype = UNKNOWN_TO_XLA[name]
    f = conv_and_gradients(x_shape, dtype)
    operands = shaped(x_shape, dtype), shaped(w_shape, dtype)
    assert "stablehlo.convolution" not in lower(f, *operands)
    assert calls(f, *operands) == []


@pytest.mark.parametrize("name", UNKNOWN_TO_XLA)
def test_compiles_for_a_gpu(name: str):
    require_plugin()
    x_shape, w_shape, dtype = UNKNOWN_TO_XLA[name]
    program = compile_for_h200(
        conv_and_gradients(x_shape, dtype), shaped(x_shape, dtype), shaped(w_shape, dtype)
    )
    assert program.count("convolution") == 0


def test_a_product_over_which_xla_ended_the_process():
    """XLA of jax 0.11, while it fused a slice into it."""
    require_plugin()
    conv = partial(
        jaxcudnn.conv_general_dilated,
        window_strides=(1, 1, 1, 1),
        padding=((4, 4), (-2, 2), (1, -1), (2, 1)),
        lhs_dilation=(1, 2, 1, 1),
        rhs_dilation=(1, 1, 4, 1),
        dimension_numbers=("DWHTCN", "HDWTIO", "WHTCND"),
        feature_group_count=3,
    )
    shapes = (4, 2, 2, 2, 9, 3), (4, 3, 1, 1, 3, 6), (2, 7, 5, 6, 3, 5)
    operands = (shaped(shape, "bfloat16") for shape in shapes)
    program = compile_for_h200(lambda x, w, dy: jax.vjp(conv, x, w)[1](dy), *operands)
    assert program.count("convolution") == 0


# Shapes of lhs and rhs where spatial sizes are symbolic, the dtype of both, and arguments.
SYMBOLIC: dict[str, tuple[str, tuple[int, ...], str, dict[str, Any]]] = {
    "integers": ("n, 4, h", (6, 4, 3), "int8", {"preferred_element_type": "int32"}),
    "truth values": ("n, 4, h", (6, 2, 3), "bool", {"feature_group_count": 2}),
    "four spatial dimensions": (
        "n, 2, h, 3, 3, 3", (4, 2, 1, 2, 1, 3), "bfloat16", {"padding": "SAME"}
    ),
    "complex numbers": (
        "2*n, 2, h, 3, 3, 3", (4, 2, 1, 2, 1, 3), "complex64", {"batch_group_count": 2}
    ),
}  # fmt: skip


def exported(name: str, platform: str):
    x_shape, w_shape, dtype, arguments = SYMBOLIC[name]
    rank = len(w_shape) - 2
    conv = partial(
        jaxcudnn.conv_general_dilated,
        **{"window_strides": (1,) * rank, "padding": ((1, 1),) * rank} | arguments,
    )
    shapes = export.symbolic_shape(x_shape), w_shape
    operands = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    return export.export(jax.jit(lambda x, w: conv(x, w)), platforms=(platform,))(*operands)


def draw_operands(name: str, n: int, h: int) -> list[jax.Array]:
    x_shape, w_shape, dtype, _ = SYMBOLIC[name]
    sizes = {"n": n, "2*n": 2 * n, "h": h}
    shape = [sizes.get(size) or int(size) for size in x_shape.split(", ")]
    return [integers(i, each).astype(dtype) for i, each in enumerate((shape, w_shape))]


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_sizes(monkeypatch, name: str):
    by_lax = exported(name, "cpu")
    monkeypatch.setattr(lax, "platform_dependent", lambda *arrays, cuda, default: cuda(*arrays))
    by_taps = exported(name, "cpu")
    assert "dot_general" in by_taps.mlir_module() and "dot_general" not in by_lax.mlir_module()
    for n, h in ((2, 3), (3, 5)):
        operands = draw_operands(name, n, h)
        computed, expected = by_taps.call(*operands), by_lax.call(*operands)
        np.testing.assert_array_equal(computed, expected)
        assert computed.dtype == expected.dtype


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_sizes_compile_for_a_gpu(name: str):
    require_plugin()
    operands = [shaped(a.shape, a.dtype) for a in draw_operands(name, 2, 5)]
    program = compile_for_h200(exported(name, "cuda").call, *operands)
    assert program.count("convolution") == 0 and "__cudnn$conv" not in program.text
