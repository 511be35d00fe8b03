# SPDX-License-Identifier: Apache-2.0
"""In which memory order and dtype cuDNN is given a convolution."""

from dataclasses import replace

import jax
import pytest

import jaxcudnn
from aot import parse_attributes, shaped
from jaxcudnn import _load, _memory
from jaxcudnn._spec import Layout

OHWI = ("NHWC", "OHWI", "NHWC")
LAST = Layout(x=(0, 3, 1, 2), w=(0, 3, 1, 2), y=(0, 3, 1, 2))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(_load, "local_device", lambda: None)


def attributes(function, *operands):
    """What the one custom call of a function is told."""
    traced = jax.jit(lambda *operands: function(*operands)).trace(*operands)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (line,) = (line for line in text.splitlines() if f"custom_call @{_load.TARGET}(" in line)
    return parse_attributes(line), line


def conv_spec(c, k, window, groups=1, dtype="float32"):
    found = []
    n = len(window)
    x = shaped((2, c, *(32,) * n), dtype)
    w = shaped((k, c // groups, *window), dtype)
    conv = lambda x, w: jaxcudnn.conv_general_dilated(  # noqa: E731
        x, w, (1,) * n, "SAME", feature_group_count=groups
    )
    for equation in jax.make_jaxpr(conv)(x, w).eqns:
        if equation.primitive.name == "conv_fprop":
            found.append((equation.params["spec"], equation.params["layout"]))
    ((spec, layout),) = found
    return spec, layout


class TestOrder:
    @pytest.mark.parametrize(
        ("c", "k", "dtype", "expected"),
        [
            (3, 64, "float32", True),
            (4, 64, "float32", True),
            (5, 64, "float32", False),
            (64, 3, "float32", True),
            (64, 64, "float32", False),
            (3, 64, "bfloat16", False),
        ],
    )
    def test_few_channels(self, c, k, dtype, expected):
        spec, layout = conv_spec(c, k, (3, 3), dtype=dtype)
        for op in ("fprop", "dgrad", "wgrad"):
            assert _memory.is_channels_first(op, spec, layout, dtype) is expected
            assert not _memory.is_channels_first(op, spec, LAST, dtype)

    def test_channels_are_those_of_a_group(self):
        spec, layout = conv_spec(64, 64, (3, 3), groups=16)
        assert _memory.is_channels_first("fprop", spec, layout, "float32")
        spec, layout = conv_spec(64, 64, (3, 3), groups=8)
        assert not _memory.is_channels_first("fprop", spec, layout, "float32")

    def test_small_windows(self):
        for window, expected in (
            ((3, 3, 3), True),
            ((3, 3, 4), False),
            ((3, 3), True),
            ((5, 5), False),
            ((27,), True),
            ((28,), False),
        ):
            spec, layout = conv_spec(3, 64, window)
            found = [
                _memory.is_channels_first(op, spec, layout, "float32")
                for op in ("fprop", "dgrad", "wgrad")
            ]
            assert found == [expected, expected, True]
            strided = replace(spec, strides=(2,) * spec.num_spatial)
            assert _memory.is_channels_first("dgrad", strided, layout, "float32")

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    @pytest.mark.parametrize(("window", "is_tiled"), [((3, 3), True), ((4,), False)])
    def test_depthwise(self, window, is_tiled, dtype):
        spec, layout = conv_spec(64, 64, window, groups=64, dtype=dtype)
        found = [
            _memory.is_channels_first(op, spec, layout, dtype) for op in ("fprop", "dgrad", "wgrad")
        ]
        assert found == [dtype != "float16", dtype != "float16", not is_tiled]
        spec, layout = conv_spec(64, 64, (3, 3), groups=64, dtype=dtype)
        assert not _memory.is_channels_first("fprop", spec, LAST, dtype)
        for window, expected in (((16, 16), True), ((15, 17), False)):
            spec, _ = conv_spec(64, 64, window, groups=64, dtype=dtype)
            for op in ("fprop", "dgrad", "wgrad"):
                assert _memory.is_channels_first(op, spec, LAST, dtype) is expected

    @pytest.mark.parametrize(
        ("op", "window", "groups", "dtype", "expected"),
        [
            ("wgrad", (3, 3), 8, "bfloat16", "float32"),
            ("wgrad", (5, 1), 8, "float16", "float32"),
            ("wgrad", (5,), 8, "bfloat16", "float32"),
            ("wgrad", (4,), 8, "bfloat16", "bfloat16"),
            ("wgrad", (7, 3), 8, "bfloat16", "bfloat16"),
            ("wgrad", (3, 3, 3), 8, "bfloat16", "bfloat16"),
            ("wgrad", (3, 3), 4, "bfloat16", "bfloat16"),
            ("wgrad", (3, 3), 8, "float64", "float64"),
            ("wgrad", (3, 3), 8, None, None),
            ("fprop", (3, 3), 8, "bfloat16", "bfloat16"),
            ("dgrad", (3, 3), 8, "float16", "float16"),
        ],
    )
    def test_widened(self, op, window, groups, dtype, expected):
        spec, _ = conv_spec(8, 8, window, groups=groups)
        assert _memory.widened(op, spec, dtype) == expected

    def test_arrays_are_asked_for_in_that_order(self):
        x, w = shaped((2, 3, 8, 8), "float32"), shaped((16, 3, 3, 3), "float32")
        conv = lambda x, w: jaxcudnn.conv_general_dilated(x, w, (1, 1), "SAME")  # noqa: E731
        found, line = attributes(conv, x, w)
        assert found["channels_first"]
        assert line.count("dense<[3, 2, 1, 0]>") == 3
        found, line = attributes(conv, shaped((2, 16, 8, 8)), shaped((16, 16, 3, 3)))
        assert not found["channels_first"]
        assert line.count("dense<[1, 3, 2, 0]>") == 3

    def test_a_16_bit_filter_gradient_that_is_widened_keeps_its_dtype(self):
        x = shaped((2, 8, 8, 16), "bfloat16")
        f = lambda x, dy: jaxcudnn.conv_wgrad(  # noqa: E731
            x, dy, (3, 3), padding=1, groups=16, dimension_numbers=OHWI
        )
        assert jax.eval_shape(f, x, x).dtype == "bfloat16"
        found, line = attributes(f, x, x)
        assert found["dtype"] == "float32" and "bf16" not in line
