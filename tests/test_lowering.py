# SPDX-License-Identifier: Apache-2.0
"""What JAX's lowering makes of the primitives for each platform, before XLA sees it."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxcudnn
from aot import parse_attributes, shaped
from cases import CUDNN_CASES, OPERANDS, Case, named, parametrize
from jaxcudnn import _load, _lowering, _plans

NWC = ("NWC", "OWI", "NWC")
NHWC = ("NHWC", "OHWI", "NHWC")
X, W = shaped((2, 9, 8, 6)), shaped((4, 3, 3, 6))
CUDNN_NAMES = {"y": "fprop", "x": "dgrad", "w": "wgrad"}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(_load, "local_device", lambda: None)


def lower(f, *arguments, platforms=("cuda",)) -> str:
    # A new function each time, so that nothing is remembered from other tests.
    traced = jax.jit(lambda *arguments: f(*arguments)).trace(*arguments)
    return traced.lower(lowering_platforms=platforms).as_text()


def calls(f, *arguments):
    lines = lower(f, *arguments).splitlines()
    return [line for line in lines if f"custom_call @{_load.TARGET}(" in line]


def attributes(f, *arguments):
    (line,) = calls(f, *arguments)
    return parse_attributes(line)


def conv(x, w, strides=(1, 1), padding: Any = "SAME", dimension_numbers=NHWC, **options):
    return jaxcudnn.conv_general_dilated(
        x, w, strides, padding, dimension_numbers=dimension_numbers, **options
    )


def operands(case: Case, computed: str, dtype: str = "float32"):
    return (shaped(case.shape(role), dtype) for role in OPERANDS[computed])


OPTIONS = {
    "algorithm": "heuristic",  # as conftest.py has it
    "deterministic": False,
    "allow_reduced_precision_reduction": False,
    "allow_runtime_compilation": True,
    "exclude_engines": "",
    "verify": True,
    "tuning_candidates": 64,
    "tuning_candidate_us": 5_000,
    "tuning_us": 250_000,
}


class TestAttributes:
    def test_two_dimensions(self):
        assert attributes(lambda x, w: conv(x, w, (2, 1), rhs_dilation=(1, 2)), X, W) == {
            "op": "fprop",
            "x": [2, 6, 9, 8],
            "w": [4, 6, 3, 3],
            "y": [2, 4, 5, 8],
            "stride": [2, 1],
            "pre_padding": [1, 2],
            "post_padding": [1, 2],
            "dilation": [1, 2],
            "flip": False,
            "schema": _load.SCHEMA,
            "dtype": "bfloat16",
            "allow_tf32": True,
            "channels_first": False,
            "activation": "",
            "residual": False,
            "bias": False,
            "workspace_limit": _lowering.WORKSPACE_BUDGET,
            **OPTIONS,
        }

    def test_options(self):
        budget = jaxcudnn.TuningBudget(12, 0.25, 20)
        with jaxcudnn.options(
            algorithm={"dgrad": "eng5_k2=1", "fprop": "exhaustive"},
            workspace_limit=1 << 16,
            deterministic=True,
            allow_reduced_precision_reduction=True,
            allow_runtime_compilation=False,
            exclude_engines=("eng57", "eng5"),
            verify=False,
            tuning_budget=budget,
        ):
            found = attributes(conv, X, W)
        assert {name: found[name] for name in ("workspace_limit", *OPTIONS)} == {
            "workspace_limit": 1 << 16,
            "algorithm": "exhaustive",
            "deterministic": True,
            "allow_reduced_precision_reduction": True,
            "allow_runtime_compilation": False,
            "exclude_engines": "eng5,eng57",
            "verify": False,
            "tuning_candidates": 12,
            "tuning_candidate_us": 250,
            "tuning_us": 20_000,
        }

    def test_a_budget_without_end(self):
        with jaxcudnn.options(tuning_budget=jaxcudnn.TuningBudget(2**63 - 1, 1e300, 1e306)):
            found = attributes(conv, X, W)
        assert found["tuning_candidates"] == 2**63 - 1
        assert found["tuning_candidate_us"] == found["tuning_us"] == 2**62

    def test_options_of_a_call_hold_for_its_gradients(self):
        def loss(x, w):
            y = jaxcudnn.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=NHWC, options={"exclude_engines": ("eng8",)}
            )
            return y.astype("float32").sum()

        lines = calls(jax.grad(loss, (0, 1)), X, W)
        assert len(lines) == 2
        assert {parse_attributes(line)["exclude_engines"] for line in lines} == {"eng8"}

    def test_tf32_may_be_forbidden(self):
        x, w = shaped(X.shape, "float32"), shaped(W.shape, "float32")
        assert attributes(conv, x, w)["allow_tf32"]
        with jaxcudnn.options(allow_tf32=False):
            assert not attributes(conv, x, w)["allow_tf32"]
        with jaxcudnn.options(allow_tf32=True):
            strict = attributes(lambda x, w: conv(x, w, precision="highest"), x, w)
        assert not strict["allow_tf32"]

    def test_flags_of_xla_ask_for_determinism(self, monkeypatch):
        monkeypatch.setattr(_lowering, "xla_is_deterministic", lambda: True)
        assert attributes(conv, X, W)["deterministic"]

    def test_one_dimension_gets_another_before_it(self):
        f = lambda x, w: conv(x, w, (2,), [(3, 1)], NWC, rhs_dilation=(2,))  # noqa: E731
        found = attributes(f, shaped((2, 9, 6)), shaped((4, 3, 6)))
        assert found["x"] == [2, 6, 1, 9]
        assert found["w"] == [4, 6, 1, 3]
        assert found["y"] == [2, 4, 1, 5]
        assert found["stride"] == [1, 2]
        assert found["pre_padding"] == [0, 3]
        assert found["post_padding"] == [0, 1]
        assert found["dilation"] == [1, 2]

    def test_three_dimensions(self):
        x, w = shaped((1, 5, 6, 7, 2)), shaped((4, 1, 2, 3, 2))
        found = attributes(
            lambda x, w: conv(x, w, (1, 2, 3), "VALID", ("NDHWC", "ODHWI", "NDHWC")), x, w
        )
        assert found["x"] == [1, 2, 5, 6, 7]
        assert found["w"] == [4, 2, 1, 2, 3]
        assert found["y"] == [1, 4, 5, 3, 2]
        assert found["stride"] == [1, 2, 3]

    def test_asymmetric_padding(self):
        found = attributes(lambda x, w: conv(x, w, padding=[(3, 0), (1, 2)]), X, W)
        assert (found["pre_padding"], found["post_padding"]) == ([3, 1], [0, 2])

    def test_negative_padding_is_a_crop_beforehand(self):
        found = attributes(lambda x, w: conv(x, w, padding=[(-2, 1), (0, -3)]), X, W)
        assert found["x"] == [2, 6, 7, 5]
        assert (found["pre_padding"], found["post_padding"]) == ([0, 0], [1, 0])

    def test_groups_are_in_the_sizes(self):
        w = shaped((4, 3, 3, 3))
        found = attributes(lambda x, w: conv(x, w, feature_group_count=2), X, w)
        assert (found["x"][1], found["w"][:2], found["y"][1]) == (6, [4, 3], 4)

    @pytest.mark.parametrize(
        ("mode", "flip"), [("CROSS_CORRELATION", False), ("CONVOLUTION", True)]
    )
    def test_flip(self, mode, flip):
        f = lambda x, w: jaxcudnn.conv_fprop(  # noqa: E731
            x, w, padding=1, convolution_mode=mode, dimension_numbers=NHWC
        )
        assert attributes(f, X, W)["flip"] is flip

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    def test_dtype(self, dtype):
        operands = shaped(X.shape, dtype), shaped(W.shape, dtype)
        assert attributes(conv, *operands)["dtype"] == dtype

    @parametrize(named("2d-grouped-strided", "1d-strided-dilated", "3d-grouped-dilated"))
    def test_gradients_describe_the_forward_convolution(self, case):
        found = {
            role: attributes(case.cudnn(role), *operands(case, role, "bfloat16"))
            for role in CUDNN_NAMES
        }
        assert {role: each.pop("op") for role, each in found.items()} == CUDNN_NAMES
        assert found["x"] == found["y"] == found["w"]

    def test_only_what_is_asked_for_is_computed(self):
        def training(x, w):
            return jax.vjp(conv, x, w)[1](jnp.ones((2, 9, 8, 4), x.dtype))

        operations = [parse_attributes(line)["op"] for line in calls(training, X, W)]
        assert sorted(operations) == ["dgrad", "wgrad"]  # y itself is not asked for


class TestPrecision:
    F32 = shaped(X.shape, "float32"), shaped(W.shape, "float32")

    @pytest.mark.parametrize(
        ("precision", "allowed"),
        [
            (None, True),
            ("default", True),
            ("high", True),
            ("highest", False),
            ("float32", False),
            ("tensorfloat32", True),
            (lax.Precision.DEFAULT, True),
            (lax.Precision.HIGH, True),
            (lax.Precision.HIGHEST, False),
            ((lax.Precision.DEFAULT, lax.Precision.HIGHEST), False),
            ((lax.Precision.HIGH, lax.Precision.DEFAULT), True),
        ],
    )
    def test_argument(self, precision, allowed):
        f = lambda x, w: conv(x, w, precision=precision)  # noqa: E731
        assert attributes(f, *self.F32)["allow_tf32"] is allowed

    @pytest.mark.parametrize(
        ("setting", "allowed"),
        [
            (None, True),
            ("default", True),
            ("high", True),
            ("tensorfloat32", True),
            ("highest", False),
            ("float32", False),
        ],
    )
    def test_setting(self, setting, allowed):
        with jax.default_matmul_precision(setting):
            assert attributes(conv, *self.F32)["allow_tf32"] is allowed

    def test_argument_beats_setting(self):
        with jax.default_matmul_precision("highest"):
            f = lambda x, w: conv(x, w, precision="default")  # noqa: E731
            assert attributes(f, *self.F32)["allow_tf32"] is True

    @pytest.mark.parametrize("role", ["x", "w"])
    def test_gradients_keep_it(self, role):
        (case,) = named("2d")
        f = case.cudnn(role, precision="highest")
        assert attributes(f, *operands(case, role))["allow_tf32"] is False

    def test_sixteen_bits_have_nothing_to_round(self):
        f = lambda x, w: conv(x, w, precision="highest")  # noqa: E731
        assert attributes(f, X, W)["allow_tf32"] is True


@parametrize(CUDNN_CASES)
@pytest.mark.parametrize("computed", OPERANDS)
def test_cuda_gets_one_call_unless_there_is_nothing_to_compute(case, computed):
    empty = 0 in (*case.x_shape, *case.w_shape, *case.y_shape)
    found = calls(case.cudnn(computed), *operands(case, computed))
    assert len(found) == (0 if empty else 1)


def test_gradient_of_nothing_computes_nothing():
    """The padding alone is covered by the window, twice."""
    shape = shaped((1, 1, 2))
    text = lower(
        lambda dy, w: jaxcudnn.conv_dgrad(dy, w, (0,), pre_padding=1, post_padding=2), shape, shape
    )
    assert "stablehlo.convolution" not in text


@pytest.mark.parametrize("platform", ["cpu", "tpu", "rocm"])
@pytest.mark.parametrize("computed", OPERANDS)
def test_other_platforms_get_lax(platform, computed):
    (case,) = named("2d-grouped-strided")
    text = lower(case.cudnn(computed), *operands(case, computed), platforms=(platform,))
    assert "custom_call" not in text
    assert "stablehlo.convolution" in text


class TestOnAMachineWithAGpu:
    """The device is asked for the plan; here something else answers for it."""

    @pytest.fixture(autouse=True)
    def asked(self, monkeypatch):
        asked = []
        self.workspace = 12_345

        def workspace(attributes, device, **rest):
            asked.append((dict(attributes), device))
            return self.workspace

        monkeypatch.setattr(_load, "local_device", lambda: 3)
        monkeypatch.setattr(_plans, "workspace", workspace)
        return asked

    def test_workspace_is_what_is_needed(self, asked):
        (line,) = calls(conv, X, W)
        (reserved,) = re.findall(r"tensor<(\d+)xui8>", line)
        room = W.size * W.dtype.itemsize  # for a copy of the filter
        assert 12_345 + room <= int(reserved) <= 12_345 + room + 512
        ((wanted, device),) = asked
        assert device == 3
        assert {"schema": _load.SCHEMA, **wanted} == parse_attributes(line)
        assert wanted["workspace_limit"] == 1 << 30

    @pytest.mark.parametrize(
        ("images", "options", "limit"),
        [
            (1, {}, 1 << 30),
            (200, {}, 2 * 4 * (2 * 200 * 64 * 64 * 256 + 256 * 256)),
            (200, {"workspace_limit": 5}, 5),
        ],
    )
    def test_limit_of_the_workspace(self, asked, images, options, limit):
        x = jax.ShapeDtypeStruct((images, 64, 64, 256), "float32")
        w = jax.ShapeDtypeStruct((256, 1, 1, 256), "float32")
        calls(functools.partial(conv, options=options), x, w)
        ((wanted, _),) = asked
        assert wanted["workspace_limit"] == limit

    @pytest.mark.parametrize("computed", OPERANDS)
    def test_lax_where_cudnn_has_no_plan(self, computed):
        self.workspace = None
        (case,) = named("2d-grouped-strided")
        text = lower(case.cudnn(computed), *operands(case, computed))
        assert "custom_call" not in text
        assert "stablehlo.convolution" in text

    def test_nothing_is_planned_for_empty_arrays(self, asked):
        assert calls(conv, shaped((0, 9, 8, 6)), W) == []
        assert asked == []

    def test_nothing_is_planned_beyond_32_bits(self, asked):
        """cuDNN would lose the high bits of the padded size."""
        x, w = shaped((1, 1, 3, 3)), shaped((1, 1, 1, 1))
        f = lambda x, w: jaxcudnn.conv_fprop(x, w, padding=2**30, stride=2**31 - 1)  # noqa: E731
        assert calls(f, x, w) == []
        assert asked == []

    def test_nothing_is_planned_for_other_platforms(self, asked):
        lower(conv, X, W, platforms=("cpu",))
        assert asked == []
