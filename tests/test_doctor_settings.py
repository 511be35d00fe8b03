# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of variables, options and the store, told by stand-ins."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from installations import faults
from jaxcudnn import _doctor_settings, _options
from jaxcudnn._doctor_finding import Fault, Finding


class TestVariables:
    def check(self, **environ):
        return _doctor_settings.check_variables(environ)

    @pytest.mark.parametrize(
        ("name", "near"),
        [
            ("JAXCUDNN_ALGORITM", "JAXCUDNN_ALGORITHM"),
            ("JAXCUDNN_ALLOW_TF_32", "JAXCUDNN_ALLOW_TF32"),
            ("JAXCUDNN_STORAGE", "JAXCUDNN_STORE"),
        ],
    )
    def test_nearly_right(self, name, near):
        fault = Fault("jaxcudnn reads no variable of this name", f"write {near}")
        assert self.check(**{name: "1", near: "2"}) == [Finding(name, "1", (fault,))]

    def test_unlike_any(self):
        (fault,) = faults(*self.check(JAXCUDNN_Q="1"))
        assert fault.remedy.startswith("unset it; there are JAXCUDNN_ALGORITHM, JAXCUDNN_WORK")
        assert "JAXCUDNN_STORE" in fault.remedy

    def test_every_one_that_is_read_is_known(self):
        read = {f"JAXCUDNN_{name.upper()}" for name in _options.Options.__dataclass_fields__}
        for path in Path(__file__).parent.glob("*.py"):
            read |= {*re.findall(r'environ(?:\.get\(|\[)"(JAXCUDNN_\w+)"', path.read_text())}
        assert "JAXCUDNN_REQUIRE_GPU" in read
        assert faults(*self.check(**dict.fromkeys(read, "1"))) == []

    def test_of_others(self):
        environ = {
            "PATH": "/bin",
            "NVIDIA_TF32_OVERRIDE": "0",
            "CUDA_VISIBLE_DEVICES": "1",
            "XLA_FLAGS": "--xla_dump_to=/x --xla_gpu_deterministic_ops=true --xla_gpu_graph_x=1",
        }
        assert self.check(**environ) == [
            Finding("CUDA_VISIBLE_DEVICES", "1"),
            Finding("NVIDIA_TF32_OVERRIDE", "0"),
            Finding("XLA_FLAGS", "--xla_gpu_deterministic_ops=true --xla_gpu_graph_x=1"),
        ]
        assert self.check(XLA_FLAGS="--xla_dump_to=/x") == []


class TestOptions:
    def check(self, options=None, **environ):
        options = options or _options.Options()
        return _doctor_settings.check_options(lambda: options, environ)

    def test_where_they_come_from(self):
        options = _options.Options(algorithm="heuristic")
        found = [f.found for f in self.check(options, JAXCUDNN_ALGORITHM="heuristic")]
        assert found[0] == "algorithm = 'heuristic', by JAXCUDNN_ALGORITHM"
        assert found[1] == "workspace_limit = None, the default"
        assert len(found) == len(_options.Options.__dataclass_fields__)

    def test_that_xla_turns_on(self, monkeypatch):
        assert "deterministic = False, the default" in [f.found for f in self.check()]
        monkeypatch.setattr(_doctor_settings, "xla_is_deterministic", lambda: True)
        found = [f.found for f in self.check()]
        assert "deterministic = False, the default, but XLA_FLAGS turns it on" in found
        assert sum("XLA_FLAGS" in text for text in found) == 1

    def test_that_cannot_be_read(self, monkeypatch):
        monkeypatch.delenv("JAXCUDNN_ALGORITHM")
        monkeypatch.setenv("JAXCUDNN_VERIFY", "maybe")
        read = _options.from_environment.__wrapped__
        (finding,) = _doctor_settings.check_options(read, os.environ)
        assert finding.found == "JAXCUDNN_VERIFY=maybe"
        (fault,) = finding.faults
        assert "JAXCUDNN_VERIFY must be 1 or 0, got 'maybe'" in fault.text
        assert fault.remedy == "correct the variable, or unset it"


class TestStore:
    REMEDY = "set JAXCUDNN_STORE to a file that can be read and written, or to 'off'"

    def check(self, path, info=lambda: SimpleNamespace(entries=3, bytes=8192)):
        return _doctor_settings.check_store(lambda: path, info)

    def test_is_shown(self, tmp_path):
        path = tmp_path / "not yet there" / "choices"
        assert self.check(path) == Finding("store", f"{path}, 3 choices in 8192 bytes")
        assert self.check(None) == Finding("store", "off, by JAXCUDNN_STORE")

    def test_that_cannot_be_read(self, tmp_path):
        def info():
            raise OSError("no access")

        path = tmp_path / "choices"
        fault = Fault("no access", self.REMEDY)
        assert self.check(path, info) == Finding("store", str(path), (fault,))

    def test_that_cannot_be_written(self, tmp_path, monkeypatch):
        asked = []
        monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)))
        text = f"{tmp_path} cannot be written, so that every process measures anew"
        assert self.check(tmp_path / "a" / "b").faults == (Fault(text, self.REMEDY),)
        assert asked == [(tmp_path, os.W_OK)]
