# SPDX-License-Identifier: Apache-2.0
"""What `lax` refuses is refused, in a text that names function, argument, value and remedy."""

import inspect
import re

import jax
import pytest
from jax import lax

import jaxcudnn
from bad_calls import WAYS, BadCall, bad_calls, draw_valid

NUMBERS = {
    "conv_general_dilated": 220,
    "conv": 40,
    "conv_transpose": 60,
    "conv_with_general_padding": 60,
}
CALLS = [call for function, number in NUMBERS.items() for call in bad_calls(function, number)]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_refused_as_by_lax(call: BadCall):
    arguments, shown = call.draw()
    with pytest.raises(Exception):  # noqa: B017 (of many kinds, some from the compiler)
        jax.block_until_ready(getattr(lax, call.function)(**arguments))
    with pytest.raises((TypeError, ValueError)) as error:
        getattr(jaxcudnn, call.function)(**arguments)
    text = str(error.value)
    assert text.startswith(f"jaxcudnn.{call.function}: ")
    assert call.argument in text
    assert re.search(f"got .*{re.escape(shown)}.*; ", text, re.DOTALL)


@pytest.mark.parametrize("function", NUMBERS)
def test_what_is_broken_was_valid(function: str):
    for seed in range(5):
        arguments = draw_valid(seed, function)
        expected = getattr(lax, function)(**arguments)
        assert getattr(jaxcudnn, function)(**arguments).shape == expected.shape


def test_every_way_is_tried():
    tried = {(call.argument, call.way) for call in CALLS if call.function == "conv_general_dilated"}
    parameters = inspect.signature(lax.conv_general_dilated).parameters
    assert tried == {(name, way) for name in parameters for way in WAYS[name]}


@pytest.mark.parametrize("function", NUMBERS)
def test_every_argument_is_broken(function: str):
    broken = {call.argument for call in CALLS if call.function == function}
    assert broken == {
        name for name in inspect.signature(getattr(lax, function)).parameters if WAYS[name]
    }


@pytest.mark.parametrize("function", NUMBERS)
def test_unknown_arguments_are_refused(function: str):
    arguments = draw_valid(0, function)
    for functions in (lax, jaxcudnn):
        with pytest.raises(TypeError, match=rf"{function}\(\) got an unexpected .*'groups'"):
            getattr(functions, function)(**arguments, groups=1)
