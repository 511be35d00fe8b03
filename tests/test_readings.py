# SPDX-License-Identifier: Apache-2.0
"""Every call that `lax` takes, through every reading that can compute it, against `lax` itself.

Operands are small integers, so that values are compared with ==.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.core import ShapedArray

import jaxcudnn
from cases import integers
from jaxcudnn import _primitives, _readings

LAYOUTS = {  # of both images and of the filter; letters of positions are put in for *
    "channels first": ("NC*", "OI*"),
    "channels last": ("N*C", "O*I"),
    "flax": ("N*C", "*IO"),
    "as jax writes a filter gradient": ("C*N", "I*O"),
}


def draw_call(seed: int) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    """Operands and arguments that `lax` accepts."""
    draw = random.Random(seed)
    rank = draw.choice([1, 1, 2, 2, 3])
    groups = draw.choice([1, 2, 3])
    feature, batch = draw.choice([(1, 1), (groups, 1), (1, groups)])

    def numbers(choices: Sequence[int]) -> tuple[int, ...]:
        return tuple(draw.choice(choices) for _ in range(rank))

    sizes, window = numbers(range(1, 7)), numbers(range(1, 6))
    spread = numbers([1, 1, 2, 3, 4])
    low = numbers(range(-3, 5))
    padding = tuple(
        (lo, draw.randint(min(4, -lo - (b * (size - 1) + 1)), 4))
        for size, b, lo in zip(sizes, spread, low, strict=True)
    )
    positions = "DHW"[-rank:]
    image, filter_ = (text.replace("*", positions) for text in draw.choice([*LAYOUTS.values()]))
    lengths = dict(zip(positions, sizes, strict=True))
    lengths |= {"N": batch * draw.randint(1, 2), "C": feature * draw.randint(1, 3)}
    taps = dict(zip(positions, window, strict=True))
    taps |= {"O": groups * draw.randint(1, 2), "I": lengths["C"] // feature}
    return (
        integers(seed, [lengths[letter] for letter in image]),
        integers(seed + 1, [taps[letter] for letter in filter_]),
        {
            "window_strides": numbers([1, 1, 2, 3]),
            "padding": padding,
            "lhs_dilation": spread,
            "rhs_dilation": numbers([1, 1, 2, 3]),
            "dimension_numbers": (image, filter_, image),
            "feature_group_count": feature,
            "batch_group_count": batch,
        },
    )


@pytest.fixture(name="calls")
def record_calls(monkeypatch):
    """The calls that `conv_general_dilated` makes, in the order in which it makes them."""
    calls = []

    def convolve(lhs, rhs, call):
        calls.append(call)
        return original(lhs, rhs, call)

    original = _readings.convolve
    monkeypatch.setattr(_readings, "convolve", convolve)
    return calls


@pytest.mark.parametrize("seed", range(0, 240, 2))
def test_random_calls(seed: int, calls):
    lhs, rhs, arguments = draw_call(seed)
    expected = lax.conv_general_dilated(lhs, rhs, **arguments)
    np.testing.assert_array_equal(jaxcudnn.conv_general_dilated(lhs, rhs, **arguments), expected)
    if expected.size:
        for kind in _readings._possible(calls[0]):
            computed = kind(calls[0]).compute(lhs, rhs)
            np.testing.assert_array_equal(computed, expected, err_msg=kind.__name__)


@pytest.mark.parametrize("seed", range(3000, 3040))
def test_reversed_filters(seed: int, calls):
    """No function makes every such call, and none of the readings copies the filter for it."""
    lhs, rhs, arguments = draw_call(seed)
    jaxcudnn.conv_general_dilated(lhs, rhs, **arguments)
    call = replace(calls[0], flip=True)
    expected = lax.conv_general_dilated(lhs, lax.rev(rhs, call.layout.w[2:]), **arguments)
    np.testing.assert_array_equal(_readings.convolve(lhs, rhs, call), expected)
    if expected.size:
        for kind in _readings._possible(call):
            computed = kind(call).compute(lhs, rhs)
            np.testing.assert_array_equal(computed, expected, err_msg=kind.__name__)


@pytest.mark.parametrize("seed", range(1000, 1030))
def test_gradients_of_random_calls(seed: int):
    lhs, rhs, arguments = draw_call(seed)
    results = []
    for convolve in (jaxcudnn.conv_general_dilated, lax.conv_general_dilated):
        y, pullback = jax.vjp(partial(convolve, **arguments), lhs, rhs)
        results.append(pullback(y))
    jax.tree.map(np.testing.assert_array_equal, *results)


def windows(function, *shapes: Sequence[int]) -> list[tuple[int, ...]]:
    """The windows of the primitives in a function's jaxpr."""
    operands = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    equations = jax.make_jaxpr(function)(*operands).eqns
    ours = {_primitives.conv_fprop_p, _primitives.conv_dgrad_p, _primitives.conv_wgrad_p}
    return [e.params["spec"].w_shape[2:] for e in equations if e.primitive in ours]


NHWC = ("NHWC", "HWIO", "NHWC")
WRITTEN_BY_JAX = {
    "plain": ((4, 64, 64, 8), (3, 3, 8, 16), (1, 1), (1, 1), 1),
    "strided": ((4, 64, 64, 8), (3, 3, 8, 16), (2, 2), (1, 1), 1),
    "dilated": ((4, 64, 64, 8), (3, 3, 8, 16), (1, 1), (2, 2), 1),
    "patches": ((4, 128, 128, 8), (16, 16, 8, 32), (16, 16), (1, 1), 1),
    "grouped": ((4, 64, 64, 8), (3, 3, 2, 16), (2, 2), (1, 1), 4),
    "depthwise": ((4, 64, 64, 8), (3, 3, 1, 8), (1, 1), (1, 1), 8),
}


@pytest.mark.parametrize("dimension_numbers", [NHWC, ("NCHW", "OIHW", "NCHW")], ids=str)
@pytest.mark.parametrize("name", WRITTEN_BY_JAX)
def test_gradients_as_jax_writes_them_keep_the_small_window(name: str, dimension_numbers):
    """`lax` writes them with dilated gradients for windows; no reading of ours has one."""
    x_shape, w_shape, strides, dilation, groups = WRITTEN_BY_JAX[name]
    x_letters, w_letters, _ = dimension_numbers
    x_shape = [dict(zip("NHWC", x_shape, strict=True))[letter] for letter in x_letters]
    w_shape = [dict(zip("HWIO", w_shape, strict=True))[letter] for letter in w_letters]

    def loss(x, w):
        y = lax.conv_general_dilated(
            x, w, strides, "SAME", None, dilation, dimension_numbers, groups
        )
        return (y**2).sum()

    operands = [jax.ShapeDtypeStruct(shape, "float32") for shape in (x_shape, w_shape)]
    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*operands)
    convolutions = [e for e in jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
    assert len(convolutions) == 3
    for equation in convolutions:
        params = equation.params
        call = partial(
            jaxcudnn.conv_general_dilated,
            **{key: params[key] for key in (
                "window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers",
                "feature_group_count", "batch_group_count",
            )},
        )  # fmt: skip
        types = (atom.aval for atom in equation.invars)
        shapes = [aval.shape for aval in types if isinstance(aval, ShapedArray)]
        (window,) = windows(call, *shapes)
        assert window == tuple(w_shape[w_letters.index(letter)] for letter in "HW")


def test_high_padding_keeps_the_size_and_is_the_low_one_if_it_can_be():
    for least, stride, low in itertools.product(range(-5, 6), range(1, 4), range(-3, 6)):
        possible = range(least, least + stride)
        high = _readings.high_padding(least, stride, low)
        if low in possible and low >= 0:
            assert high == low
        else:
            assert high == min(possible, key=abs)


def test_gradient_as_jax_writes_it_has_the_padding_of_the_convolution():
    """Which leaves a row unreached, so that several would do."""
    shape, numbers = (2, 8, 8, 16), ("NHWC", "HWIO", "NHWC")

    def conv(x, w, convolve):
        return convolve(x, w, (2, 2), ((1, 1), (1, 1)), None, None, numbers)

    operands = [jax.ShapeDtypeStruct(s, "float32") for s in (shape, (3, 3, 16, 16), (2, 4, 4, 16))]

    def transposed(x, w, dy):
        (dx,) = jax.linear_transpose(lambda x: conv(x, w, lax.conv_general_dilated), x)(dy)
        return dx

    written = jax.make_jaxpr(transposed)(*operands).eqns[-1]
    assert written.primitive.name == "conv_general_dilated"
    params = {name: written.params[name] for name in (
        "window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers",
    )}  # fmt: skip
    assert params["padding"] == ((1, 2), (1, 2))
    read = jax.make_jaxpr(partial(jaxcudnn.conv_general_dilated, **params))(
        *reversed(operands[1:])
    ).eqns[-1]
    assert read.params["spec"].padding == ((1, 1), (1, 1))


def test_phases_multiply_by_no_zero():
    """A stride and both dilations at once: as many products as there are, in several calls."""
    found = windows(
        lambda x, w: jaxcudnn.conv_general_dilated(x, w, (3,), ((2, 2),), (2,), (3,)),
        (1, 1, 600), (1, 1, 5),
    )  # fmt: skip
    assert len(found) == 2
    assert sum(window for (window,) in found) == 5


def test_no_large_window_where_one_dimension_is_spread_and_another_strided():
    """Two phases, each of some of the taps; a reading of the whole has the output for a window."""
    found = windows(
        lambda x, w: jaxcudnn.conv_general_dilated(x, w, (1, 2), ((1, 1), (1, 1)), (2, 1)),
        (1, 1, 100, 100), (1, 1, 3, 3),
    )  # fmt: skip
    assert sorted(found) == [(1, 3), (2, 3)]
