# SPDX-License-Identifier: Apache-2.0
"""The benchmark of whole networks, as far as a CPU can tell."""

import importlib
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

import jaxcudnn
from jaxcudnn import _routes
from processes import PACKAGE

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))  # scripts, which no package holds
command, jax_models, jax_step, model_report, model_table, models, record, report, step_times = map(
    importlib.import_module,
    "command jax_models jax_step model_report model_table models record report step_times".split(),
)
MODELS = model_table.MODELS


def as_libraries_expect():
    return jax.numpy_dtype_promotion("standard")


@pytest.fixture(autouse=True)
def promotion():
    with as_libraries_expect():
        yield


# The networks


@pytest.mark.parametrize("name", MODELS)
def test_networks_have_the_parameters_and_the_outputs_that_the_table_says(name):
    model = MODELS[name]
    made = jax_step.training(name, model, small=False)
    assert made.parameters == model.parameters
    network = jax_models.NETWORKS[name](**model.arguments(small=False))
    outputs, _ = jax.eval_shape(network.init_with_output, jax.random.key(0), made.batch.inputs)
    assert made.batch.inputs.dtype == outputs.dtype == jnp.bfloat16
    assert outputs.shape == (*made.batch.targets.shape, *[model.classes] * bool(model.classes))
    assert {p.dtype for p in jax.tree.leaves(made.state[:2])} == {jnp.dtype("float32")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "convolutions"),
    [
        ("resnet50", 3 * 53 - 1),
        ("convnext_t", 3 * 22 - 1),
        ("unet3d", 3 * 21 - 1),
        ("hifi_gan", 3 * 78 - 1),
        ("mobilenet_v2", 3 * 52 - 1),
    ],
)
def test_no_convolution_of_a_step_is_left_to_lax_under_install(name, convolutions):
    made = jax_step.training(name, MODELS[name], small=False)
    with jaxcudnn.installed():
        found = jaxcudnn.explain(made.step)(made.state, made.batch)
    assert sum(row.count for row in found) == convolutions
    assert not {row.route for row in found} - {"cuDNN", *_routes.KINDS}
    forward = [row for row in found if not row.backward]
    assert max(max(row.spec.w_shape[2:]) for row in found if row.spec) <= 16  # no image is a window
    assert {row.dtypes[0] for row in forward} == {"bfloat16"}


def as_torch(name: str, value: np.ndarray) -> np.ndarray:
    """A parameter with its dimensions in PyTorch's order."""
    if value.ndim == 1:
        return value
    if "ConvTranspose" in name:  # which PyTorch reverses
        value = np.flip(value, (*range(value.ndim - 2),)).swapaxes(-2, -1)
    return np.moveaxis(value, (-1, -2), (0, 1)).copy()


@pytest.mark.parametrize("name", MODELS)
def test_the_same_network_in_pytorch(name):
    """It has the same outputs with the same numbers, which layers get in the order of their use."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    torch_step = importlib.import_module("torch_step")
    model, rng = MODELS[name], np.random.default_rng(5)
    network = jax_models.NETWORKS[name](**model.arguments(small=True))
    x = rng.standard_normal((model.small.batch, *model.small.inputs), np.float32)
    order: list[tuple[str, ...]] = []

    def init(x):
        variables = network.init(jax.random.key(0), x)
        order.extend(flatten_dict(variables["params"]))  # what is returned is sorted
        return variables

    variables = jax.eval_shape(init, jnp.asarray(x))
    kinds: dict[Any, Any] = {**flatten_dict(variables["params"])}
    drawn = {
        path: rng.standard_normal(kinds[path].shape, np.float32)
        / np.float32(np.sqrt(np.prod(kinds[path].shape[:-1])))
        for path in order
    }
    statistics = jax.tree.map(
        lambda a: np.zeros(a.shape, a.dtype), variables.get("batch_stats", {})
    )
    given = {"params": unflatten_dict(drawn), "batch_stats": statistics}
    apply = jax.jit(partial(network.apply, mutable=["batch_stats"]))
    expected, _ = apply(given, jnp.asarray(x))

    for form in torch_step.FORMS.get(name, ({},)):
        theirs = torch_step.network(name, model, small=True, **form)
        used: list[Any] = []
        for layer in theirs.modules():
            hook = lambda layer, *_, used=used: used.extend(layer.parameters(recurse=False))  # noqa: E731
            if [*layer.children()]:
                layer.register_forward_hook(hook)  # its own come after those of its layers
            else:
                layer.register_forward_pre_hook(hook)
        with torch.no_grad():
            images = torch.from_numpy(np.moveaxis(x, -1, 1).copy())
            theirs(images)
            for parameter, (path, value) in zip([*used], drawn.items(), strict=True):
                value = as_torch("/".join(path), value)
                parameter.copy_(torch.from_numpy(value).reshape(parameter.shape))
            outputs = theirs(images).numpy()
        if len(model.small.targets) > 1:
            outputs = np.moveaxis(outputs, 1, -1)
        np.testing.assert_allclose(outputs, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


# What is recorded


@pytest.fixture(name="results", scope="module")
def dry_run(tmp_path_factory):
    """What a dry run of one network records, without PyTorch."""
    path = tmp_path_factory.mktemp("models") / "models.json"
    for implementation in ("stock", "installed"):
        own = record.Record(path, f"unet3d by {implementation}", fresh=True)
        installed = implementation == "installed"
        with as_libraries_expect():
            models.with_jax("unet3d", own, model_table.QUICK, installed=installed, small=True)
        own.finish()
    return json.loads(path.read_text())


def test_what_is_recorded(results):
    stock, ours = results["sections"].values()
    assert stock["failures"] == ours["failures"] == []
    for figures in (stock["figures"], ours["figures"]):
        parts = sum(figures[f"{part}_s"] for part in ("lower", "compile", "run"))
        assert figures["first_s"] == pytest.approx(parts)
        assert min(figures["walls_ms"]) == figures["wall_ms"] > 0
        assert figures["device_ms"] > 0 and figures["kernels"][0][0] == "dry-run"
        assert np.isfinite(figures["first_loss"]) and figures["last_loss"] < figures["first_loss"]
    assert stock["rows"] == []
    assert ours["figures"]["convolutions"] == sum(row["count"] for row in ours["rows"])
    assert ours["figures"]["left_to_lax"] == 0


def test_report(results):
    text = report.render(results)
    assert text.count("3-D U-Net, 4x96x96x96x4 | JAX ") == 2
    assert "| Training step of the 3-D U-Net under `install` " in text
    assert "ResNet-50" not in text and "Not measured" not in text


def test_report_goes_into_its_document(results, tmp_path):
    path, document = tmp_path / "results.json", tmp_path / "models.md"
    path.write_text(json.dumps(results))
    document.write_text((ROOT / "docs" / "models.md").read_text())
    assert report.main([str(path), "--write", str(document)]) == 0
    assert "| 3-D U-Net, 4x96x96x96x4 | JAX " in document.read_text()


def section(**figures):
    return {"figures": figures, "rows": [], "failures": []}


def test_figures():
    sections = {
        "resnet50 by stock": section(wall_ms=100.0),
        "resnet50 by installed": section(wall_ms=99.0, first_s=12.0),
        "convnext_t by stock": section(),  # as after a crash
        "convnext_t by installed": section(wall_ms=50.0, first_s=16.0),
        "unet3d by installed": section(first_s=3.0),  # as after a hang
        "hifi_gan by installed": section(wall_ms=22.5, first_s=3.0),
        "hifi_gan by torch": section(wall_ms=20.0, first_s=1.0, torch="2.11"),
    }
    table = [
        [cell.strip() for cell in line.split("|")[1:5]]
        for line in report.figures_table(model_report.with_models(sections)).splitlines()[2:]
    ]
    assert table == [
        ["Training step of ResNet-50 under `install`, wall time over JAX's own", "1", "0.99",
         "reached"],
        ["Training step of the HiFi-GAN-like decoder under `install`", "22 ms", "22.5 ms",
         "**missed**"],
        ["First call of a training step under `install`: the longest", "15 s", "16 s",
         "**missed**"],
    ]  # fmt: skip
    text = report.render({"environment": {}, "sections": sections})
    assert "PyTorch is 2.11." in text


def test_convolutions_left_to_lax_are_told():
    row = {"model": "unet3d", "implementation": "installed", "convolutions": 62, "left_to_lax": 2}
    assert "62, 2 left to `lax`" in model_report.cells(row)


# Times


def event(start, duration, name="conv"):
    return step_times.Event(name, start, duration)


def test_what_overlaps_counts_once():
    events = [event(40, 10), event(0, 20), event(5, 5), event(10, 20), event(45, 15)]
    assert step_times.busy_microseconds(events) == pytest.approx((30 + 20) / 1e3)
    assert step_times.busy_microseconds([]) == 0


def test_the_fastest_turn_counts():
    slow = [event(0, 4e6), event(5e6, 1e6, "relu")]
    fast = [event(0, 2e6), event(5e6, 1e6, "relu"), event(7e6, 1e6, "relu")]
    found = step_times.step_figures([slow, fast], steps=2)
    assert found["device_ms"] == pytest.approx(2)
    assert found["kernels"] == [("conv", 0.5, 1000.0), ("relu", 1.0, 1000.0)]


def test_wall_time_waits_once():
    calls = []

    def step():
        calls.append("step")
        return len(calls)

    assert step_times.wall_ms(step, lambda out: calls.append(out), 3) >= 0
    assert calls == ["step"] * 3 + [3]


# The command


def test_choice_of_sections():
    chosen = lambda **given: models.chosen(SimpleNamespace(**given))  # noqa: E731
    everything = chosen(model=None, implementation=None)
    assert len(everything) == 3 * len(MODELS) and everything[:2] == [
        "resnet50 by stock", "resnet50 by installed"
    ]  # fmt: skip
    assert chosen(model=["unet3d"], implementation=["torch.compile", "torch"]) == [
        "unet3d by torch", "unet3d by torch.compile"
    ]  # fmt: skip


def test_command(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)  # with it scripts do not find each other
    path = tmp_path / "models.json"
    options = ["--dry-run", "--model", "unet3d", "--implementation", "installed"]
    assert models.main([*options, "--output", str(path)]) == 0
    (name,) = record.read(path)["sections"]
    assert name == "unet3d by installed"
    assert "| 3-D U-Net, 4x96x96x96x4 | JAX under `install` " in capfd.readouterr().out
    assert list(tmp_path.iterdir()) == [path]


def test_without_pytorch(tmp_path, monkeypatch):
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    own = record.Record(tmp_path / "models.json", "unet3d by torch", fresh=True)
    models.with_torch("unet3d", own, model_table.QUICK, compiled=False, small=True)
    failures = record.read(tmp_path / "models.json")["sections"]["unet3d by torch"]["failures"]
    assert failures == ["unet3d by PyTorch, which is not installed"]


def test_a_section_that_takes_too_long_keeps_what_it_has(tmp_path, monkeypatch):
    path = tmp_path / "models.json"
    environments = []

    def hang(command, env, timeout):
        environments.append(env)
        record.Record(path, "unet3d by stock", fresh=False).figures(first_s=46.0)
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(command, "has_gpu", lambda: True)
    monkeypatch.setattr(subprocess, "run", hang)
    given = ["--model", "unet3d", "--implementation", "stock", "--output", str(path)]
    assert models.main(given) == 1
    found = record.read(path)["sections"]["unet3d by stock"]
    assert found["figures"] == {"first_s": 46.0}
    assert found["failures"] == ["unet3d by stock: its process did not end within 150 s"]
    (environment,) = environments
    assert not Path(environment["JAXCUDNN_STORE"]).parent.exists()  # it was its own
