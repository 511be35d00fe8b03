# SPDX-License-Identifier: Apache-2.0
"""`conv`, `conv_with_general_padding` and `conv_transpose` against those of `lax`, exactly."""

import doctest
import inspect
import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import JaxprEqn
from jax.test_util import check_grads

import jaxcudnn
from cases import integers, normal
from jaxcudnn import _variants
from tolerance import DIFFERENCES

NAMES = ["conv", "conv_transpose", "conv_with_general_padding"]

LAYOUTS = {  # of the input, the filter and the output; letters of positions are put in for *
    "default": None,
    "channels first": ("N*C", "OI*", "N*C"),
    "filter as that of the forward convolution": ("N*C", "*OI", "N*C"),
    "scrambled": ("C*N", "I*O", "NC*"),
}


def equations(function: Callable, *shapes: Sequence[int]) -> list[JaxprEqn]:
    """All of a function's jaxpr."""
    operands = [jax.ShapeDtypeStruct(tuple(shape), "float32") for shape in shapes]
    return jax.make_jaxpr(function)(*operands).jaxpr.eqns


def names(found: Sequence[JaxprEqn]) -> list[str]:
    return [equation.primitive.name for equation in found]


@pytest.mark.parametrize("name", NAMES)
def test_signature_is_that_of_lax(name: str):
    ours, theirs = (inspect.signature(getattr(module, name)) for module in (jaxcudnn, lax))
    *parameters, options = ours.parameters.values()
    assert [(p.name, p.default, p.kind) for p in parameters] == [
        (p.name, p.default, p.kind) for p in theirs.parameters.values()
    ]
    assert (options.name, options.default, options.kind) == ("options", None, options.KEYWORD_ONLY)


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("conv", ((2, 1), "SAME")),
        ("conv", ((1, 2), "valid", "highest", jnp.float32)),
        ("conv", ((1, 1), ((1, 0), (-1, 2)))),
        ("conv_with_general_padding", ((2, 1), "SAME_LOWER", None, None)),
        ("conv_with_general_padding", ((1, 1), "SAME", (1, 1), (2, 1), "highest", jnp.float32)),
        ("conv_with_general_padding", ((2, 1), ((1, 0), (2, 3)), (2, 3), (1, 2))),
    ],
    ids=str,
)
def test_wrappers_are_those_of_lax(name: str, arguments: tuple):
    x, w = integers(0, (2, 3, 6, 7)), integers(1, (4, 3, 3, 2))
    ours, theirs = (getattr(module, name)(x, w, *arguments) for module in (jaxcudnn, lax))
    np.testing.assert_array_equal(ours, theirs)
    assert ours.dtype == theirs.dtype


@pytest.mark.parametrize("name", NAMES)
def test_precision_is_passed_on(name: str):
    rest = [None, None] if name == "conv_with_general_padding" else []

    def run(x, w):
        return getattr(jaxcudnn, name)(x, w, (1,), "VALID", *rest, precision="highest")

    (equation,) = equations(run, (1, 3, 3), (3, 3, 3))
    assert equation.params["spec"].precision == (lax.Precision.HIGHEST,) * 2


def draw_transpose(seed: int, **fixed: Any) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    """Operands and arguments, most of which `lax.conv_transpose` takes."""
    draw = random.Random(seed)
    rank = draw.choice([1, 1, 2, 2, 3])

    def numbers(choices: Sequence[int]) -> tuple[int, ...]:
        return tuple(draw.choice(choices) for _ in range(rank))

    spatial = "HWD"[:rank]
    letters = draw.choice([*LAYOUTS.values()])
    dimension_numbers = letters and tuple(text.replace("*", spatial) for text in letters)
    image, filter_, _ = dimension_numbers or (f"N{spatial}C", f"{spatial}IO", "")
    names = ["SAME", "VALID", "SAME", "VALID", "same", "Valid", "SAME_LOWER"]
    pairs = tuple((draw.randint(-2, 4), draw.randint(-2, 4)) for _ in range(rank))
    arguments = {
        "strides": numbers([1, 1, 2, 3, 5]),
        "padding": draw.choice([*names, *[pairs] * 5]),
        "rhs_dilation": draw.choice([None, numbers([1, 2, 3])]),
        "dimension_numbers": dimension_numbers,
        "transpose_kernel": draw.choice([True, False]),
        "use_consistent_padding": draw.choice([True, False]),
    } | fixed
    channels = {"C": draw.randint(1, 3), "K": draw.randint(1, 3)}
    o, i = "CK" if arguments["transpose_kernel"] else "KC"
    lengths = dict(zip(spatial, numbers(range(1, 6)), strict=True)) | {"N": 2} | channels
    taps = dict(zip(spatial, numbers(range(1, 5)), strict=True))
    taps |= {"O": channels[o], "I": channels[i]}
    return (
        integers(seed, [lengths[letter] for letter in image]),
        integers(seed + 1, [taps[letter] for letter in filter_]),
        arguments,
    )


@pytest.mark.parametrize("seed", range(90))
def test_random_transposes(seed: int):
    x, w, arguments = draw_transpose(seed)
    ours, theirs = (partial(f.conv_transpose, **arguments) for f in (jaxcudnn, lax))
    try:
        expected = theirs(x, w)
    except ValueError:
        with pytest.raises(ValueError, match=r"jaxcudnn.conv_transpose: (negative )?padding must"):
            ours(x, w)
    else:
        np.testing.assert_array_equal(ours(x, w), expected)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("stride", [1, 2, 3, 7])
def test_named_padding_of_any_window(stride: int, padding: str):
    """Strides below, equal to and above what the window spans, odd and even, dilated or not."""
    for size, window, dilation in itertools.product((0, 1, 4), range(6), (1, 3)):
        if (size, window) == (0, 0):  # which is cropped by more than there is
            continue
        operands = (jax.ShapeDtypeStruct(s, "float32") for s in ((1, size, 1), (window, 1, 1)))
        ours, theirs = (
            partial(module.conv_transpose, strides=(stride,), padding=padding,
                    rhs_dilation=(dilation,))
            for module in (jaxcudnn, lax)
        )  # fmt: skip
        x, w = operands
        assert jax.eval_shape(ours, x, w) == jax.eval_shape(theirs, x, w), (size, window, dilation)


@pytest.mark.parametrize("transpose_kernel", [True, False])
@pytest.mark.parametrize(
    "padding, consistent", [("SAME", False), ("VALID", True), (((1, 1), (2, 1)), True)]
)
def test_a_transpose_is_one_dgrad(padding, consistent: bool, transpose_kernel: bool):
    """And its derivatives have the filter for window: nothing is reversed, moved or spread."""
    x_shape = (2, 20, 20, 16)
    w_shape = (3, 4, 8, 16) if transpose_kernel else (3, 4, 16, 8)

    def run(x, w):
        return jaxcudnn.conv_transpose(
            x, w, (2, 3), padding,
            transpose_kernel=transpose_kernel, use_consistent_padding=consistent,
        )  # fmt: skip

    def gradients(x, w, dy):
        return jax.vjp(run, x, w)[1](dy)

    assert names(equations(run, x_shape, w_shape)) == ["conv_dgrad"]
    y = jax.eval_shape(run, *(jax.ShapeDtypeStruct(s, "float32") for s in (x_shape, w_shape)))
    found = equations(gradients, x_shape, w_shape, y.shape)
    assert sorted(names(found)) == ["conv_dgrad", "conv_fprop", "conv_wgrad"]
    assert {equation.params["spec"].w_shape[2:] for equation in found} == {(3, 4)}


def test_a_consistent_transpose_is_the_gradient_of_conv():
    """Of one with the same filter, strides and padding, as is said of Keras and PyTorch."""
    numbers = ("NHWC", "HWIO", "NHWC")
    x, w = integers(0, (2, 9, 6, 3)), integers(1, (3, 2, 3, 4))
    strides, padding, dilation = (2, 3), ((1, 1), (2, 1)), (1, 2)

    def forward(x):
        return jaxcudnn.conv_general_dilated(x, w, strides, padding, None, dilation, numbers)

    y, pullback = jax.vjp(forward, x)
    (dx,) = pullback(y)
    transposed = jaxcudnn.conv_transpose(
        y, w, strides, padding, dilation, None, True, use_consistent_padding=True
    )
    np.testing.assert_array_equal(transposed, dx)


@pytest.mark.parametrize("transpose_kernel", [True, False])
def test_transforms_of_a_transpose(transpose_kernel: bool):
    x, w, arguments = draw_transpose(
        7, padding="SAME", transpose_kernel=transpose_kernel, strides=(2,) * 2, rhs_dilation=None
    )
    ours, theirs = (partial(f.conv_transpose, **arguments) for f in (jaxcudnn, lax))
    np.testing.assert_array_equal(jax.jit(ours)(x, w), theirs(x, w))

    xs, ws = integers(3, (3, *x.shape)), integers(4, (3, *w.shape))
    for axes, operands in [((0, None), (xs, w)), ((None, 0), (x, ws)), ((0, 0), (xs, ws))]:
        np.testing.assert_array_equal(
            jax.vmap(ours, axes)(*operands), jax.vmap(theirs, axes)(*operands)
        )

    x, w = normal(5, x.shape, "float32"), normal(6, w.shape, "float32")
    check_grads(ours, (x, w), order=2, modes=["fwd", "rev"], **DIFFERENCES)


def test_numpy_operands_and_true_of_any_kind():
    x, w = np.ones((1, 4, 2), np.float32), np.ones((3, 5, 2), np.float32)
    flags: Any = {"transpose_kernel": np.True_, "use_consistent_padding": 1}
    ours, theirs = (
        partial(f.conv_transpose, strides=[1], padding="SAME", **flags) for f in (jaxcudnn, lax)
    )
    np.testing.assert_array_equal(ours(x, w), theirs(x, w))
    (equation,) = equations(ours, x.shape, w.shape)
    assert type(equation.params["spec"].flip) is bool


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(400, 460))
def test_random_transposes_on_gpu(seed: int):
    """Against the formulas on the CPU, with their gradients."""
    x, w, arguments = draw_transpose(seed, padding="VALID")

    @jax.jit
    def run(x, w):
        y, pullback = jax.vjp(partial(jaxcudnn.conv_transpose, **arguments), x, w)
        return y, *pullback(y)

    on_cpu = jax.device_put((x, w), jax.devices("cpu")[0])
    jax.tree.map(np.testing.assert_array_equal, run(x, w), run(*on_cpu))


def test_documented_examples():
    assert doctest.testmod(_variants).attempted > 0
    assert doctest.testmod(_variants).failed == 0


def test_default_layout_without_spatial_dimensions():
    x, w = integers(0, (3, 4)), integers(1, (4, 5))
    expected = lax.conv_transpose(x, w, (), "SAME")
    np.testing.assert_array_equal(jaxcudnn.conv_transpose(x, w, (), "SAME"), expected)
