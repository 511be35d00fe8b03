# SPDX-License-Identifier: Apache-2.0
"""The benchmark of forms: what it would measure, and what it makes of it, without a GPU."""

import importlib
import math
import subprocess
import sys
from argparse import Namespace
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxcudnn import _load

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
command, forms, record = map(importlib.import_module, ("command", "forms", "record"))

DEPTHWISE = forms.depthwise(2, 16, (8, 9), 3, "bfloat16")
DENSE = forms.gradient(2, 16, 24, (8, 9), 3, 2)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(_load, "local_device", lambda: None)


def run(path, name, **changes):
    record.Record(path, name, fresh=True)
    forms.work(name, Namespace(**{"output": path, "dry_run": True, "quick": False} | changes))
    return record.read(path)["sections"][name]


@pytest.mark.parametrize("name", forms.TIMEOUTS)
def test_dry_run_has_the_forms_that_jaxcudnn_chooses(tmp_path, capsys, name):
    section = run(tmp_path / "forms.json", name)
    assert section["failures"] == [] and "seconds" in section
    passes = defaultdict(list)
    for row in section["rows"]:
        passes[row["layer"], row["dtype"], row["op"]].append(row)
    layers = forms.LAYERS[name]
    assert len(passes) == sum(len(layer.dtypes) * len(layer.ops) for layer in layers)
    for rows in passes.values():
        assert len({row["form"] for row in rows}) == len(rows) >= 2
        assert Counter(order for row in rows for order in row["chosen_for"]) == {
            "last": 1, "first": 1,
        }  # fmt: skip
    printed = capsys.readouterr().out
    assert all(f"  {forms.line(row)}\n" in printed for row in section["rows"])


def test_quick_takes_one_of_each(tmp_path):
    rows = run(tmp_path / "forms.json", "few_channels", quick=True)["rows"]
    assert {row["layer"] for row in rows} == {"32x224x224, 3-64, 7x7/2"}


@pytest.mark.parametrize(
    ("layer", "op", "operations", "dtypes"),
    [
        (DEPTHWISE, "fprop", {"fprop"}, {"bfloat16"}),
        (DEPTHWISE, "dgrad", {"dgrad", "fprop"}, {"bfloat16"}),
        (DEPTHWISE, "wgrad", {"wgrad"}, {"bfloat16", "float32"}),
        (DENSE, "dgrad", {"dgrad", "fprop"}, {"bfloat16"}),
        (DENSE, "wgrad", {"wgrad"}, {"bfloat16"}),
        (DENSE._replace(stride=2), "dgrad", {"dgrad"}, {"bfloat16"}),
    ],
)
def test_every_combination(layer, op, operations, dtypes):
    spec = layer.spec("bfloat16")
    found = forms.forms(op, spec)
    combinations = {
        (given["op"], given["dtype"], given["channels_first"]) for given in found.values()
    }
    expected = {(o, d, first) for o in operations for d in dtypes for first in (False, True)}
    assert combinations == expected and len(found) == len(expected)
    for name, given in found.items():
        as_itself = given["op"] == op
        assert name.startswith(op if as_itself else "dgrad as fprop")
        assert ("channels first" in name) is given["channels_first"]
        assert name.endswith(given["dtype"])
        assert tuple(given["x" if as_itself else "y"]) == spec.x_shape
        assert tuple(given["y" if as_itself else "x"]) == spec.y_shape


def test_layers_are_what_they_are_called():
    assert str(DEPTHWISE) == "2x8x9, 16-16, 3x3 g16" and str(DENSE) == "2x8x9, 16-24, 3x3 d2"
    assert DEPTHWISE.spec("float32").is_depthwise and not DENSE.spec("float32").is_depthwise
    for layer in (DEPTHWISE, DENSE):
        assert layer.spec("float32").y_shape[2:] == (8, 9)
    assert DENSE._replace(padding=0).spec("float32").y_shape[2:] == (4, 5)


class TestMeasure:
    def machine(self, *timings, chosen="eng1"):
        timings = [SimpleNamespace(name=n, microseconds=us, reason=r) for n, us, r in timings]
        tuning = SimpleNamespace(timings=timings, plan=SimpleNamespace(name=chosen))
        return SimpleNamespace(candidates=lambda _: timings, tune=lambda _: tuning)

    def test_time_of_the_chosen_plan(self):
        timings = [("eng0", 5.0, ""), ("eng1", 3.0, ""), ("eng2", math.nan, "the budget was spent")]
        found = forms.measure(self.machine(*timings), {})
        assert found["build_ms"] >= 0 and found["tune_ms"] >= 0
        del found["build_ms"], found["tune_ms"]
        assert found == {"plan": "eng1", "us": 3.0, "candidates": 3, "timed": 2}

    def test_without_a_plan(self):
        assert forms.measure(self.machine(), {}) == {"plan": None}
        row = {"form": "wgrad, channels last, float32", "chosen_for": [], "plan": None}
        assert forms.line(row) == "wgrad, channels last, float32: no plan"

    def test_without_a_time(self):
        with pytest.raises(RuntimeError, match="no plan could be timed: memory is short"):
            forms.measure(self.machine(("eng1", math.nan, "memory is short")), {})


def test_line():
    row = {"form": "fprop", "chosen_for": ["last", "first"], "plan": "eng5", "us": 12.34}
    row |= {"candidates": 9, "timed": 7, "build_ms": 8.4, "tune_ms": 60.2}
    assert forms.line(row) == (
        "fprop: 12.3 us by eng5, 7 of 9 timed, built in 8 ms, timed in 60 ms; "
        "chosen where channels are last and first"
    )


class TestCommand:
    def test_without_a_gpu_earlier_figures_stay(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(command, "has_gpu", lambda: False)
        path = tmp_path / "forms.json"
        path.write_text("{}")
        assert forms.main(["--output", str(path)]) == 1
        assert path.read_text() == "{}"
        assert "JAX finds no GPU here" in capsys.readouterr().err

    @pytest.mark.parametrize("ending", ["well", "crash", "hang"])
    def test_sections_have_processes_of_their_own(self, tmp_path, monkeypatch, capsys, ending):
        ran = []

        def run(command, env, timeout):
            ran.append((command[command.index("--worker") + 1], env["JAXCUDNN_STORE"], timeout))
            if ending == "hang":
                raise subprocess.TimeoutExpired(command, timeout)
            return SimpleNamespace(returncode=-11 if ending == "crash" else 0)

        monkeypatch.setattr(subprocess, "run", run)
        arguments = ["--output", str(tmp_path / "forms.json"), "--dry-run"]
        status = forms.main([*arguments, "--section", "few_channels", "--section", "depthwise"])
        assert status == (ending != "well")
        assert ran == [
            (name, "off", forms.TIMEOUTS[name]) for name in ("depthwise", "few_channels")
        ]
        said = capsys.readouterr().err
        assert said.count("not measured: ") == (0 if ending == "well" else 2)
        assert ("status -11" in said, "did not end within 150 s" in said) == (
            ending == "crash",
            ending == "hang",
        )

    def test_worker_measures(self, tmp_path):
        path = tmp_path / "forms.json"
        assert forms.main(["--output", str(path), "--dry-run", "--worker", "large_windows"]) == 0
        assert record.read(path)["sections"]["large_windows"]["rows"]
