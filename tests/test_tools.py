# SPDX-License-Identifier: Apache-2.0
"""The tools beside the package: tree hash, GPU report and its check, JAX's tests, stubs."""

import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import check_gpu_report
import check_stub
import gpu_report
import junit_counts
import make_libcuda_stub
import readme_command
import run_lax_matrix
from lax_matrix import GRADIENTS, VALUES, VMAP
from tree_hash import tree_files, tree_sha256

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import pytest

def test_plain(record_property):
    record_property("counts", "3 run")

@pytest.mark.gpu
def test_first():
    pass

@pytest.mark.gpu
def test_second():
    {second}
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def run_pytest(root: Path, second: str, *options: str, **environment: str):
    """Pytest in a small project at `root` with this suite's own conftest.py, in its own process."""
    write(root, {"jaxcudnn/__init__.py": "", "installed/jaxcudnn/__init__.py": ""})
    write(root, {"pytest.ini": "[pytest]\nmarkers = gpu\ntestpaths = tests\n"})
    write(root, {"csrc/a.cc": "int a;", "tests/test_it.py": TESTS.format(second=second)})
    write(root, {"tests/conftest.py": (ROOT / "tests" / "conftest.py").read_text()})
    inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    path = os.pathsep.join(map(str, [root / "installed", ROOT / "tests", ROOT / "tools"]))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", *options],
        cwd=root,
        env={**inherited, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
    )


# The tree's hash


def test_tree_hash_is_that_of_sha256sum(tmp_path):
    write(tmp_path, {"csrc/b.cc": "b", "jaxcudnn/a.py": "a", "tests/data/c.json": "{}"})
    listing = subprocess.run(
        ["sha256sum", "csrc/b.cc", "jaxcudnn/a.py", "tests/data/c.json"],
        cwd=tmp_path,
        capture_output=True,
        check=True,
    ).stdout
    total = subprocess.run(["sha256sum"], input=listing, capture_output=True, check=True).stdout
    assert tree_sha256(tmp_path) == total.split()[0].decode()


def test_tree_hash_leaves_out_what_building_and_running_leave_behind(tmp_path):
    write(tmp_path, {"csrc/a.cc": "a", "README.md": "read"})
    before = tree_sha256(tmp_path)
    leftovers = ["jaxcudnn/__pycache__/a.pyc", "jaxcudnn/_native.abi3.so", "csrc/build/a.o"]
    write(tmp_path, dict.fromkeys([*leftovers, "tests/.hypothesis/x", "README.md"], "other"))
    assert tree_files(tmp_path) == ["csrc/a.cc"]
    assert tree_sha256(tmp_path) == before


@pytest.mark.parametrize(
    "files",
    [
        {"csrc/a.cc": "changed"},
        {"csrc/a.cc": "a", "csrc/b.cc": ""},
        {"csrc/sub/a.cc": "a"},
        {"tests/a.cc": "a"},
    ],
)
def test_tree_hash_sees_each_change(tmp_path, files):
    one, other = write(tmp_path / "1", {"csrc/a.cc": "a"}), write(tmp_path / "2", files)
    assert tree_sha256(one) != tree_sha256(other)


# The GPU report: written by the plugin, judged by the tool


def good_report(root: Path) -> dict:
    return {
        "passed": 3,
        "failed": 0,
        "skipped": 0,
        "complete": True,
        "gpu": "NVIDIA H200",
        "driver": "580.1",
        "cudnn": "9.19.0",
        "jax": "0.11.2",
        "python": "3.12.1",
        "tree_sha256": tree_sha256(root),
    }


def judge(root: Path, text: str, capsys) -> tuple[int, str]:
    write(root, {"reports/gpu.json": text})
    status = check_gpu_report.main(["--root", str(root)])
    return status, capsys.readouterr().out.splitlines()[-1]


def test_good_report(tmp_path, capsys):
    write(tmp_path, {"csrc/a.cc": "a"})
    status, line = judge(tmp_path, json.dumps(good_report(tmp_path)), capsys)
    assert status == 0
    assert "of the present tree, 3 passed, 0 failed, 0 skipped on NVIDIA H200" in line


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tree_sha256": "0" * 64}, "of another tree (report 000000000000, present "),
        ({"failed": 2}, "2 failed"),
        ({"skipped": 1}, "1 skipped"),
        ({"passed": 0}, "no test passed"),
        ({"gpu": None}, "without a GPU"),
        ({"complete": False}, "of a part of the GPU tests"),
    ],
)
def test_bad_report(tmp_path, capsys, change, said):
    write(tmp_path, {"csrc/a.cc": "a"})
    status, line = judge(tmp_path, json.dumps({**good_report(tmp_path), **change}), capsys)
    assert status == 1
    assert said in line
    assert "pytest -m gpu --gpu-report reports/gpu.json" in line


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"passed": 1'])
def test_report_that_is_none(tmp_path, capsys, text):
    status, line = judge(tmp_path, text, capsys)
    assert status == 1
    assert "not a GPU report" in line


@pytest.mark.parametrize(("failed", "status"), [(0, 0), (1, 1)])
def test_report_of_another_tree_may_be_accepted(tmp_path, capsys, failed, status):
    report = good_report(tmp_path) | {"tree_sha256": "0" * 64, "failed": failed}
    write(tmp_path, {"reports/gpu.json": json.dumps(report)})
    assert check_gpu_report.main(["--root", str(tmp_path), "--other-tree"]) == status
    said = capsys.readouterr().out
    assert ("of ANOTHER tree, " in said) == (status == 0)
    assert ("1 failed" in said) == (status == 1)


def test_missing_report(tmp_path, capsys):
    assert check_gpu_report.main(["--root", str(tmp_path)]) == 1
    assert "no GPU report (No such file or directory)" in capsys.readouterr().out


def test_report_is_written_and_gpu_tests_are_skipped_with_the_reason(tmp_path):
    result = run_pytest(tmp_path, "pass", "-m", "gpu", "--gpu-report", "reports/gpu.json")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "JAX_PLATFORMS=cpu" in result.stdout
    report = json.loads((tmp_path / "reports" / "gpu.json").read_text())
    assert (report["passed"], report["failed"], report["skipped"]) == (0, 0, 2)
    assert report["complete"] is True
    assert report["gpu"] is None
    assert report["tree_sha256"] == tree_sha256(tmp_path)
    assert set(report["durations"]) == {f"tests/test_it.py::test_{n}" for n in ("first", "second")}
    assert report["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")


def test_report_of_tests_in_several_processes(tmp_path):
    options = ["-n", "2", "-m", "gpu", "--gpu-report", "gpu.json"]
    result = run_pytest(tmp_path, "pass", *options, JAX_PLATFORMS="tpu")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "JAX_PLATFORMS=tpu" in result.stdout  # and not what the first process chose instead
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert (report["passed"], report["failed"], report["skipped"]) == (0, 0, 2)
    assert report["complete"] is True


def test_required_gpu_turns_each_skip_into_a_failure(tmp_path):
    options = ["--gpu-report", "gpu.json"]
    result = run_pytest(tmp_path, "pytest.skip('odd')", *options, JAXCUDNN_REQUIRE_GPU="1")
    assert result.returncode == 1
    assert "JAXCUDNN_REQUIRE_GPU=1, but Skipped: JAX_PLATFORMS=cpu" in result.stdout
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert (report["passed"], report["failed"], report["skipped"]) == (1, 2, 0)
    assert report["counts"] == {"tests/test_it.py::test_plain": "3 run"}


@pytest.mark.parametrize(
    "options", [["-k", "first"], ["tests/test_it.py"], ["tests/test_it.py::test_first"]]
)
def test_report_of_a_part_says_so(tmp_path, options):
    result = run_pytest(tmp_path, "pass", "--gpu-report", "gpu.json", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads((tmp_path / "gpu.json").read_text())["complete"] is False


def test_report_is_refused_for_a_package_that_is_not_the_trees(tmp_path):
    write(tmp_path, {"jaxcudnn/_new.py": ""})
    result = run_pytest(tmp_path, "pass", "--gpu-report", "gpu.json")
    assert result.returncode == 4
    assert f"the installed jaxcudnn is not that of {tmp_path} (_new.py differ)" in result.stderr
    assert not (tmp_path / "gpu.json").exists()


@pytest.mark.parametrize(
    ("version", "text"), [(91900, "9.19.0"), (92801, "9.28.1"), ("9.1", "9.1")]
)
def test_cudnn_version(version, text):
    assert gpu_report.cudnn_version(version) == text


# The README's commands


def test_readme_command():
    text = "# t\n<!-- ci: test -->\n```sh\npip install .\npytest\n```\n```sh\nother\n```\n"
    assert readme_command.command(text, "test") == "pip install .\npytest\n"


@pytest.mark.parametrize("text", ["", "<!-- ci: test -->\ntext\n```sh\nls\n```\n"])
def test_readme_command_that_is_not_there(text):
    with pytest.raises(ValueError, match=r"one fenced block after '<!-- ci: test -->'.*got 0"):
        readme_command.command(text, "test")


# Counting what pytest ran

JUNIT = """<testsuites><testsuite>
<testcase classname="t" name="a"/>
<testcase classname="t" name="b"><failure message="no"/></testcase>
<testcase classname="t" name="c"><error message="no"/></testcase>
<testcase classname="t" name="d"><skipped message="no NVIDIA GPU on this machine"/></testcase>
<testcase classname="t" name="e"><skipped message="no cuDNN"/></testcase>
</testsuite></testsuites>"""


def test_counts_of_a_junit_file(tmp_path, capsys):
    file = write(tmp_path, {"junit.xml": JUNIT}) / "junit.xml"
    assert junit_counts.main([str(file)]) == 1
    assert capsys.readouterr().out == "t::b\nt::c\n1 passed, 2 failed, 2 skipped\n"
    assert junit_counts.main([str(file), str(file), "--skips-allowed", "NVIDIA GPU"]) == 1
    assert capsys.readouterr().out.endswith(
        "t::e: skipped: no cuDNN\n2 passed, 6 failed, 2 skipped\n"
    )


# The stand-in for the driver library

HEADER = """
/* cuComment(void) is none */
#define cuMemAlloc cuMemAlloc_v2
CUresult CUDAAPI cuInit(unsigned int Flags);
CUresult CUDAAPI cuDriverGetVersion(int *driverVersion);
CUresult CUDAAPI cuMemAlloc(CUdeviceptr *dptr, size_t bytesize); // cuOther
CUresult CUDAAPI
cuMulticastCreate(void);
"""


def test_driver_functions_are_found():
    names = ["cuDriverGetVersion", "cuInit", "cuMemAlloc", "cuMemAlloc_v2", "cuMulticastCreate"]
    assert make_libcuda_stub.functions(HEADER) == names


def test_stand_in_driver_says_what_planning_needs(tmp_path):
    header = write(tmp_path, {"cuda.h": HEADER}) / "cuda.h"
    driver = ctypes.CDLL(str(make_libcuda_stub.build(tmp_path, header)))
    version = ctypes.c_int()
    assert driver.cuDriverGetVersion(ctypes.byref(version)) == 0
    assert version.value == 13000
    assert driver.cuInit(0) == 0
    assert driver.cuMemAlloc_v2(None, 1) == 100


# The extension's stub


@pytest.mark.skipif(importlib.util.find_spec("nanobind") is None, reason="nanobind not installed")
def test_stub_is_generated():
    text = check_stub.generate("jaxcudnn._native")
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert "def registrations(" in text


def test_stub_difference():
    assert check_stub.difference("a\n", "a\n") == ""
    assert "+b\n" in check_stub.difference("a\n", "a\nb\n")


# JAX's own tests of convolutions, as many as are wanted


def test_every_product_of_the_matrix_is_run():
    def ran(most: float) -> list[tuple[str, str]]:
        drawn = run_lax_matrix.runs(most)
        return [(test.__name__, case.name.rpartition("-")[0]) for test, case in drawn]

    products = [("test_values", VALUES), ("test_derivatives", GRADIENTS), ("test_vmap", VMAP)]
    expected = {(test, matrix.name) for test, matrices in products for matrix in matrices}
    few, often = ran(2), ran(30)
    assert expected <= set(few) and few.count(("test_values", "conv")) == 2
    assert often.count(("test_values", "conv")) == 30
    assert often.count(("test_values", "conv_preferred_float8")) == 12  # all that there are
    assert ("test_derivatives_against_differences", "conv_with_general_padding") in often


def test_the_run_of_the_matrix_counts_and_names_what_fails(monkeypatch):
    def test_one(case) -> None:
        assert case.name != "conv-1", "other numbers\nand more"

    (conv, *_) = VALUES
    runs = [(test_one, case) for case in conv.draw(3)]
    monkeypatch.setattr(run_lax_matrix, "runs", lambda most: iter(runs))
    monkeypatch.setattr(run_lax_matrix, "SECONDS_BETWEEN_LINES", 0)
    monkeypatch.setattr(run_lax_matrix, "CASES_BETWEEN_CLEARINGS", 2)
    lines, cleared = [], []
    counts = run_lax_matrix.run(3, say=lines.append, clear=lambda: cleared.append(len(lines)))
    assert counts == (2, 1)
    first, failed, *_, last = lines
    assert first.startswith("1 of 3: 1 passed, 0 failed, ")
    assert failed.startswith("FAILED test_one[conv-1] AssertionError: other numbers")
    assert last.startswith("3 of 3: 2 passed, 1 failed, ")
    assert cleared == [2]


# Versions that are written twice


def test_hooks_and_dev_extra_pin_the_same_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    pins = dict(re.findall(r'"(ruff|clang-format)==([\d.]+)"', hooks))
    extra = project["project"]["optional-dependencies"]["dev"]
    assert pins and {f"{name}=={version}" for name, version in pins.items()} <= set(extra)
    both = [
        line
        for line in project["build-system"]["requires"]
        if re.match("nanobind|nvidia-cudnn-frontend", line)
    ]
    assert len(both) == 2 and set(both) <= set(extra)
    (frontend,) = (line for line in both if "frontend" in line)
    assert f"Install {frontend} from" in (ROOT / "CMakeLists.txt").read_text()
