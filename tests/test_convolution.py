# SPDX-License-Identifier: Apache-2.0
"""`convolution` against PyTorch, in small integers and so exactly, and what it is computed by.

What PyTorch computes is recorded in data/torch_convolutions.json, and is computed anew where
PyTorch is installed, in a process of its own: it and JAX have libraries of the same names.
"""

import doctest
import importlib.util
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxcudnn
import torch_convolutions
from cases import normal
from jaxcudnn import _convolution
from test_variants import equations
from tolerance import DIFFERENCES
from torch_convolutions import Case, arguments, case, integers, operands, transposed

RECORD = json.loads(torch_convolutions.RECORD.read_text(encoding="utf-8"))["cases"]

recorded = pytest.mark.parametrize("case", RECORD, ids=lambda case: case["name"])


def arrays_of(case: Case, dtype: str = "float32") -> dict[str, Any]:
    """The operands by name, without a bias that there is not."""
    return {
        name: jnp.asarray(array, dtype)
        for name, array in operands(case).items()
        if array is not None
    }


def convolve(case: Case, arrays: dict[str, Any]) -> jax.Array:
    bias = arrays.get("bias")
    return jaxcudnn.convolution(arrays["a"], arrays["weight"], bias, **arguments(case))


def check(case: Case) -> None:
    """Compare output and gradients with those of PyTorch."""

    @jax.jit
    def run(arrays, dy):
        y, pullback = jax.vjp(partial(convolve, case), arrays)
        return y, *pullback(dy)

    arrays = arrays_of(case)
    y, gradients = run(arrays, jnp.asarray(integers(4, case["shape"]), "float32"))
    np.testing.assert_array_equal(y, np.reshape(case["y"], case["shape"]), err_msg=str(case))
    for name, array in arrays.items():
        expected = np.reshape(case[f"d{name}"], array.shape)
        np.testing.assert_array_equal(gradients[name], expected, err_msg=f"{name} of {case}")


def computed_anew(*options: str) -> list[Case]:
    """What the script prints."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    script = Path(torch_convolutions.__file__)
    ran = subprocess.run(
        [sys.executable, "-P", script, *options], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)["cases"]


@recorded
def test_values_and_gradients_are_those_of_pytorch(case: Case):
    check(case)


def test_record_is_what_pytorch_computes():
    assert computed_anew() == RECORD


def test_other_convolutions_against_pytorch():
    for one in computed_anew("--seeds", "1000", "1060"):
        check(one)


@pytest.mark.gpu
@recorded
def test_values_and_gradients_on_gpu(case: Case):
    check(case)


@pytest.mark.gpu
def test_other_convolutions_on_gpu():
    for one in computed_anew("--seeds", "2000", "2080"):
        check(one)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["2d-grouped-strided", "transposed-2d-doubling"])
def test_results_have_the_operands_dtype(name: str, dtype: str):
    (case,) = (case for case in RECORD if case["name"] == name)
    y, pullback = jax.vjp(partial(convolve, case), arrays_of(case, dtype))
    results = [y, *jax.tree.leaves(pullback(y))]
    assert {str(result.dtype) for result in results} == {dtype}
    np.testing.assert_array_equal(y, jnp.asarray(np.reshape(case["y"], case["shape"]), dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradient_of_a_bias_is_summed_in_float32(dtype: str):
    """Adding 1 to 4096 changes nothing in 16 bits, so a 16-bit sum would stop below 16384."""
    arrays = arrays_of(case("long sum", [4, 1, 4096], [1, 1, 1]), dtype)

    def total(bias):
        y = jaxcudnn.convolution(arrays["a"], arrays["weight"], bias, 1, 0, 1, False, 0, 1)
        return jnp.sum(y, dtype="float32")

    gradient = jax.grad(total)(arrays["bias"])
    assert str(gradient.dtype) == dtype and gradient.item() == 16384
    assert jax.jit(jax.grad(total))(arrays["bias"]).item() == 16384


def test_output_padding_has_no_effect_unless_transposed():
    plain = case("plain", [1, 2, 6, 7], [3, 2, 3, 3], stride=2)
    padded = plain | {"output_padding": [1, 5]}
    arrays = arrays_of(plain)
    np.testing.assert_array_equal(convolve(padded, arrays), convolve(plain, arrays))


@pytest.mark.parametrize("no", [False, 0, np.False_, None])
def test_what_is_false_is_not_transposed(no):
    plain = case("plain", [1, 2, 4], [2, 2, 1])
    assert convolve(plain | {"transposed": no}, arrays_of(plain)).shape == (1, 2, 4)


@pytest.mark.parametrize(
    "numbers", [3, [3], (3, 3), np.int64(3), np.array([3]), np.array([3, 3])], ids=repr
)
def test_forms_of_a_number(numbers: Any):
    plain = transposed("plain", [1, 2, 4, 4], [2, 2, 4, 4], stride=3, padding=3, dilation=3)
    said = dict.fromkeys(("stride", "padding", "dilation"), numbers)
    arrays = arrays_of(plain)
    np.testing.assert_array_equal(convolve(plain | said, arrays), convolve(plain, arrays))


def test_an_empty_sum_is_the_bias():
    nothing = case("nothing", [2, 0, 4, 4], [3, 0, 2, 2])
    y = convolve(nothing, arrays_of(nothing))
    np.testing.assert_array_equal(y, np.broadcast_to(y[:1, :, :1, :1], (2, 3, 3, 3)))
    np.testing.assert_array_equal(y[0, :, 0, 0], operands(nothing)["bias"])


def test_precision_is_passed_on():
    for one in (case("plain", [1, 2, 4], [2, 2, 1]), transposed("other", [1, 2, 4], [2, 2, 1])):
        run = partial(
            jaxcudnn.convolution, bias=None, **arguments(one), precision=jax.lax.Precision.HIGHEST
        )
        (equation,) = equations(run, one["a"], one["weight"])
        assert equation.params["spec"].precision == (jax.lax.Precision.HIGHEST,) * 2


WINDOW = (3, 4)
AT_WORK = {
    "conv_fprop": case("plain", [2, 8, 40, 40], [16, 8, *WINDOW], stride=2, padding=1),
    "conv_dgrad": transposed("2d", [2, 8, 20, 20], [8, 16, *WINDOW], stride=2, padding=1,
                             output_padding=1),
    "conv_dgrad ": transposed("grouped", [2, 8, 20, 20], [8, 4, *WINDOW], stride=2, groups=4),
}  # fmt: skip


@pytest.mark.parametrize("primitive", AT_WORK)
def test_one_primitive_and_its_transposes(primitive: str):
    """With the filter for window: nothing is reversed, moved or spread."""
    one = AT_WORK[primitive]

    def run(a, weight):
        return convolve(one, {"a": a, "weight": weight})

    def gradients(a, weight, dy):
        return jax.vjp(run, a, weight)[1](dy)

    (forward,) = equations(run, one["a"], one["weight"])
    assert forward.primitive.name == primitive.strip()
    spec = forward.params["spec"]
    dy = spec.x_shape if one["transposed"] else spec.y_shape
    found = equations(gradients, one["a"], one["weight"], dy)
    names = sorted(equation.primitive.name for equation in found)
    assert names == ["conv_dgrad", "conv_fprop", "conv_wgrad"]
    assert {equation.params["spec"].w_shape[2:] for equation in found} == {WINDOW}


def test_transposed_padding_is_that_of_the_forward_convolution():
    """Equal at both ends where the output's length allows it, as it was said."""
    for stride, extra in [(1, 0), (2, 0), (2, 1), (3, 2)]:
        one = transposed(
            "2d", [1, 2, 5, 5], [2, 2, 3, 3], stride=stride, padding=1, output_padding=extra
        )
        (equation,) = equations(
            lambda a, w, one=one: convolve(one, {"a": a, "weight": w}), one["a"], one["weight"]
        )
        assert equation.params["spec"].padding == ((1, 1), (1, 1))


@pytest.mark.parametrize("name", ["2d-grouped-strided", "transposed-2d-strides"])
def test_transforms(name: str):
    (one,) = (case for case in RECORD if case["name"] == name)
    arrays = arrays_of(one)
    run = partial(convolve, one)
    batches = jax.tree.map(lambda array: jnp.stack([array, 2 * array, -array]), arrays)
    for mapped in (["a"], ["weight", "bias"], [*arrays]):
        operands = arrays | {name: batches[name] for name in mapped}
        axes = {name: 0 if name in mapped else None for name in arrays}
        for i, result in enumerate(jax.jit(jax.vmap(run, (axes,)))(operands)):
            np.testing.assert_array_equal(
                result, run(arrays | {name: batches[name][i] for name in mapped})
            )

    arrays = {name: normal(i, a.shape, "float32") for i, (name, a) in enumerate(arrays.items())}
    check_grads(run, (arrays,), order=2, modes=["fwd", "rev"], **DIFFERENCES)


def test_documented_examples():
    assert doctest.testmod(_convolution).attempted > 0
    assert doctest.testmod(_convolution).failed == 0
