# SPDX-License-Identifier: Apache-2.0
"""The benchmark of tuning: everything but the GPU, on a CPU that passes for one."""

import importlib
import json
import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcudnn
from processes import PACKAGE

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))  # scripts, which no package holds
command, machines, record, report, resnet = map(
    importlib.import_module, "command machines record report resnet".split()
)
tuning_figures, tuning_sections = map(
    importlib.import_module, ("tuning_figures", "tuning_sections")
)
FIGURES = [figure for figure in report.FIGURES if figure.section in tuning_figures.TIMEOUTS]


@pytest.fixture(name="results", scope="module")
def dry_run(tmp_path_factory):
    """What a dry run of all sections writes, the first calls but named."""
    path = tmp_path_factory.mktemp("tuning") / "tuning.json"
    machine = machines.DryRun()
    effort = tuning_sections.QUICK._replace(dtypes=("bfloat16", "float32"))
    for name, run in tuning_sections.SECTIONS.items():
        own = record.Record(path, name, fresh=True)
        own.environment(machine.environment())
        run(machine, own, effort)
        own.finish()
    own = record.Record(path, "first_call", fresh=True)
    for seconds, (what, _) in zip((6.0, 3.0, 8.0), tuning_figures.FIRST_CALLS, strict=True):
        own.row(what=what, seconds=seconds, next_ms=10.0)
    return json.loads(path.read_text())


def test_all_sections(results):
    assert set(results["sections"]) == set(tuning_figures.TIMEOUTS)
    assert all(not section["failures"] for section in results["sections"].values())
    rows = results["sections"]["tuning"]["rows"]
    assert [(row["op"], row["dtype"]) for row in rows] == [
        (op, dtype) for dtype in ("bfloat16", "float32") for op in ("fprop", "dgrad", "wgrad")
    ]
    found = results["sections"]["memory"]["figures"]
    assert (found["shapes"], found["kept"], found["executions"]) == (20, 20, 200)
    assert found["peak_mib"] > 10


def test_report(results):
    text = report.render(results)
    for figure in FIGURES:
        assert text.count(f"| {figure.text} ") == 1
    assert "| 0.75 " in text and "| 0.375 " in text  # of the first calls
    assert "20 shapes planned in one process" in text
    assert len(FIGURES) == 6


def test_a_choice_is_compared_with_the_fastest_that_either_race_found():
    def tuning(chosen, **times):
        timings = [SimpleNamespace(name=name, microseconds=us) for name, us in times.items()]
        return SimpleNamespace(plan=SimpleNamespace(name=chosen), timings=timings)

    bounded = tuning("a", a=11.0, b=12.0, c=math.nan)
    everything = tuning("d", a=10.0, c=9.5, d=8.0)
    assert tuning_sections._compared(bounded, everything) == {"us": 10.0, "ratio": 1.25}
    assert tuning_sections._compared(tuning("a", a=8.0), everything)["ratio"] == 1


class TestResNet:
    def test_has_the_convolutions_of_its_paper(self):
        given = jax.eval_shape(resnet.parameters)
        batch, labels = jnp.zeros((1, 224, 224, 3), jnp.bfloat16), jnp.zeros(1, jnp.int32)
        step = partial(resnet.step, jaxcudnn.conv_general_dilated)
        found = jaxcudnn.explain(step)(given, batch, labels)
        assert sum(row.count for row in found) == 158
        filters = [given[name]["filter"].size for name, *_ in resnet.layers()]
        assert len(filters) == 53
        # 25.6 million parameters, less those of normalisation and of the last layer's bias
        assert sum(filters) + given["head"]["matrix"].size == 25_502_912
        logits = jax.eval_shape(partial(resnet.apply, lax.conv_general_dilated), given, batch)
        assert logits.shape == (1, 1000)

    def test_trains(self):
        """Both libraries' convolutions give the same first step, at a size that takes seconds."""
        given = resnet.parameters()
        name = "3.2.window"
        batch, labels = jnp.ones((1, 32, 32, 3), jnp.bfloat16), jnp.zeros(1, jnp.int32)
        steps = [
            jax.eval_shape(partial(resnet.step, library.conv_general_dilated), given, batch, labels)
            for library in (jaxcudnn, lax)
        ]
        assert steps[0] == steps[1] == jax.eval_shape(lambda: given)
        assert steps[0][name]["filter"].shape == (512, 3, 3, 512)


class TestFirstCalls:
    def run(self, tmp_path, monkeypatch, answer):
        asked = []

        def run(command, **rest):
            asked.append(command[-2:])
            return answer

        monkeypatch.setattr(subprocess, "run", run)
        own = record.Record(tmp_path / "results.json", "first_call", fresh=True)
        tuning_figures.first_calls(own, SimpleNamespace(quick=False, dry_run=False))
        return asked, record.read(tmp_path / "results.json")

    def test_are_of_a_process_each(self, tmp_path, monkeypatch):
        printed = {"environment": {"gpu": "H"}, "seconds": 5.0, "next_ms": 9.0}
        answer = SimpleNamespace(returncode=0, stdout=f"noise\n{json.dumps(printed)}\n", stderr="")
        asked, results = self.run(tmp_path, monkeypatch, answer)
        assert asked == [["--first-call", name] for name in ("jaxcudnn", "jaxcudnn", "lax")]
        assert results["environment"] == {"gpu": "H"}
        assert results["sections"]["first_call"]["rows"] == [
            {"what": what, "seconds": 5.0, "next_ms": 9.0} for what, _ in tuning_figures.FIRST_CALLS
        ]

    def test_that_fail_are_noted(self, tmp_path, monkeypatch):
        answer = SimpleNamespace(returncode=1, stdout="", stderr="out of memory")
        _, results = self.run(tmp_path, monkeypatch, answer)
        section = results["sections"]["first_call"]
        assert section["rows"] == []
        assert [text.split(":")[-1].strip() for text in section["failures"]] == [
            "out of memory"
        ] * 3


def test_without_a_gpu_earlier_figures_stay(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "has_gpu", lambda: False)
    path = tmp_path / "results.json"
    path.write_text("{}")
    assert tuning_figures.main(["--output", str(path)]) == 1
    assert path.read_text() == "{}"
    assert "JAX finds no GPU here" in capsys.readouterr().err


def test_command(tmp_path, monkeypatch):
    """The quickest of the sections, in the processes that a user's command starts."""
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)  # with it scripts do not find each other
    path = tmp_path / "results.json"
    arguments = ["--dry-run", "--quick", "--section", "lookups", "--output", str(path)]
    assert tuning_figures.main(arguments) == 0
    assert np.isfinite(record.read(path)["sections"]["lookups"]["figures"]["median_ns"])
