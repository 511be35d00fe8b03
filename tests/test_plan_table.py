# SPDX-License-Identifier: Apache-2.0
"""What `plans` lists for one convolution."""

import math
from dataclasses import replace

import pytest

import jaxcudnn
from aot import shaped
from jaxcudnn import _load
from jaxcudnn._explain import explain
from jaxcudnn._plan_table import plans
from plan_stand_ins import COMPILED, FIRST, TENSOR_CORE, Plan, StandIn, Timing

pytestmark = pytest.mark.usefixtures("measuring")

NHWC = ("NHWC", "OHWI", "NHWC")


def spec_of(dtype="float32", **arguments):
    def conv(x, w):
        return jaxcudnn.conv_general_dilated(
            x, w, (2, 2), "SAME", dimension_numbers=NHWC, **arguments
        )

    (row,) = explain(conv)(shaped((8, 16, 16, 4), dtype), shaped((4, 3, 3, 4), dtype))
    assert row.spec is not None
    return row.spec


@pytest.fixture(name="spec")
def make_spec(monkeypatch):
    monkeypatch.setattr(_load, "local_device", lambda: None)
    return spec_of()


@pytest.fixture(name="gpu")
def with_a_gpu(monkeypatch, spec):
    return StandIn().install(monkeypatch)


def test_measured(gpu, spec):
    table = plans(spec, "wgrad")
    assert [each.name for each in table] == ["eng5_k1=0", "eng2_k3=1", "eng9"]  # fastest first
    assert [each.microseconds for each in table] == [20.0, 31.0, None]
    assert [each.chosen for each in table] == [True, False, False]
    assert [each.workspace for each in table] == [4096, 0, 1 << 20]
    assert [each.reason for each in table] == ["", "", "the budget was spent"]
    assert table[2].notes == ("tensor core", "runtime compilation")
    assert table.chosen is table[0]
    assert (table.op, table.spec, table.milliseconds) == ("wgrad", spec, 64.0)
    assert [attributes["op"] for attributes in gpu.measured] == ["wgrad"]
    assert gpu.measured[0]["stride"] == [2, 2]


def test_not_measured(gpu, spec):
    gpu.candidates = (FIRST, Plan("eng5_k1=0", microseconds=math.nan))
    gpu.plans["fprop"] = gpu.candidates[1]
    table = plans(spec, measure=False)
    assert gpu.measured == []
    assert [each.name for each in table] == [FIRST.name, "eng5_k1=0"]  # cuDNN's order
    assert [each.microseconds for each in table] == [None, None]
    assert table.chosen is table[1]
    assert table.milliseconds is None


def test_nothing_is_chosen_before_measuring(gpu, spec):
    table = plans(spec, measure=False)
    assert len(table) == 3
    assert table.chosen is None


def test_measuring_does_not_choose_for_who_has_chosen(gpu, spec):
    gpu.plans["fprop"] = FIRST
    table = plans(spec, options={"algorithm": "heuristic"})
    assert len(gpu.measured) == 1
    assert [each.microseconds for each in table] == [20.0, 31.0, None]
    assert table.chosen is table[1]


def test_what_could_not_be_built_or_is_not_a_candidate_is_listed_too(gpu, spec):
    gpu.candidates = (Plan(microseconds=math.nan),)
    gpu.timings = (Timing("eng5_k1=0", 20.0), Timing("eng61", math.nan, "wrong by 0.6 %"))
    table = plans(spec)
    assert [(each.name, each.workspace, each.reason) for each in table] == [
        ("eng5_k1=0", 4096, ""), ("eng61", None, "wrong by 0.6 %"),
    ]  # fmt: skip
    gpu.plans["fprop"] = Plan("eng77", source="stored")
    assert [each.name for each in plans(spec, measure=False) if each.chosen] == ["eng77"]


def test_no_plan(gpu, spec):
    gpu.candidates = ()
    table = plans(spec)
    assert (len(table), table.chosen, gpu.measured) == (0, None, [])
    assert str(table) == "0 plans for fprop of 8x4x16x16 * 4x4x3x3 /2 pad 0:1 f32"


def test_options(gpu, spec):
    plans(spec, options={"workspace_limit": 77})
    plans(spec, options=jaxcudnn.Options(deterministic=True))
    plans(replace(spec, options=jaxcudnn.Options(workspace_limit=88)))
    plans(
        replace(spec, options=jaxcudnn.Options(workspace_limit=88)),
        options={"deterministic": True},
    )
    asked = [(each["workspace_limit"], each["deterministic"]) for each in gpu.measured]
    assert asked == [(77, False), (1 << 30, True), (88, False), (88, True)]


def test_text(gpu, spec):
    gpu.candidates = (
        Plan(notes=(TENSOR_CORE,), microseconds=math.nan),
        Plan("eng9_<k>", 3 << 19, (TENSOR_CORE, COMPILED), microseconds=math.nan),
    )
    gpu.timings = (Timing("eng5_k1=0", 123.4), Timing("eng9_<k>", math.nan, "too slow"))
    table = plans(spec)
    assert str(table).splitlines() == [
        "   plan        us  workspace  notes                             not timed because",
        "-  ---------  ---  ---------  --------------------------------  -----------------",
        "*  eng5_k1=0  123      4 KiB  tensor core",
        "   eng9_<k>          1.5 MiB  tensor core, runtime compilation  too slow",
        "2 plans for fprop of 8x4x16x16 * 4x4x3x3 /2 pad 0:1 f32, measured in 64 ms",
    ]
    assert "eng9_&lt;k&gt;" in table._repr_html_()


def test_is_a_sequence(gpu, spec):
    table = plans(spec)
    assert list(table) == [table[0], table[1], table[2]] == list(table[:])
    assert repr(table) == str(table)
    assert table == plans(spec)


class TestRefusals:
    def test_spec(self):
        with pytest.raises(
            TypeError,
            match=r"jaxcudnn\.plans: spec must be a jaxcudnn\.ConvSpec, got \(8, 3\); take it from "
            r"a row, as in jaxcudnn\.explain\(fn\)\(\*args\)\[0\]\.spec",
        ):
            plans((8, 3))  # pyright: ignore[reportArgumentType]

    def test_op(self, spec):
        with pytest.raises(
            ValueError, match=r"op must be one of fprop, dgrad, wgrad, got 'forward'"
        ):
            plans(spec, "forward")

    def test_options(self, spec):
        with pytest.raises(
            TypeError,
            match=r"jaxcudnn\.plans: options must be jaxcudnn\.Options or a dict of some of its "
            r"attributes, got 64; write options=\{'workspace_limit': 1 << 20\}",
        ):
            plans(spec, options=64)  # pyright: ignore[reportArgumentType]
        with pytest.raises(TypeError, match=r"jaxcudnn\.plans: options must be among .*got 'tune'"):
            plans(spec, options={"tune": True})

    def test_what_is_left_to_lax(self, gpu):
        with pytest.raises(
            NotImplementedError,
            match=r"jaxcudnn\.plans: the convolution must be one for which cuDNN is asked, got "
            r"dgrad of 8x4x16x16 \* 4x4x3x3 /2 pad 0:1 i8, which is left to lax because cuDNN "
            r"computes wrong numbers from integers to integers",
        ):
            plans(spec_of("int8"), "dgrad")
        assert gpu.measured == []

    def test_no_gpu(self, spec):
        with pytest.raises(
            RuntimeError, match=r"jaxcudnn\.plans: plans must be listed and measured where JAX has"
        ):
            plans(spec)


def test_gradients_too_large_for_one_call_are_listed_whole(gpu, spec):
    """A spec says nothing of pieces: its own plans are listed."""
    large = replace(spec, x_shape=(1 << 22, *spec.x_shape[1:]))
    plans(large, "dgrad")
    assert gpu.measured[0]["x"] == [1 << 22, 4, 16, 16]
