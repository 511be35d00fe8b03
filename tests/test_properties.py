# SPDX-License-Identifier: Apache-2.0
"""Calls that hypothesis draws from all that `lax` takes, against the definition in float64.

JAXCUDNN_EXAMPLES sets how many, and JAXCUDNN_SPACE (in strategies.py) narrows them down. A failure
prints the smallest call that hypothesis finds to fail, and a script that repeats it.
"""

import os
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax import lax

import calls
import definition
import jaxcudnn
import many
import oracle
import strategies
import sweep
from calls import Call
from cases import CASES, OPERANDS, Case, integers, parametrize
from processes import run_python
from strategies import Space

EXAMPLES = int(os.environ.get("JAXCUDNN_EXAMPLES", "2000"))
WORKERS = 2
BATCH = 16  # calls to a compilation


@pytest.mark.parametrize("role", OPERANDS)
@parametrize(CASES)
def test_definition_is_the_oracles(case: Case, role: str):
    operands = case.operands(role, integers)
    named = zip((sweep.ROLES[name] for name in OPERANDS[role]), operands, strict=True)
    arrays = {name: np.asarray(array, np.float64) for name, array in named}
    computed = definition.compute(sweep.ROLES[role], arrays, sweep.geometry(case))
    np.testing.assert_array_equal(computed, oracle.compute(role, *operands, case=case)[0])


def verify(source: str, count: int, space: Space) -> None:
    """Compute the calls of a source on the CPU.

    Raises:
      AssertionError: some were wrong. It shows the smallest that hypothesis finds when the calls
        are drawn again here; or those that failed, if none fails here or a process has died.
    """
    report = many.run(
        source, count=count, workers=WORKERS, size=BATCH, seconds=900, JAXCUDNN_SPACE=space.text
    )
    if report.wrong:
        shown = "\n".join(report.failures)
        if "process" not in report.wrong:
            raise_smallest(shown, count, space)
        raise AssertionError(shown)
    assert report.run == count


def raise_smallest(shown: str, count: int, space: Space) -> None:
    found = False

    def visit(call: Call) -> None:
        nonlocal found
        found = found or call.script in shown
        if found:
            (outcome,) = many.run_batch([call], "cpu")
            if outcome.error:
                raise AssertionError(many.describe(call, outcome.error))

    for index in range(WORKERS):
        strategies.draw_share(visit, index, WORKERS, count, space)


def test_calls():
    verify("strategies:share", EXAMPLES, Space.narrowed(normal=True))


def test_types_are_those_of_lax():
    for call in strategies.distinct(EXAMPLES // 10, Space.narrowed(), seed=0):
        with jax.enable_x64(call.x64):
            shapes = (jax.ShapeDtypeStruct(array.shape, array.dtype) for array in call.arrays())
            operands = list(shapes)[:2]
            ours, theirs = (
                jax.eval_shape(partial(convolve, **call.arguments), *operands)
                for convolve in (jaxcudnn.conv_general_dilated, lax.conv_general_dilated)
            )
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), call.script


def convolve_wrongly(lhs, rhs, window_strides, padding, **arguments):
    y = right(lhs, rhs, window_strides, padding, **arguments)
    return y + 1 if max(window_strides) > 2 else y


right = jaxcudnn.conv_general_dilated


def wrong_share(index: int, of: int, count: int) -> list[Call]:
    """A source, in whose process strides above 2 give something else."""
    jaxcudnn.conv_general_dilated = convolve_wrongly
    return strategies.share(index, of, count)


class TestFailures:
    """That failures are found, and printed so that they can be repeated."""

    space = Space(ranks=(1, 2), dtypes=("float32",), preferred=False)

    def test_smallest_call_is_shown(self, monkeypatch):
        monkeypatch.setattr(jaxcudnn, "conv_general_dilated", convolve_wrongly)
        with pytest.raises(AssertionError, match="Mismatched elements: 1 / 1") as caught:
            verify("test_properties:wrong_share", 64, self.space)
        smallest = Call(
            lhs_shape=(1, 1, 1),
            rhs_shape=(1, 1, 1),
            dtype="float32",
            window_strides=(3,),
            padding=((0, 0),),
        )
        assert smallest.script in str(caught.value)

    def test_what_fails_elsewhere_alone_is_shown(self):
        with pytest.raises(AssertionError, match=r"window_strides=\((., )*[34]"):
            verify("test_properties:wrong_share", 32, self.space)

    def test_printed_calls_are_the_calls(self):
        """For the whole space, with stand-ins for the functions that compute."""
        given = {}

        def convolve(*operands, **arguments):
            given.update(operands=operands, arguments=arguments)

        def vjp(function, *operands):
            function(*operands)
            return None, lambda *cotangents: given.update(operands=(*operands, *cotangents))

        names = {
            "jaxcudnn": SimpleNamespace(conv_general_dilated=convolve),
            "jax": SimpleNamespace(vjp=vjp),
            "partial": partial,
            "ConvDimensionNumbers": lax.ConvDimensionNumbers,
            "integers": calls.integers,
            "normal": calls.normal,
        }
        for call in strategies.distinct(100, Space(normal=True), seed=0):
            eval(repr(call), names)
            assert given["arguments"] == call.arguments
            for printed, array in zip(given["operands"], call.arrays(), strict=True):
                assert printed.dtype == array.dtype
                np.testing.assert_array_equal(printed, array)

    @pytest.mark.parametrize("gradient", [False, True])
    def test_scripts_run(self, gradient: bool):
        call = Call(
            lhs_shape=(1, 1, 3),
            rhs_shape=(1, 1, 2),
            dtype="float32",
            window_strides=(1,),
            padding="VALID",
            gradient=gradient,
        )
        computed = call.run(*call.arrays())
        shown = str((computed["lhs"], computed["rhs"]) if gradient else computed["out"])
        assert run_python(call.script, PYTHONPATH=many.PATH) == shown.splitlines()
