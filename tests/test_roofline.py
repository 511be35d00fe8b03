# SPDX-License-Identifier: Apache-2.0
"""The least work and time of a convolution, against counting one product after another."""

import itertools
import math

import jax
import numpy as np
import pytest

import jaxcudnn
from cases import CUDNN_CASES, Case, parametrize
from jaxcudnn import _roofline
from jaxcudnn._collect import collect
from jaxcudnn._spec import ConvSpec

FULL_CASES = [case for case in CUDNN_CASES if 0 not in case.y_shape + case.x_shape + case.w_shape]


def spec_of(case: Case) -> ConvSpec:
    operands = [jax.ShapeDtypeStruct(case.shape(role), "float32") for role in "xw"]
    (found,) = collect(case.cudnn("y"), operands, {})
    assert found.spec is not None
    return found.spec


def reached(spec: ConvSpec) -> list[tuple[int, ...]]:
    """The position in x of every product of a channel of x with a tap, padding left out."""
    found = []
    for out in itertools.product(*map(range, spec.y_shape[2:])):
        for tap in itertools.product(*map(range, spec.w_shape[2:])):
            position = tuple(
                stride * p + dilation * r - low
                for p, r, stride, dilation, (low, _) in zip(
                    out, tap, spec.strides, spec.dilation, spec.padding, strict=True
                )
            )
            if all(0 <= i < n for i, n in zip(position, spec.x_shape[2:], strict=True)):
                found.append(position)
    return found


@parametrize(FULL_CASES)
def test_work(case):
    spec = spec_of(case)
    positions = reached(spec)
    images, channels = spec.x_shape[:2]
    others = int(np.prod(spec.w_shape)) + int(np.prod(spec.y_shape))
    for op in ("fprop", "dgrad", "wgrad"):
        flops, elements = _roofline.work(op, spec)
        assert flops == 2 * images * spec.w_shape[0] * spec.w_shape[1] * len(positions)
        # All of dx is written; of x only what a window reaches has to be read.
        whole = images * channels * int(np.prod(spec.x_shape[2:])) + others
        least = images * channels * len(set(positions)) + others
        assert elements == whole if op == "dgrad" else least <= elements <= whole


def test_positions_between_windows_are_not_read():
    x, w = jax.ShapeDtypeStruct((2, 8, 10, 10), "float32"), jax.ShapeDtypeStruct((4, 8, 1, 2), "f4")
    (found,) = collect(lambda x, w: jaxcudnn.conv_fprop(x, w, padding=0, stride=5), (x, w), {})
    assert found.spec is not None
    assert _roofline.work("fprop", found.spec)[1] == 2 * 8 * 2 * 4 + 4 * 8 * 2 + 2 * 4 * 2 * 2
    assert _roofline.work("dgrad", found.spec)[1] == 2 * 8 * 10 * 10 + 4 * 8 * 2 + 2 * 4 * 2 * 2


class TestFloor:
    SPEC = spec_of(next(case for case in FULL_CASES if case.name == "2d"))

    @pytest.fixture(name="rates")
    def set_rates(self, monkeypatch):
        rates = {"matmul": 1e9, "copy": 1e9, "asked": []}

        def matmul_rate(dtype, allow_tf32):
            rates["asked"].append((dtype, allow_tf32))
            return rates["matmul"]

        monkeypatch.setattr(_roofline, "matmul_rate", matmul_rate)
        monkeypatch.setattr(_roofline, "copy_rate", lambda: rates["copy"])
        return rates

    @pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float64", 8)])
    def test_is_the_longer_of_the_two(self, rates, dtype, size):
        flops, elements = _roofline.work("wgrad", self.SPEC)
        attributes = {"dtype": dtype, "allow_tf32": False, "residual": False}
        for matmul, copy in ((1e9, 1e20), (1e20, 1e9)):
            rates.update(matmul=matmul, copy=copy)
            expected = 1e6 * (flops / matmul if matmul < copy else elements * size / copy)
            floor = _roofline.floor_microseconds("wgrad", self.SPEC, attributes)
            assert floor == pytest.approx(expected)
        assert rates["asked"] == [(dtype, False)] * 2

    @pytest.mark.parametrize(("op", "role"), [("fprop", "y"), ("dgrad", "x")])
    def test_a_residual_is_read_too(self, rates, op, role):
        rates["matmul"] = 1e20
        attributes = {"dtype": "float32", "allow_tf32": False, "residual": True}
        elements = _roofline.work(op, self.SPEC)[1] + math.prod(self.SPEC.shape(role))
        floor = _roofline.floor_microseconds(op, self.SPEC, attributes)
        assert floor == pytest.approx(1e6 * elements * 4 / rates["copy"])


class TestRates:
    """Measured on the CPU, where they mean nothing but are found in the same way."""

    @pytest.fixture(autouse=True)
    def small_and_on_the_cpu(self, monkeypatch):
        monkeypatch.setattr(_roofline, "_device", lambda: jax.devices("cpu")[0])
        monkeypatch.setattr(_roofline, "MATMUL_SIZES", {2: 32, 4: 64, 8: 32})
        monkeypatch.setattr(_roofline, "COPY_BYTES", 1 << 16)
        monkeypatch.setattr(_roofline, "SECONDS", 0.002)
        clear()
        yield
        clear()

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
    def test_matmul(self, dtype):
        assert 1e6 < _roofline.matmul_rate(dtype, False) < 1e13

    def test_copy(self):
        assert 1e6 < _roofline.copy_rate() < 1e12

    def test_are_measured_once(self, monkeypatch):
        first = _roofline.matmul_rate("float32", True), _roofline.copy_rate()
        monkeypatch.setattr(_roofline, "_seconds", lambda launch: pytest.fail("measured again"))
        assert (_roofline.matmul_rate("float32", True), _roofline.copy_rate()) == first

    @pytest.mark.parametrize(("allow_tf32", "precision"), [(True, "DEFAULT"), (False, "HIGHEST")])
    def test_tf32_as_for_the_convolution(self, monkeypatch, allow_tf32, precision):
        products = []
        monkeypatch.setattr(jax.lax, "dot", lambda a, b, precision: products.append(precision) or a)
        with jax.default_matmul_precision("high"):
            _roofline.matmul_rate("float32", allow_tf32)
        assert products == [getattr(jax.lax.Precision, precision)]

    def test_what_is_computed_has_the_dtype(self, monkeypatch):
        results = []
        monkeypatch.setattr(_roofline, "_seconds", lambda launch: results.append(launch()) or 1.0)
        assert _roofline.matmul_rate("float64", False) == 2 * 32**3
        assert _roofline.copy_rate() == 2 * (1 << 16)
        product, copied = map(np.asarray, results)
        assert (product.dtype, product.shape) == (np.float64, (32, 32))
        assert (product == 32).all()
        assert (copied == 2).all()

    def test_seconds_are_those_of_one_launch(self):
        launches = []

        def launch():
            launches.append(None)
            return jax.numpy.zeros(())

        seconds = _roofline._seconds(launch)
        assert 0 < seconds < 0.002
        assert len(launches) > 3  # several in a row, several times


def clear():
    for function in (_roofline.matmul_rate, _roofline.copy_rate):
        function.cache_clear()
