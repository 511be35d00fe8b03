# SPDX-License-Identifier: Apache-2.0
"""Sizes, layouts and paddings against `lax`, and what the primitives make of a spec."""

import dataclasses
import inspect
import itertools
import random
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import cases
import jaxcudnn
from cases import Case, parametrize
from jaxcudnn import _arguments, _primitives, _readings
from jaxcudnn._arguments import Caller
from jaxcudnn._dtypes import Dtypes
from jaxcudnn._spec import ConvSpec, Layout

CALLER = Caller("test", x="x", w="w", y="y")
DEFAULT = (lax.Precision.DEFAULT, lax.Precision.DEFAULT)
SPEC = ConvSpec(
    x_shape=(2, 4, 5, 6),
    w_shape=(6, 2, 3, 2),
    strides=(2, 1),
    padding=((1, 0), (2, 1)),
    dilation=(1, 2),
    groups=2,
    flip=False,
    dtypes=Dtypes("float32", "float32", "float32"),
    precision=DEFAULT,
)
CHANGES = {
    "x_shape": (2, 4, 6, 6),
    "w_shape": (6, 2, 3, 3),
    "strides": (1, 2),
    "padding": ((0, 1), (2, 1)),
    "dilation": (2, 1),
    "groups": 1,
    "flip": True,
    "dtypes": Dtypes("float32", "float32", "bfloat16"),
    "precision": (lax.Precision.HIGHEST, lax.Precision.DEFAULT),
    "options": jaxcudnn.Options(deterministic=True),
}


def equation(function, *operands):
    """The one convolution of a function."""
    jaxpr = jax.make_jaxpr(function)(*operands).jaxpr
    (found,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name.startswith("conv_")]
    return found


@parametrize(cases.CUDNN_CASES)
def test_y_shape_is_that_of_lax(case: Case):
    params = equation(case.cudnn("y"), *case.operands("y")).params
    spec, layout = params["spec"], params["layout"]
    assert layout.to_array("y", spec.y_shape) == case.y_shape
    assert layout == tuple(map(case.axes, "xwy"))


def test_sizes_are_those_of_lax():
    """Any geometry of one dimension, and any padding that crops no more than there is."""
    draw = random.Random(0)
    for _ in range(300):
        size, window = draw.randint(0, 9), draw.randint(0, 5)
        low = draw.randint(-size, 6)
        padding = draw.choice(
            ["SAME", "SAME_LOWER", "VALID", ((low, draw.randint(-size - low, 6)),)]
        )
        arguments = dict(
            window_strides=(draw.randint(1, 4),),
            padding=padding,
            rhs_dilation=(draw.randint(1, 3),),
        )
        operands = (
            jax.ShapeDtypeStruct((1, 1, size), "float32"),
            jax.ShapeDtypeStruct((1, 1, window), "float32"),
        )
        ours = jax.eval_shape(partial(jaxcudnn.conv_general_dilated, **arguments), *operands)
        theirs = jax.eval_shape(partial(lax.conv_general_dilated, **arguments), *operands)
        assert ours.shape == theirs.shape, (size, window, arguments)


def test_negative_padding_crops_what_is_padded():
    """As `lax.pad`: what one side crops may be what the other side pads."""
    for size, low, high in itertools.product(range(4), range(-5, 6), range(-5, 6)):
        if size + low + high < 0:
            continue
        x = np.arange(1, 1 + size)
        padded = np.pad(x, (max(low, 0), max(high, 0)))
        expected = padded[max(-low, 0) : len(padded) - max(-high, 0)]

        start, stop, padding = _readings._crop(size, (low, high))
        assert min(padding) >= 0
        np.testing.assert_array_equal(np.pad(x[start:stop], padding), expected)


@parametrize()
def test_dimension_numbers_are_read_as_lax_reads_them(case: Case):
    numbers = lax.conv_dimension_numbers(case.x_shape, case.w_shape, case.dimension_numbers)
    for form in (case.dimension_numbers, list(case.dimension_numbers), numbers):
        assert _arguments.parse_layout(CALLER, form, len(case.size)) == tuple(numbers)


def test_layout_goes_there_and_back():
    layout = Layout(x=(0, 3, 1, 2), w=(3, 2, 0, 1), y=(1, 3, 2, 0))
    for role in "xwy":
        assert layout.to_logical(role, layout.to_array(role, (7, 8, 9, 10))) == (7, 8, 9, 10)
    assert layout.to_array("x", (2, 8, 5, 6)) == (2, 5, 6, 8)  # NCHW in NHWC
    assert layout.to_array("w", (4, 8, 3, 1)) == (3, 1, 8, 4)  # OIHW in HWIO


def test_changes_name_every_field():
    assert set(CHANGES) == {field.name for field in dataclasses.fields(ConvSpec)}


@pytest.mark.parametrize("field", CHANGES)
def test_specs_that_differ_in_a_field_differ(field: str):
    changed = dataclasses.replace(SPEC, **{field: CHANGES[field]})
    assert changed != SPEC
    assert len({SPEC, changed, dataclasses.replace(changed, **{field: getattr(SPEC, field)})}) == 2


def test_a_convolution_without_negative_padding_is_one_equation():
    (case,) = cases.named("2d-last")
    assert len(jax.make_jaxpr(case.conv)(*case.operands("y")).jaxpr.eqns) == 1


@pytest.mark.parametrize("shapes", [((2, 4, 5, 6), (6, 2, 3, 3)), ((2, 4, 5), (6, 2, 3))])
def test_primitives_refuse_operands_that_do_not_fit_the_spec(shapes):
    layout = Layout(*((0, 1, 2, 3),) * 3)
    x, w = (jnp.ones(shape) for shape in shapes)
    with pytest.raises(AssertionError):
        _primitives.fprop(x, w, spec=SPEC, layout=layout)


@pytest.mark.parametrize("x_dtype, w_dtype", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_primitives_refuse_other_dtypes_than_the_spec_has(x_dtype: str, w_dtype: str):
    layout = Layout(*((0, 1, 2, 3),) * 3)
    x, w = jnp.ones(SPEC.x_shape, x_dtype), jnp.ones(SPEC.w_shape, w_dtype)
    with pytest.raises(AssertionError):
        _primitives.fprop(x, w, spec=SPEC, layout=layout)


def test_signature_is_that_of_lax():
    ours, theirs = map(
        inspect.signature, (jaxcudnn.conv_general_dilated, jax.lax.conv_general_dilated)
    )
    *parameters, options = ours.parameters.values()
    assert [(p.name, p.default, p.kind) for p in parameters] == [
        (p.name, p.default, p.kind) for p in theirs.parameters.values()
    ]
    assert (options.name, options.default, options.kind) == ("options", None, options.KEYWORD_ONLY)
