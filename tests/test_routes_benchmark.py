# SPDX-License-Identifier: Apache-2.0
"""The benchmark of routes: what it would measure, without a GPU."""

import importlib
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxcudnn import _options, _routes

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
command, routes, record = map(importlib.import_module, ("command", "routes", "record"))

ROWS = [(name, layer, op) for name in routes.SECONDS for layer in routes.LAYERS[name]
        for op in layer.ops]  # fmt: skip


def run(path, name, **changes):
    record.Record(path, name, fresh=True)
    routes.work(name, Namespace(**{"output": path, "dry_run": True, "quick": True} | changes))
    return record.read(path)["sections"][name]


def test_sections_take_less_than_is_said():
    assert sum(routes.SECONDS.values()) + routes.GRACE <= 150


def test_every_route_is_measured_and_every_pass():
    measured = {(name, op) for _, layer, op in ROWS for name in routes.functions(layer, op)}
    every = {(name, op) for name in _routes.KINDS for op in routes.ALL}
    assert measured >= every - {("blocks", "wgrad")}
    for _, layer, op in ROWS:
        assert len(routes.functions(layer, op)) >= 2, (layer, op)


def test_every_rule_is_taken_somewhere_and_not_everywhere():
    taken = {routes.chosen(layer, op) for _, layer, op in ROWS}
    assert taken == {routes.CUDNN, *_options.ROUTES}


def test_layers_are_what_they_are_called():
    assert str(routes.STEM) == "ResNet: 128x224x224, 3-64, 7x7/2x2 bfloat16"
    assert str(routes.exactly(routes.AUDIO)).endswith("512-512, 4 float32 highest")
    assert routes.STEM.spec.y_shape == (128, 64, 112, 112)
    assert routes.AUDIO.spec.y_shape == routes.AUDIO.spec.x_shape
    assert routes.LARGE.spec.is_depthwise and routes.LARGE.spec.y_shape[2:] == (32, 32)


@pytest.mark.parametrize("name", ["patches", "stems", "narrow", "depthwise"])
def test_dry_run(tmp_path, capsys, name):
    section = run(tmp_path / "routes.json", name)
    assert section["failures"] == [] and "seconds" in section
    layer = routes.LAYERS[name][0]
    assert [(row["layer"], row["op"]) for row in section["rows"]] == [
        (str(layer), op) for op in layer.ops
    ]
    printed = capsys.readouterr().out
    for row in section["rows"]:
        assert set(row["us"]) == {routes.CUDNN, *layer.routes} == set(row["apart"])
        assert max(row["apart"].values()) < 1e-2
        assert f"  {routes.line(row)}\n" in printed


def test_rounding_is_what_is_asked_for():
    layer = replace(routes.LAYERS["patches"][0], batch=1)
    operands = [
        routes.jax.ShapeDtypeStruct(shape, "bfloat16")
        for shape in ((1, 224, 224, 3), (768, 16, 16, 3))
    ]
    dtypes = {}
    for name, function in routes.functions(layer, "fprop").items():
        equations = routes.jax.make_jaxpr(function)(*operands).eqns
        dtypes[name] = [
            eqn.outvars[0].aval.dtype.name for eqn in equations
            if eqn.primitive.name == "dot_general"
        ]  # fmt: skip
    assert dtypes == {routes.CUDNN: [], "matmul": ["float32"], "rounded matmul": ["bfloat16"]}


def test_nothing_is_begun_when_time_is_up(tmp_path, monkeypatch):
    monkeypatch.setitem(routes.SECONDS, "stems", -1)
    section = run(tmp_path / "routes.json", "stems")
    assert section["rows"] == []
    assert section["figures"]["not_begun"] == [f"{routes.STEM} {op}" for op in routes.ALL]


class TestCommand:
    def test_without_a_gpu_earlier_figures_stay(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(command, "has_gpu", lambda: False)
        path = tmp_path / "routes.json"
        path.write_text("{}")
        assert routes.main(["--output", str(path)]) == 1
        assert path.read_text() == "{}"
        assert "JAX finds no GPU here" in capsys.readouterr().err

    def test_sections_have_processes_of_their_own(self, tmp_path, monkeypatch, capsys):
        ran = []

        def start(command, env, timeout):
            ran.append((command[command.index("--worker") + 1], env["JAXCUDNN_STORE"], timeout))
            return SimpleNamespace(returncode=-11)

        monkeypatch.setattr(subprocess, "run", start)
        arguments = ["--output", str(tmp_path / "routes.json"), "--dry-run"]
        assert routes.main([*arguments, "--section", "stems", "--section", "patches"]) == 1
        assert ran == [
            (name, "off", routes.SECONDS[name] + routes.GRACE) for name in ("patches", "stems")
        ]
        assert capsys.readouterr().err.count("status -11") == 2

    def test_worker_measures(self, tmp_path):
        path = tmp_path / "routes.json"
        arguments = ["--output", str(path), "--dry-run", "--quick", "--worker", "stems"]
        assert routes.main(arguments) == 0
        assert record.read(path)["sections"]["stems"]["rows"]
