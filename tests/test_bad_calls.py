# SPDX-License-Identifier: Apache-2.0
"""What `lax` refuses is refused, in a text that helps; and no keyword is without effect."""

import inspect
import re

import jax
import pytest
from jax import lax

import jaxcudnn
from bad_calls import BadCall, draw_bad_calls

NUMBERS = {
    "conv_general_dilated": 200,
    "conv": 40,
    "conv_transpose": 60,
    "conv_with_general_padding": 60,
}
CALLS = [
    call
    for function, number in NUMBERS.items()
    for call in draw_bad_calls(
        function, list(inspect.signature(getattr(lax, function)).parameters), number
    )
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.function}-{call.way}")
def test_refused_as_by_lax(call: BadCall):
    with pytest.raises(Exception):  # noqa: B017 (of many kinds, some from within)
        jax.block_until_ready(getattr(lax, call.function)(**call.arguments))
    with pytest.raises((TypeError, ValueError)) as error:
        getattr(jaxcudnn, call.function)(**call.arguments)
    text = str(error.value)
    assert text.startswith(f"jaxcudnn.{call.function}: ")
    assert call.broken in text
    assert re.search(f"got .*{re.escape(call.shown.removeprefix('got '))}.*; ", text, re.DOTALL)


def test_there_are_two_hundred():
    assert len(CALLS) >= 200 + 160
    ways = {call.way for call in CALLS if call.function == "conv_general_dilated"}
    assert len(ways) > 150
