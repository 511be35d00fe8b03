# SPDX-License-Identifier: Apache-2.0
"""The depthwise kernels, which the extension does not use: on the CPU, by their definition."""

import importlib
import os
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from depthwise_cases import CHANNELS, COLUMNS, DTYPES, cases, defined, variants
from depthwise_emulator import Emulated
from depthwise_launches import OPERANDS, launches

ROOT = Path(__file__).resolve().parents[1]
PROBLEMS = {problem.name: problem for problem in (*CHANNELS, *COLUMNS)}


@pytest.fixture(name="compiler", scope="module")
def find_compiler():
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    pytest.skip("no C++ compiler on this machine")


def name_of(value):
    return getattr(value, "name", value) if not hasattr(value, "lanes") else ""


@pytest.mark.parametrize(
    ("problem", "op", "configuration"),
    [pytest.param(*c, id=f"{c[0].name}-{c[1]}") for c in cases()],
)
def test_as_defined(compiler, tmp_path, problem, op, configuration):
    """Small integers, whose sums are exact in any order; no thread relies on being the first."""
    emulated = Emulated(compiler, tmp_path, problem, op, configuration)
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-2, 3, problem.shape(role)) for role in OPERANDS[op][:2])
    expected = defined(problem, op, a, b).astype(DTYPES[problem.dtype])
    for defer in (False, True):
        for backwards in (False, True):
            got = emulated(a, b, defer=defer, backwards=backwards)
            np.testing.assert_array_equal(got, expected, f"{configuration} {defer} {backwards}")


def ones_and_an_infinity(problem, op, infinite):
    """Operands of ones, of which the one by that role ends in an infinite number."""
    operands = {role: np.ones(problem.shape(role)) for role in OPERANDS[op][:2]}
    operands[infinite].flat[-1] = np.inf
    return [*operands.values()]


@pytest.mark.parametrize("op", ["fprop", "dgrad"])
@pytest.mark.parametrize("name", ["plain", "window under stride", "one channel"])
def test_infinite_inputs_reach_their_own_outputs_alone(compiler, tmp_path, name, op):
    emulated = Emulated(compiler, tmp_path, *variants(PROBLEMS[name], op)[0])
    operands = ones_and_an_infinity(PROBLEMS[name], op, OPERANDS[op][0])
    expected = defined(PROBLEMS[name], op, *operands)
    np.testing.assert_array_equal(emulated(*operands), expected)


@pytest.mark.xfail(reason="columns outside of an image are zeros, and are multiplied")
@pytest.mark.parametrize(("op", "infinite"), [("wgrad", "x"), ("fprop", "w")])
def test_infinite_numbers_that_meet_columns_outside(compiler, tmp_path, op, infinite):
    emulated = Emulated(compiler, tmp_path, *variants(PROBLEMS["plain"], op)[0])
    operands = ones_and_an_infinity(PROBLEMS["plain"], op, infinite)
    expected = defined(PROBLEMS["plain"], op, *operands)
    np.testing.assert_array_equal(emulated(*operands), expected)


def test_what_is_timed_fits_a_multiprocessor():
    sys.path.append(str(ROOT / "benchmarks"))
    targets = importlib.import_module("depthwise_targets")
    for problem in targets.PROBLEMS:
        for op in OPERANDS:
            for configuration in targets.configurations(problem, op):
                launch = launches(problem, op, configuration, multiprocessors=132)[0][0]
                assert launch.threads * configuration.blocks <= 2048, configuration
                # Each block costs a KiB that it does not ask for.
                shared = (launch.shared + 1024) * configuration.blocks
                assert shared <= 228 << 10, (problem.name, op, configuration)


@pytest.mark.parametrize("option", ["--help", "--no-check"])
def test_benchmark_without_a_gpu(option):
    script = ROOT / "benchmarks" / "depthwise_kernels.py"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, script, option]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if option == "--help":
        assert ran.returncode == 0 and "--output" in ran.stdout
    else:
        assert ran.returncode == 1 and "there is nothing to measure" in ran.stderr
