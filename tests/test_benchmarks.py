# SPDX-License-Identifier: Apache-2.0
"""The benchmarks, as far as a CPU can tell: what they would measure, and what they make of it."""

import importlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcudnn
from jaxcudnn import _routes

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))  # scripts, which no package holds
command, record, report = map(importlib.import_module, "command record report".split())
conv_figures, convolutions, device_time, effort, frontend, fused, machines, sections = map(
    importlib.import_module,
    "conv_figures convolutions device_time effort frontend fused machines sections".split(),
)
ALL = [*convolutions.RESNET50, *convolutions.PLANNED, *(c for c, _ in convolutions.HEADLINES)]


# The convolutions


def test_ten_layers_of_resnet50():
    shapes = [conv.shapes() for conv in convolutions.RESNET50]
    assert len({str(shape) for shape in shapes}) == 10
    assert shapes[0]["y"] == (128, 112, 112, 64)
    assert {shape["y"][1] for shape in shapes[1:]} == {56, 28, 14, 7}
    assert {shape["w"][1] for shape in shapes} == {7, 3, 1}


def test_enough_new_plans():
    specs = {conv.spec("bfloat16") for conv in ALL}
    assert len(specs) == len(ALL)
    assert len(convolutions.PLANNED) * len(convolutions.PASSES) > 45


@pytest.mark.parametrize("op", convolutions.PASSES)
@pytest.mark.parametrize("convolve", [lax.conv_general_dilated, jaxcudnn.conv_general_dilated])
def test_every_pass_computes_the_missing_array(op, convolve):
    for conv in ALL:
        shapes = conv.shapes()
        operands = [
            jax.ShapeDtypeStruct(shapes.pop(role), jnp.bfloat16) for role in convolutions.PASSES[op]
        ]
        out = jax.eval_shape(conv.function(op, convolve, "bfloat16"), *operands)
        assert [out.shape] == list(shapes.values()), conv.name
        assert out.dtype == jnp.bfloat16


def test_chain_keeps_shape():
    shapes = convolutions.SMALL.shapes()
    x, w = (jax.ShapeDtypeStruct(shapes[role], jnp.bfloat16) for role in ("x", "w"))
    step = convolutions.chain(convolutions.SMALL, lax.conv_general_dilated, relu=True)
    assert jax.eval_shape(step, x, [w] * 20).shape == x.shape == (8, 14, 14, 64)


# Device time


def event(name, start, duration):
    return device_time.Event(name, start, duration)


def test_only_streams_of_gpus_count():
    def line(name, *events):
        fields = ("name", "start_ns", "duration_ns")
        visits = [SimpleNamespace(**dict(zip(fields, e, strict=True))) for e in events]
        return SimpleNamespace(name=name, events=visits)

    planes = [
        SimpleNamespace(name="/host:CPU", lines=[line("Stream #1", ("host", 0, 9))]),
        SimpleNamespace(
            name="/device:GPU:0",
            lines=[
                line("Stream #7(Compute)", ("conv", 1, 2)),
                line("XLA Modules", ("jit_f", 1, 2)),
                line("Stream #13(Memset)", ("memset", 3, 1)),
            ],
        ),
    ]
    assert device_time.gpu_events(planes) == [event("conv", 1, 2), event("memset", 3, 1)]


def test_gaps_are_between_the_end_of_all_before_and_the_next_start():
    events = [event("d", 40, 1), event("a", 0, 20), event("b", 1, 2), event("c", 25, 5)]
    groups = device_time.split_at_gaps(events, gap=6)
    assert [[e.name for e in group] for group in groups] == [["a", "b", "c"], ["d"]]
    assert device_time.split_at_gaps([], gap=6) == []


def test_step_time_sums_medians():
    conv = [event("conv", 0, duration) for duration in (4000, 4000, 90_000)]
    memset = [event("memset", 0, 500)] * 6
    step = device_time.step_time([*conv, *memset], steps=3)
    assert step.microseconds == pytest.approx(4 + 2 * 0.5)
    assert Counter({k.name: k.per_step for k in step.kernels}) == {"conv": 1, "memset": 2}


def test_kernels_beside():
    ours = device_time.step_time([event("conv", 0, 1), event("copy", 0, 1)] * 2, steps=2)
    theirs = device_time.step_time([event("conv", 0, 1), event("memset", 0, 1)] * 2, steps=2)
    assert ours.beside(theirs) == ["copy"]
    assert ours.beside(ours) == []


PROGRAMS = {
    "one": device_time.Program(lambda: None, lambda _: None),
    "two": device_time.Program(lambda: None, lambda _: None),
}


def test_turns_are_told_apart_after_a_stall(monkeypatch):
    def trace(stalled):
        turns = [event("one" if i % 2 == 0 else "two", i * 1e7, 1000) for i in range(4)]
        return turns + [event("one", 9e7, 1000)] * stalled

    traces = iter([trace(stalled=True), trace(stalled=False)])
    monkeypatch.setattr(device_time, "traced_events", lambda *_: next(traces))
    times = device_time.device_times(PROGRAMS, rounds=2, steps=1)
    assert {label: [k.name for k in time.kernels] for label, time in times.items()} == {
        "one": ["one"],
        "two": ["two"],
    }


def test_a_real_trace_without_a_gpu_is_refused():
    with pytest.raises(RuntimeError, match="trace of 2 turns has 0 groups of kernels"):
        device_time.device_times(PROGRAMS, rounds=1, steps=1)


# cuDNN's frontend


class FakeTensor(SimpleNamespace):
    """Keeps what it is told, as cudnn's own does."""

    def __getattr__(self, name):
        return lambda value: (setattr(self, name[4:], value), self)[1]


class FakeGraph:
    """Notes the operation, and offers two plans."""

    def tensor(self, **fields):
        return FakeTensor(**fields)

    def __getattr__(self, name):
        def call(*operands, **geometry):
            result = FakeTensor()
            vars(self).update(op=name, operands=operands, geometry=geometry, result=result)
            return result

        return call if name.startswith("conv_") else lambda *_: None

    def get_execution_plan_count(self):
        return 2

    def get_plan_name_at_index(self, index):
        return f"eng{index}"


@pytest.mark.parametrize("op", convolutions.PASSES)
def test_frontend_graph_is_of_the_same_convolution(op):
    cudnn = SimpleNamespace(
        __version__="1.28.0",
        data_type=SimpleNamespace(BFLOAT16="bf16", FLOAT="f32"),
        heur_mode=SimpleNamespace(A=0, FALLBACK=1),
        pygraph=lambda **_: FakeGraph(),
    )
    conv = convolutions.RESNET50[3]
    attributes = sections._lowering._attributes(op, conv.spec("bfloat16"))
    graph, roles = frontend.build_graph(cudnn, attributes)
    assert graph.op == f"conv_{op}"
    assert graph.geometry == {
        "pre_padding": [1, 1],
        "post_padding": [1, 1],
        "stride": [2, 2],
        "dilation": [1, 1],
    }
    assert roles[:2] == convolutions.PASSES[op] and set(roles) == {"x", "w", "y"}
    for role, tensor in zip(roles, (*graph.operands, graph.result), strict=True):
        assert tensor.uid == frontend.UIDS[role]
        assert tuple(tensor.dim) == conv.spec("bfloat16").shape(role)
    assert frontend.plan_index(cudnn, graph, "eng1") == 1
    with pytest.raises(LookupError, match="offers no plan eng7, but eng0, eng1"):
        frontend.plan_index(cudnn, graph, "eng7")


def test_channels_last_strides():
    assert frontend.channels_last_strides([2, 3, 5, 7]) == [105, 1, 21, 3]
    assert frontend.channels_last_strides([2, 3, 4, 5, 7]) == [420, 1, 105, 21, 3]


# The sections, the file and the report


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What a dry run of all sections writes."""
    path = tmp_path_factory.mktemp("benchmarks") / "results.json"
    once = dict.fromkeys(
        ("layers", "host_steps", "chain_layers", "chain_steps", "chain_repeats"), 1
    )
    least = effort.QUICK._replace(**once)
    machine = machines.DryRun()
    for name in conv_figures.TIMEOUTS:
        own = record.Record(path, name, fresh=True)
        own.environment(machine.environment())
        sections.SECTIONS[name](machine, own, least)
        own.finish()
    return json.loads(path.read_text())


def test_dry_run_measures_everything(results):
    assert list(results["sections"]) == list(sections.SECTIONS) == list(conv_figures.TIMEOUTS)
    for section in results["sections"].values():
        assert section["failures"] == [] and "seconds" in section
    rows = results["sections"]["layers"]["rows"]
    assert [(row["op"], row["dtype"]) for row in rows] == [
        (op, dtype) for dtype in ("bfloat16", "float32") for op in ("fprop", "dgrad", "wgrad")
    ]
    assert all(row["bit_equal"] and row["kernels_beside"] == [] for row in rows)
    assert [sorted(row["us"]) for row in rows] == [
        *[["frontend", "jaxcudnn", "lax"]] * 3,
        *[["frontend", "jaxcudnn"]] * 3,
    ]


def test_headlines_go_by_routes_and_layers_by_none(tmp_path, monkeypatch):
    monkeypatch.setattr(_routes, "FEWEST_ELEMENTS", 0)
    machine, once = machines.DryRun(), effort.QUICK._replace(layers=1)
    plans = {}
    for name in ("headline", "layers"):
        own = record.Record(tmp_path / "results.json", name, fresh=True)
        sections.SECTIONS[name](machine, own, once)
        plans[name] = [row["plan"] for row in own.rows]
    assert plans["headline"][0] == "matmul"
    assert "space_to_depth" not in plans["layers"] and len(plans["layers"]) == 6


def test_dry_run_of_fused_layers(results):
    (row,) = results["sections"]["fused"]["rows"]
    us = row["us"]
    assert [*us] == ["conv", "bias", "residual", "lax bias", "lax residual"]
    assert row["ratio"] == us["bias"] / us["conv"]
    assert row["lax_ratios"] == [us[which] / us[f"lax {which}"] for which in ("bias", "residual")]
    assert [*row["calls"]] == ["conv", "bias", "residual"]


def test_fused_layers_are_what_lax_computes():
    conv = convolutions.RESNET50[3].shrunk()
    operands = fused.draw(conv, convolutions.RandomData("bfloat16"))
    alone, bias, residual = (f(*operands) for f in fused.by_jaxcudnn(conv).values())
    by_lax = [f(*operands) for f in fused.by_lax(conv).values()]
    assert alone.shape == bias.shape == operands[3].shape
    for ours, theirs in zip((bias, residual), by_lax, strict=True):  # which rounds more often
        atol = 2**-7 * float(jnp.abs(theirs).max())
        np.testing.assert_allclose(ours.astype("float32"), theirs.astype("float32"), 0, atol)
    assert not jnp.array_equal(bias, residual)


def test_layers_are_fused_where_there_is_no_gpu_to_ask():
    for conv in convolutions.RESNET50:
        shapes = conv.shapes()
        wanted = (shapes["x"], shapes["w"], (conv.k,), shapes["y"])
        operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in wanted]
        for f in fused.by_jaxcudnn(conv).values():
            (row,) = jaxcudnn.explain(f)(*operands)
            is_stem = conv.c == 3
            assert row.route == ("space_to_depth" if is_stem else "cuDNN"), conv.name
            assert not row.unfused or is_stem, conv.name


def test_host_is_of_both_chains(results):
    figures = results["sections"]["host"]["figures"]
    for key in ("", "fused_"):
        share = figures[f"{key}execute_ns"] - figures[f"{key}enqueue_ns"]
        assert figures[f"{key}share_ns"] == share


def test_report_of_everything(results):
    text = report.render(results)
    for figure in report.FIGURES:
        if figure.section not in sections.SECTIONS:
            continue  # another script's
        assert text.count(f"| {figure.text} ") == 1
    assert "none (dry run)" in text and "Not measured" not in text


def layers_row(ratio, beside=(), bit_equal=True):
    return {
        "layer": "3x3",
        "op": "fprop",
        "dtype": "bfloat16",
        "plan": "eng62_k2=0",
        "us": {"jaxcudnn": 10 * ratio, "frontend": 10.0},
        "ratio": ratio,
        "bit_equal": bit_equal,
        "kernels_beside": list(beside),
    }


def section(*rows, failures=(), **figures):
    return {"rows": list(rows), "failures": list(failures), "figures": figures}


def test_report_says_what_is_missed_and_what_is_missing():
    layers = section(layers_row(1.0), layers_row(1.04, ["copy"], False), failures=["1x1: no\nplan"])
    text = report.render({"environment": {"gpu": "H"}, "sections": {"layers": layers}})
    figures = {line.split("  ")[0]: line for line in text.splitlines() if line.startswith("|")}
    ratio = next(line for name, line in figures.items() if "largest ratio" in name)
    assert [cell.strip() for cell in ratio.split("|")][2:5] == ["1.03", "1.04", "**missed**"]
    assert "* 3x3 fprop bfloat16: copy" in text
    assert "same bits in 1 of 2" in text
    assert "* 1x1: no" in text
    assert "share of Execute" not in text


def test_report_claims_nothing_without_a_peer():
    row = {**layers_row(1.0), "ratio": None, "bit_equal": None, "kernels_beside": None}
    row["us"] = {"jaxcudnn": 10.0}
    assert "reached" not in report.render({"environment": {}, "sections": {"layers": section(row)}})


def test_report_goes_between_the_marks(tmp_path, capsys):
    results, document = tmp_path / "results.json", tmp_path / "benchmarks.md"
    data = {"environment": {"gpu": "H200"}, "sections": {"layers": section(layers_row(1.0))}}
    results.write_text(json.dumps(data))
    document.write_text((ROOT / "docs" / "benchmarks.md").read_text())
    head = document.read_text().partition(report.BEGIN)[0]
    for _ in range(2):  # the second replaces the first
        assert report.main([str(results), "--write", str(document)]) == 0
        text = document.read_text()
        assert text.startswith(head) and text.count("Measured on: H200") == 1
    assert "Measured on: H200" in capsys.readouterr().out
    with pytest.raises(ValueError, match="expected <!-- figures: begin -->"):
        report.insert("no marks", "text")


def test_record_keeps_what_came_before_a_crash(tmp_path):
    path = tmp_path / "new" / "results.json"
    own = record.Record(path, "layers", fresh=True)
    own.row(layer="3x3")
    with own.attempt("1x1"):
        raise LookupError("no plan")
    again = record.Record(path, "layers", fresh=False)
    again.failure("ended with status -11")
    assert record.read(path)["sections"]["layers"] == {
        "figures": {},
        "rows": [{"layer": "3x3"}],
        "failures": ["1x1: LookupError: no plan", "ended with status -11"],
    }
    record.Record(path, "layers", fresh=True)
    assert record.read(path)["sections"]["layers"]["rows"] == []


def test_record_drops_what_another_machine_measured(tmp_path):
    path = tmp_path / "results.json"
    record.Record(path, "host", fresh=True).environment({"gpu": "A", "date": "1"})
    record.Record(path, "chain", fresh=True).environment({"gpu": "A", "date": "2"})
    assert list(record.read(path)["sections"]) == ["host", "chain"]
    record.Record(path, "plans", fresh=True).environment({"gpu": "B", "date": "2"})
    assert list(record.read(path)["sections"]) == ["plans"]


@pytest.mark.parametrize("script", ["conv_figures", "reported_figures"])
def test_without_a_gpu_earlier_figures_stay(tmp_path, monkeypatch, capsys, script):
    monkeypatch.setattr(command, "has_gpu", lambda: False)
    path = tmp_path / "results.json"
    path.write_text("{}")
    assert importlib.import_module(script).main(["--output", str(path)]) == 1
    assert path.read_text() == "{}"
    assert "JAX finds no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["crash", "hang"])
def test_a_section_that_ends_badly_does_not_end_the_others(tmp_path, monkeypatch, ending):
    def run(command, timeout, **_):
        if ending == "hang":
            raise subprocess.TimeoutExpired(command, timeout)
        return SimpleNamespace(returncode=-11)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(command, "has_gpu", lambda: True)
    path = tmp_path / "results.json"
    assert (
        conv_figures.main(["--output", str(path), "--section", "host", "--section", "plans"]) == 1
    )
    found = record.read(path)["sections"]
    assert list(found) == ["plans", "host"]
    text = "status -11" if ending == "crash" else "did not end within 90 s"
    assert all(text in section["failures"][0] for section in found.values())
