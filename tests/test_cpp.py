# SPDX-License-Identifier: Apache-2.0
"""Compiles and runs the C++ tests, which need neither CUDA's headers nor Python."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parent / "cpp"
CSRC = Path(__file__).parents[1] / "csrc"
SOURCES = {
    "conv_spec_test.cc": ["conv_spec.cc"],
    "guard_test.cc": [],
    "handle_pool_test.cc": ["handle_pool.cc"],
    "host_reference_test.cc": ["conv_spec.cc", "host_reference.cc"],
    "known_faults_test.cc": ["conv_spec.cc", "known_faults.cc"],
    "plan_cache_test.cc": [],
    "plans_test.cc": ["conv_spec.cc", "host_reference.cc", "plans.cc"],
    "tuning_test.cc": [],
}


# Functions that return a status, by the table that they are called through, and who checks it.
CHECKS = {"Cudnn": "CheckCudnn(", "Cudart": "CheckCuda("}
# In destructors, which have nobody to tell.
UNCHECKED = {
    "(void)Cudnn().destroy_descriptor",
    "(void)Cudart().event_destroy",
    "(void)Cudart().set_device",
    "(void)Cudart().stream_destroy",
    "(void)Cudart().stream_synchronize",
}


@pytest.fixture(name="compiler", scope="module")
def find_compiler():
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    pytest.skip("no C++ compiler on this machine")


def test_every_file_is_run():
    assert {path.name for path in TESTS.glob("*_test.cc")} == set(SOURCES)


@pytest.mark.parametrize("name", SOURCES)
def test_cpp(name, compiler, tmp_path):
    program = tmp_path / "program"
    sources = [TESTS / name, *(CSRC / source for source in SOURCES[name])]
    folders = [f"-I{folder}" for folder in (CSRC, TESTS, TESTS / "stand_ins")]
    options = ["-std=c++17", "-Wall", "-Wextra", "-pthread", *folders]
    subprocess.run([*compiler, *options, *sources, "-o", program], check=True)
    ran = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr or f"exit status {ran.returncode}"


def test_every_status_is_checked():
    """Those of cudnn_frontend are [[nodiscard]], and the build refuses to drop one."""
    calls = set()
    for path in (*CSRC.glob("*.cc"), *CSRC.glob("*.h")):
        code = re.sub(r"//.*", "", path.read_text())
        code = re.sub(r"\(\s+", "(", code)
        for before, table, function in re.findall(r"(\S*)\b(Cudnn|Cudart)\(\)\.(\w+)\(", code):
            call = f"{table}().{function}"
            calls.add(call)
            checked = before.endswith(CHECKS[table]) or before + call in UNCHECKED
            assert checked or function == "error_string", f"{path.name}: {before}{call}"
        # Nothing else reaches the functions: not by name, not through a copy of a table.
        assert not re.findall(r"\b(?:cudnn|cuda)[A-Z]\w*\(", re.sub(r'".*?"', "", code))
        assert not re.findall(r"= (?:Cudnn|Cudart)\(\);", code)
    assert len(calls) >= 10
    assert "-Werror=unused-result" in (CSRC.parent / "CMakeLists.txt").read_text()
