# SPDX-License-Identifier: Apache-2.0
"""What is said of plans is what runs: `explain`, `plans` and `tune` on a GPU."""

import time
from dataclasses import replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcudnn
from jaxcudnn import _load, _lowering, _plans, _reference, _roofline
from jaxcudnn._explain import Row, explain
from jaxcudnn._plan_table import plans
from jaxcudnn._spec import ConvSpec, Layout
from jaxcudnn._tune import tune

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("measuring")]

NHWC = ("NHWC", "OHWI", "NHWC")
OPERATIONS = ("fprop", "dgrad", "wgrad")
# Larger than the caches, so that no share of the roofline is of memory that is not read.
X, W = (64, 56, 56, 64), (64, 3, 3, 64)
TIMED = ("measured", "stored")


def conv(x, w, **arguments):
    return jaxcudnn.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC, **arguments)


def training(x, w):
    return jax.value_and_grad(lambda x, w: (conv(x, w) ** 2).sum(), argnums=(0, 1))(x, w)


def structs(dtype, x=X, w=W):
    return jax.ShapeDtypeStruct(x, dtype), jax.ShapeDtypeStruct(w, dtype)


def device() -> int:
    number = _load.local_device()
    assert number is not None
    return number


def known(op: str, spec: ConvSpec | None, layout: Layout | None):
    """The plan that the extension has for a convolution."""
    assert spec is not None and layout is not None
    (step,) = _lowering.steps(op, getattr(_reference, op), spec=spec, layout=layout)
    assert step.attributes is not None
    plan = _plans.known(step.attributes, device())
    assert plan is not None
    return plan


def assert_plausible(row: Row) -> None:
    assert row.microseconds is not None and row.microseconds > 0
    assert row.share is not None and 0 < row.share <= 1.2


@lru_cache
def best(function, *arguments) -> float:
    """The highest of several measurements: other processes may use the GPU meanwhile."""
    rates = []
    for _ in range(5):
        function.cache_clear()
        rates.append(function(*arguments))
        time.sleep(0.1)
    return max(rates)


@pytest.fixture(autouse=True)
def measure_rates_well(monkeypatch):
    for name in ("matmul_rate", "copy_rate"):
        monkeypatch.setattr(_roofline, name, partial(best, getattr(_roofline, name)))


class TestExplain:
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_measured(self, dtype):
        found = explain(training, measure=True)(*structs(dtype))
        assert sorted(row.op for row in found) == sorted(OPERATIONS)
        for row in found:
            plan = known(row.op, row.spec, row.layout)
            assert (row.plan, row.workspace) == (plan.name, plan.workspace_size)
            assert row.microseconds == plan.microseconds
            assert row.chosen in TIMED
            assert row.tried >= 1
            assert_plausible(row)
            assert "tensor core" in row.notes
        assert "in all" in str(found)

    def test_strict_float32(self):
        with jax.default_matmul_precision("highest"):
            found = explain(training, measure=True)(*structs("float32"))
        for row in found:
            assert "tensor core" not in row.notes
            assert_plausible(row)

    def test_float64(self):
        with jax.enable_x64(True):
            x, w = structs("float64", (8, 56, 56, 64))
            (row,) = explain(conv, measure=True)(x, w)
        assert_plausible(row)

    def test_before_and_after_running(self):
        """Running chooses what explaining then says, and explaining changes nothing."""
        x = jnp.asarray(np.random.default_rng(1).standard_normal((3, 29, 31, 24)), "bfloat16")
        w = jnp.asarray(np.random.default_rng(2).standard_normal((40, 3, 3, 24)), "bfloat16")
        (before,) = explain(conv)(x, w)
        assert (before.route, before.chosen) in (("cuDNN", ""), ("cuDNN", "stored"))
        first = jax.block_until_ready(jax.jit(conv)(x, w))
        (after,) = explain(conv)(x, w)
        assert after.plan == known(after.op, after.spec, after.layout).name
        assert before.plan in ("", after.plan)
        assert after.chosen in TIMED
        np.testing.assert_array_equal(jax.jit(lambda x, w: conv(x, w))(x, w), first)
        assert explain(conv)(x, w)[0].plan == after.plan

    def test_heuristic(self):
        with jaxcudnn.options(algorithm="heuristic"):
            (row,) = explain(conv)(*structs("bfloat16"))
            assert (row.plan, row.chosen) == (known(row.op, row.spec, row.layout).name, "heuristic")
            (timed,) = explain(conv, measure=True)(*structs("bfloat16"))
        assert timed.plan == row.plan
        assert_plausible(timed)

    def test_named(self):
        (row,) = explain(conv)(*structs("bfloat16"))
        assert row.spec is not None
        for each in plans(row.spec, measure=False)[:3]:
            with jaxcudnn.options(algorithm=each.name):
                (named,) = explain(conv)(*structs("bfloat16"))
            assert (named.plan, named.chosen) == (each.name, "named")

    def test_what_is_left_to_lax(self):
        (row,) = explain(conv)(*structs("int8"))
        assert (row.route, row.plan, row.microseconds) == ("lax", "", None)

    def test_pieces(self, monkeypatch):
        monkeypatch.setattr(_lowering, "MOST_ELEMENTS", 40 * 56 * 56 * 64)
        (row,) = explain(conv, measure=True)(*structs("bfloat16"))
        assert row.route == "cuDNN in 2 pieces"
        assert_plausible(row)


class TestPlans:
    @pytest.mark.parametrize("op", OPERATIONS)
    def test_measured(self, op):
        (row,) = explain(conv)(*structs("bfloat16", (16, 28, 28, 64)))
        assert row.spec is not None
        table = plans(row.spec, op)
        candidates = _plans.candidates(_lowering._attributes(op, row.spec), device())
        assert {plan.name for plan in candidates} <= {each.name for each in table}
        assert table.chosen is not None
        assert table.chosen.name == known(op, row.spec, row.layout).name
        times = [each.microseconds for each in table if each.microseconds is not None]
        assert times and min(times) > 0
        assert times == sorted(times)
        assert table[0].microseconds is not None  # those that were timed come first
        assert all(each.microseconds is not None or each.reason for each in table)
        assert table.milliseconds is not None and table.milliseconds > 0

    def test_not_measured(self):
        (row,) = explain(conv)(*structs("float32", (5, 28, 28, 64)))
        assert row.spec is not None
        table = plans(row.spec, measure=False, options={"algorithm": "heuristic"})
        assert table.chosen is not None
        spec = replace(row.spec, options=jaxcudnn.Options(algorithm="heuristic"))
        assert table.chosen.name == known("fprop", spec, row.layout).name
        assert table.milliseconds is None


class TestTune:
    def test_a_second_time_measures_nothing(self):
        arguments = structs("bfloat16", (7, 27, 25, 48), (24, 3, 3, 48))
        first = tune(training, *arguments, progress=False)
        assert len(first) == 3
        assert (first.failed, first.left_to_lax) == (0, 0)
        second = tune(training, *arguments, progress=False)
        assert (second.measured, second.skipped) == (0, 3)
        assert [row.plan for row in second] == [row.plan for row in first]
        assert {row.plan for row in explain(training)(*arguments)} == {row.plan for row in first}

    def test_deterministic_plans_are_timed(self):
        arguments = structs("float32", (7, 27, 25, 40), (24, 3, 3, 40))
        with jaxcudnn.options(deterministic=True):
            tuned = tune(training, *arguments, progress=False)
            found = explain(training)(*arguments)
        assert tuned.failed == 0
        assert {row.plan for row in found} == {row.plan for row in tuned}
        for row in found:
            assert row.chosen in TIMED
            assert "nondeterministic" not in row.notes


class TestRates:
    def test_are_plausible(self):
        """Of any GPU that cuDNN 9 supports."""
        assert 1e11 < _roofline.copy_rate() < 2e13
        assert 1e12 < _roofline.matmul_rate("float32", False) < 1e15

    def test_tensor_cores_are_faster(self):
        strict = _roofline.matmul_rate("float32", False)
        tf32 = _roofline.matmul_rate("float32", True)
        half = _roofline.matmul_rate("bfloat16", True)
        assert strict < tf32 < half
