# SPDX-License-Identifier: Apache-2.0
"""Rewritings of one convolution into another."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcudnn
from aot import parse_attributes, shaped
from calls import integers
from cases import CASES, CUDNN_CASES, OPERANDS, Case, parametrize
from jaxcudnn import _load, _lowering, _reference, _route_reversed
from jaxcudnn._spec import ConvSpec, Layout

CUDNN_OPERATIONS = {"y": "fprop", "x": "dgrad", "w": "wgrad"}
STRIDE_1 = [case for case in CUDNN_CASES if set(case.strides) == {1} and 0 not in case.y_shape]
HWIO = ("NHWC", "HWIO", "NHWC")
OHWI = ("NHWC", "OHWI", "NHWC")
OIHW = ("NCHW", "OIHW", "NCHW")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(_load, "local_device", lambda: None)


def described(case: Case, role: str) -> tuple[ConvSpec, Layout] | None:
    """What the primitive that computes a role is told."""
    operands = [jax.ShapeDtypeStruct(case.shape(name), "float32") for name in OPERANDS[role]]
    equations = jax.make_jaxpr(case.cudnn(role))(*operands).eqns
    for equation in equations:
        if equation.primitive.name == f"conv_{CUDNN_OPERATIONS[role]}":
            return equation.params["spec"], equation.params["layout"]
    return None


def attributes(function, *operands):
    """What the one custom call of a function is told."""
    traced = jax.jit(lambda *operands: function(*operands)).trace(*operands)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (line,) = (line for line in text.splitlines() if f"custom_call @{_load.TARGET}(" in line)
    return parse_attributes(line), line


class TestFpropOfDgrad:
    @parametrize(STRIDE_1)
    def test_value(self, case):
        found = described(case, "x")
        if found is None:
            pytest.skip("nothing is computed, or by another operation")
        spec, layout = found
        route = _route_reversed.fprop_of_dgrad(spec, layout)
        span = [d * (w - 1) for d, w in zip(spec.dilation, spec.w_shape[2:], strict=True)]
        if any(max(pads) > s for pads, s in zip(spec.padding, span, strict=True)):
            assert route is None
            return
        assert route is not None
        dy, w = (
            jnp.asarray(integers(i, layout.to_array(role, spec.shape(role)), "float32"))
            for i, role in enumerate("yw")
        )
        expected = _reference.dgrad(dy, w, spec=spec, layout=layout)
        computed = _reference.fprop(dy, route.filter(w), spec=route.spec, layout=route.layout)
        assert np.array_equal(computed, expected)
        assert route.spec.y_shape == spec.x_shape

    def test_strides_have_none(self):
        spec, layout = described(CASES[0], "x") or pytest.fail("the case has a gradient")
        for axis in range(spec.num_spatial):
            strides = tuple(2 if i == axis else 1 for i in range(spec.num_spatial))
            assert _route_reversed.fprop_of_dgrad(replace(spec, strides=strides), layout) is None

    @pytest.mark.parametrize(
        ("dtype", "layouts", "groups", "precision", "op"),
        [
            ("float32", HWIO, 1, None, "fprop"),  # the filter is copied in any case
            ("float32", OIHW, 1, None, "fprop"),
            ("float32", HWIO, 2, None, "fprop"),
            ("float32", OHWI, 1, None, "dgrad"),
            ("float32", OIHW, 8, None, "dgrad"),  # few channels, channels first as the filter is
            ("float32", ("NCHW", "HWIO", "NCHW"), 8, None, "fprop"),
            ("float32", HWIO, 1, "highest", "dgrad"),
            ("bfloat16", HWIO, 1, None, "dgrad"),
            ("bfloat16", OHWI, 16, None, "fprop"),  # depthwise
            ("float32", OHWI, 16, "highest", "fprop"),
        ],
    )
    def test_where_it_is_taken(self, dtype, layouts, groups, precision, op):
        sizes = {"N": 2, "C": 16, "H": 8, "W": 8}
        x = shaped(tuple(sizes[letter] for letter in layouts[0]), dtype)
        sizes = {"O": 16, "I": 16 // groups, "H": 3, "W": 3}
        w = shaped(tuple(sizes[letter] for letter in layouts[1]), dtype)

        def gradient(dy, w):
            def conv(x):
                return jaxcudnn.conv_general_dilated(
                    x, w, (1, 1), "SAME", dimension_numbers=layouts,
                    feature_group_count=groups, precision=precision,
                )  # fmt: skip

            return jax.linear_transpose(conv, x)(dy)[0]

        found, _ = attributes(gradient, x, w)
        assert found["op"] == op
        with jaxcudnn.options(algorithm={"dgrad": "eng1"}):  # of an input gradient's plans
            found, _ = attributes(gradient, x, w)
        assert (found["op"], found["algorithm"]) == ("dgrad", "eng1")
        with jaxcudnn.options(algorithm={"dgrad": "exhaustive", "fprop": "heuristic"}):
            found, _ = attributes(gradient, x, w)
        assert (found["op"], found["algorithm"]) == (op, "exhaustive")

    def test_not_where_its_padding_is_too_large(self, monkeypatch):
        monkeypatch.setattr(_lowering, "LARGEST", 16)
        f = lambda dy, w: jaxcudnn.conv_dgrad(dy, w, (13, 13), padding=0)  # noqa: E731
        dy, w = shaped((2, 16, 7, 7), "float32"), shaped((16, 16, 7, 7), "float32")
        assert attributes(f, dy, w)[0]["op"] == "dgrad"  # dy with its padding has 19 positions
        monkeypatch.setattr(_lowering, "LARGEST", 19)
        assert attributes(f, dy, w)[0]["op"] == "fprop"

    def test_without_a_plan_the_gradient_itself_is_asked_for(self, monkeypatch):
        asked = []

        def workspace(attributes, *, is_last):
            asked.append((attributes["op"], is_last))
            return 0 if attributes["op"] == "dgrad" else None

        monkeypatch.setattr(_lowering, "_workspace", workspace)
        x, w = shaped((2, 16, 8, 8), "float32"), shaped((16, 16, 3, 3), "float32")
        f = lambda dy, w: jaxcudnn.conv_dgrad(dy, w, (8, 8), padding=1)  # noqa: E731
        found, _ = attributes(f, x, w)
        assert asked == [("fprop", False), ("dgrad", True)] and found["op"] == "dgrad"
