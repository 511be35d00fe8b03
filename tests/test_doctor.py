# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxcudnn doctor` as a whole: the command, the self-test, and what is put together."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxcudnn
from installations import CPU_VERSIONS, FOUND, H200, VERSIONS, WHEEL
from jaxcudnn import __main__, _command_doctor, _doctor, _doctor_facts, _load, _self_test
from jaxcudnn._doctor_facts import Cudnn, Gpus
from jaxcudnn._doctor_finding import Fault, Finding
from processes import run_python


class TestCommand:
    def test_says_what_is_found_and_no_fault(self):
        lines = run_python(
            "from jaxcudnn.__main__ import main; raise SystemExit(main(['doctor']))",
            JAX_PLATFORMS="cpu",
            JAXCUDNN_STORE="off",
            LD_LIBRARY_PATH="",
        )
        assert lines[-2:] == ["", "No fault was found."]
        found = [line.split(": ", 1) for line in lines[:-2]]
        names = [name for name, _ in found]
        assert names[:4] == ["Python", "jaxcudnn", "jax", "jaxlib"]
        assert len({len(name) + len(text) - len(text.lstrip()) for name, text in found}) == 1
        texts = {name: text.strip() for name, text in found}
        assert texts["GPU"] == "not looked for, since JAX's platforms are cpu"
        assert texts["JAX_PLATFORMS"] == "cpu"
        assert texts["self-test"] == "passed: forward and both gradients, by XLA on the CPU"
        assert {"extension", "cuDNN", "libcublasLt", "libcudart", "libnvrtc", "option"} <= {*names}
        assert names[-1] == "self-test"

    def test_faults_give_the_status_and_are_sorted_by_remedy(self, monkeypatch, capsys):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
        findings = [
            Finding("a", "1", (Fault("it is one", "make it two"),)),
            Finding("long name", "2", (Fault("it is two", "restart"), Fault("odd", "make it two"))),
        ]
        monkeypatch.setattr(_doctor, "examine", lambda: findings)
        assert __main__.main(["doctor"]) == 1
        assert capsys.readouterr().out.splitlines() == [
            "a:         1",
            "long name: 2",
            "",
            "FAULT   a: it is one",
            "FAULT   long name: odd",
            "REMEDY  make it two",
            "",
            "FAULT   long name: it is two",
            "REMEDY  restart",
        ]
        assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"  # as the user has it

    def test_leaves_the_memory_of_the_gpu_to_others(self, monkeypatch, capsys):
        monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
        seen = []

        def examine():
            seen.append(os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"])
            return [Finding("a", "1")]

        monkeypatch.setattr(_doctor, "examine", examine)
        assert __main__.main(["doctor"]) == 0
        assert seen == ["false"]
        assert capsys.readouterr().out == "a: 1\n\nNo fault was found.\n"

    def test_in_a_clone_without_its_extension(self, tmp_path):
        package = Path(jaxcudnn.__file__).parent
        clone = shutil.copytree(
            package, tmp_path / "jaxcudnn", ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
        ran = subprocess.run(
            [sys.executable, "-m", "jaxcudnn", "doctor"],
            cwd=tmp_path,
            env=os.environ
            | {"JAX_PLATFORMS": "cpu", "JAXCUDNN_STORE": "off", "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ran.returncode == 1, ran.stderr
        lines = ran.stdout.splitlines()
        (fault,) = [line for line in lines if line.startswith("FAULT ")]
        assert fault.startswith(
            f"FAULT   extension: the extension jaxcudnn._native did not load from {clone} ("
        )
        assert lines[lines.index(fault) + 1] == (
            "REMEDY  run `pip install .` in a clone of jaxcudnn, and start Python in another "
            "folder, since a clone's own has no extension"
        )
        assert any(line.startswith("self-test:") and "passed" in line for line in lines)

    def test_unknown_and_missing_commands(self, capsys):
        for argv in (["nurse"], []):
            with pytest.raises(SystemExit, match="2"):
                __main__.main(argv)
        assert "invalid choice: 'nurse'" in capsys.readouterr().err


class TestSelfTest:
    def test_passes(self):
        assert _self_test.wrong() == []

    def test_sees_each_wrong_number(self, monkeypatch):
        right = _self_test._step

        def step(x, w, dy):
            y, dx, dw = right(x, w, dy)
            return y.at[0, 1, 2, 3].add(1), dx + 1, dw

        monkeypatch.setattr(_self_test, "_step", step)
        assert _self_test.wrong() == [
            "1 of 1120 numbers of y are wrong",
            "1152 of 1152 numbers of dx are wrong",
        ]

    def test_is_three_calls_of_cudnn_on_a_gpu(self, monkeypatch):
        monkeypatch.setattr(_load, "local_device", lambda: None)
        traced = jax.jit(_self_test._step).trace(*_self_test._operands())
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count(_load.TARGET) == 3
        said = _self_test.wrong(jax.devices("cpu")[0])  # which is no GPU
        assert said == ["cuDNN computes 0 of the 3 convolutions"]

    def test_sums_are_exact(self):
        """Of numbers that TF32 holds, and smaller than float32 counts."""
        x, w, dy = (np.abs(array) for array in _self_test._operands())
        assert max(array.max() for array in _self_test._define(x, w, dy)) < 2**11

    def test_is_judged(self):
        check = _doctor.check_self_test
        found = "passed: forward and both gradients, by cuDNN"
        assert check(lambda: [], [H200]) == Finding("self-test", found)
        remedy = "remedy the faults above first; if there is none, please report this output"
        expected = (Fault("y is wrong", remedy), Fault("dx is wrong", remedy))
        finding = check(lambda: ["y is wrong", "dx is wrong"], [])
        assert finding == Finding("self-test", "failed, by XLA on the CPU", expected)

        def fail():
            raise RuntimeError("INTERNAL: it broke\nat length")

        assert check(fail, [H200]).faults == (Fault("INTERNAL: it broke", remedy),)


class TestKnownFaults:
    def test_are_those_of_the_gpu_and_the_libraries(self):
        rows = _load.native().known_faults(sm=86, cudnn=92301, cublaslt=130601)
        (row,) = [row for row in rows if row.sm != "any"]
        assert (row.op, row.engine, row.sm, row.cudnn) == (
            "fprop", "eng5", "86", ">= 9.23.1, < 9.24.0",
        )  # fmt: skip
        assert (row.cublaslt, row.dtypes, row.condition) == ("any", "any", "any")
        assert row.fault == "not deterministic"
        assert str(row) == (
            "eng5, fprop, sm 86, cuDNN >= 9.23.1, < 9.24.0: not deterministic "
            "(https://github.com/pytorch/pytorch/pull/189207)"
        )
        rows = _load.native().known_faults(sm=86, cudnn=92400, cublaslt=130601)
        assert all(row.sm == "any" for row in rows)

    def test_are_listed_where_cudnn_is(self, monkeypatch):
        """And the libraries' versions are those in the process."""
        asked = {}

        def known_faults(**versions):
            asked.update(versions)
            return ["a row"]

        native = SimpleNamespace(
            __file__="/a", ffi_api_version=lambda: (0, 3), known_faults=known_faults
        )
        monkeypatch.setattr(_load, "native", lambda: native)
        monkeypatch.setattr(_doctor_facts, "library", lambda names, before: WHEEL)
        monkeypatch.setattr(_doctor_facts, "cublaslt_version", lambda library: 130601)
        for cudnn, rows in ((FOUND, [Finding("not used", "a row")]), (Cudnn(None), [])):
            monkeypatch.setattr(_doctor_facts, "cudnn", lambda *_, cudnn=cudnn: cudnn)
            findings = _doctor.examine()
            assert [f for f in findings if f.what == "not used"] == rows
        assert asked["cudnn"] == 91900
        assert asked["cublaslt"] == 130601


@pytest.mark.parametrize(
    ("devices", "versions", "wants", "wanted"),
    [
        ((), VERSIONS, True, True),
        ((), VERSIONS, False, False),
        ((), CPU_VERSIONS, True, False),
        ((H200,), CPU_VERSIONS, False, True),
    ],
)
def test_what_is_missing_is_a_fault_where_cuda_is_wanted(
    monkeypatch, devices, versions, wants, wanted
):
    monkeypatch.setattr(_doctor_facts, "start_jax", lambda: Gpus(devices))
    monkeypatch.setattr(_doctor_facts, "versions", lambda: versions)
    monkeypatch.setattr(_doctor_facts, "wants_cuda", lambda platforms: wants)
    monkeypatch.setattr(_doctor_facts, "cudnn", lambda *_: Cudnn(None, error="no cuDNN"))
    monkeypatch.setattr(_doctor_facts, "library", lambda names, before: None)
    monkeypatch.setattr(_self_test, "wrong", lambda *_: [])
    faulty = {finding.what for finding in _doctor.examine() if finding.faults}
    names = {"cuDNN", "libcublasLt", "libcudart", "libnvrtc"}
    assert faulty & names == (names if wanted else set())


def test_the_store_is_the_packages(monkeypatch, tmp_path):
    info = SimpleNamespace(entries=1, bytes=2)
    store = SimpleNamespace(path=lambda: tmp_path, info=lambda: info)
    monkeypatch.setitem(sys.modules, "jaxcudnn.store", store)
    monkeypatch.setattr(_doctor, "check_self_test", lambda *_: Finding("self-test", ""))
    expected = Finding("store", f"{tmp_path}, 1 choices in 2 bytes")
    assert expected in _doctor.examine()


@pytest.mark.gpu
def test_no_fault_on_a_gpu(tmp_path):
    path = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    clean = [folder for folder in path if not Path(folder or ".", "libcudnn.so.9").exists()]
    lines = run_python(
        "from jaxcudnn.__main__ import main; print(main(['doctor']))",
        LD_LIBRARY_PATH=os.pathsep.join(clean),
        JAXCUDNN_STORE=str(tmp_path / "choices"),
    )
    assert lines[-2:] == ["No fault was found.", "0"], "\n".join(lines)
    found = dict(line.split(": ", 1) for line in lines[:-3])
    assert found["self-test"].strip() == "passed: forward and both gradients, by cuDNN"
    assert "compute capability" in found["GPU 0"]
    assert "GiB" in found["GPU 0"]
    assert any(line.startswith("not used:") and "eng20, wgrad" in line for line in lines)


def test_report_is_aligned_by_the_longest_name():
    report = _command_doctor.report([Finding("a", "1"), Finding("four", "2")])
    assert report.splitlines()[:2] == ["a:    1", "four: 2"]
