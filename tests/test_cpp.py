# SPDX-License-Identifier: Apache-2.0
"""Compiles and runs the C++ tests, which need neither CUDA's headers nor Python."""

import os
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
    "known_faults_test.cc": ["conv_spec.cc"],
    "plan_cache_test.cc": [],
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
    options = ["-std=c++17", "-Wall", "-Wextra", "-pthread", "-I", CSRC, "-I", TESTS]
    subprocess.run([*compiler, *options, *sources, "-o", program], check=True)
    ran = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr or f"exit status {ran.returncode}"
