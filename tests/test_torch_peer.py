# SPDX-License-Identifier: Apache-2.0
"""Transposed convolutions beside PyTorch's, as far as a machine without either tells."""

import importlib.util
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp

import jaxcudnn
from test_reported_figures import arguments, machines, record, reported_figures, watch

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
torch_peer, transposed = map(importlib.import_module, ("torch_peer", "transposed"))


def test_layers_in_every_number_of_dimensions():
    names = [conv.name for conv in transposed.LAYERS]
    assert len({*names}) == len(names)
    assert {len(conv.spatial) for conv in transposed.LAYERS} == {1, 2, 3}
    for conv in transposed.LAYERS:
        layer = transposed.torch_layer(conv, "bfloat16")
        (n, c, *size), (inputs, outputs, *window) = layer["input"], layer["filter"]
        out = [
            (i - 1) * layer["stride"] - 2 * layer["padding"] + r
            for i, r in zip(size, window, strict=True)
        ]
        assert layer["output"] == (n, outputs, *out) and c == inputs
        one = transposed.transposed(conv, "bfloat16")
        ours = jax.eval_shape(
            one.function("fwd", jaxcudnn.conv_general_dilated), one.aval("y"), one.aval("w")
        )
        assert ours.shape == (n, *out, outputs) and ours.dtype == jnp.bfloat16
        assert f"{size[0]} {c}-{outputs}" in conv.name


class FakeTorch:
    """Notes what is computed, and says that each took a microsecond for each call so far."""

    float32 = bfloat16 = __version__ = "2"
    channels_last, channels_last_3d, contiguous_format = "last", "last 3-D", "contiguous"

    def __init__(self):
        self.calls = []
        self.backends = SimpleNamespace(cudnn=SimpleNamespace())
        self.cuda = SimpleNamespace(synchronize=lambda: None)
        self.autograd = SimpleNamespace(DeviceType=SimpleNamespace(CUDA="gpu"))
        self.profiler = SimpleNamespace(
            profile=self.profile, ProfilerActivity=SimpleNamespace(CUDA="cuda")
        )
        self.nn = SimpleNamespace(
            functional=SimpleNamespace(
                conv_transpose1d=lambda x, w, **o: self.calls.append(("1d", x, w, o)),
                conv_transpose2d=lambda x, w, **o: self.calls.append(("2d", x, w, o)),
            )
        )
        backward = lambda *o: self.calls.append(("backward", *o))  # noqa: E731
        self.ops = SimpleNamespace(aten=SimpleNamespace(convolution_backward=backward))

    def ones(self, *_, **__):
        return SimpleNamespace(sum=lambda: None)

    def randn(self, shape, *, device, dtype):
        return SimpleNamespace(to=lambda memory_format: (tuple(shape), memory_format))

    @contextmanager
    def profile(self, activities):
        before = len(self.calls)
        visits = []
        yield SimpleNamespace(events=lambda: visits)
        for number, call in enumerate(self.calls[before:]):
            duration = SimpleNamespace(start=10.0 * number, elapsed_us=lambda call=call: len(call))
            for where in ("gpu", "cpu"):
                visits.append(SimpleNamespace(name=call[0], device_type=where, time_range=duration))


LAYER = {"name": "layer", "dtype": "bfloat16", "stride": 2, "padding": 1, "input": [2, 3, 5],
         "filter": [3, 4, 4], "output": [2, 4, 10]}  # fmt: skip


def test_peer_times_both_forms_of_one_dimension(monkeypatch, capsys):
    fake = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(read=lambda: json.dumps([LAYER])))
    torch_peer.main()
    lines = capsys.readouterr().out.splitlines()
    parsed = transposed.parse(lines, [])
    # Four of what the fake calls an operation's fields, and twelve.
    assert parsed == {
        "version": "2", "us": {"layer": {"fwd": 4.0, "dgrad": 12.0, "wgrad": 12.0}}, "faults": []
    }  # fmt: skip
    assert fake.backends.cudnn.benchmark and fake.backends.cudnn.allow_tf32
    options = {"stride": [2], "padding": [1]}
    assert ("1d", ((2, 3, 5), "contiguous"), ((3, 4, 4), "contiguous"), options) in fake.calls
    thin = {"stride": [1, 2], "padding": [0, 1]}
    assert ("2d", ((2, 3, 1, 5), "last"), ((3, 4, 1, 4), "last"), thin) in fake.calls
    geometry = ([1, 2], [0, 1], [1, 1], True, [0, 0], 1)
    operands = ((2, 4, 1, 10), "last"), ((2, 3, 1, 5), "last"), ((3, 4, 1, 4), "last")
    for mask in ([True, False, False], [False, True, False]):
        assert ("backward", *operands, None, *geometry, mask) in fake.calls


def test_peer_goes_on_after_an_error(monkeypatch, capsys):
    fake = FakeTorch()
    fake.nn.functional.conv_transpose2d = lambda *_, **__: 1 / 0
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(read=lambda: json.dumps([LAYER])))
    torch_peer.main()
    parsed = transposed.parse([*capsys.readouterr().out.splitlines(), '{"cut sho'], [])
    assert parsed["us"] == {"layer": {"fwd": 4.0, "dgrad": 12.0, "wgrad": 12.0}}
    assert parsed["faults"] == ["PyTorch, layer fwd: ZeroDivisionError: division by zero"]


def test_without_pytorch(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = transposed.torch_times([LAYER])
    assert found == {"version": None, "us": {}, "faults": ["PyTorch is not installed"]}


def test_pytorch_that_ends_badly(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    ran = SimpleNamespace(stdout='{"version": "2"}\n', stderr="no GPU", returncode=1)
    monkeypatch.setattr(transposed.subprocess, "run", lambda *_, **__: ran)
    found = transposed.torch_times([LAYER])
    assert found["version"] == "2"
    assert found["faults"] == ["PyTorch's process ended with status 1: no GPU"]

    def hang(command, timeout, **_):
        raise transposed.subprocess.TimeoutExpired(command, timeout, output=b'{"version": "2"}\n{"')

    monkeypatch.setattr(transposed.subprocess, "run", hang)
    found = transposed.torch_times([LAYER])
    assert (found["version"], found["faults"]) == ("2", ["PyTorch took more than 150 s"])


def test_times_over_pytorch(tmp_path, monkeypatch):
    times = {"HiFi-GAN 16/8 32 512-256 float32": {"fwd": 1e9, "wgrad": 2e9}}
    peer = {"version": "2", "us": times, "faults": []}
    monkeypatch.setattr(transposed, "torch_times", lambda layers: peer)
    folder = tmp_path
    own = record.Record(folder / "results.json", "transposed", fresh=True)
    progress = watch.Progress(folder / "progress", {})
    chosen = arguments(entry=["HiFi-GAN 16/8 32 512-256 float32"], dry_run=False)
    reported_figures.transposed(machines.DryRun(), own, progress, chosen)
    rows = {row["pass"]: row for row in own.rows}
    assert rows["wgrad"]["torch_ratio"] == rows["wgrad"]["us"]["jaxcudnn"] / 2e9
    assert "torch_ratio" in rows["fwd"] and "torch_ratio" not in rows["dgrad"]
