# SPDX-License-Identifier: Apache-2.0
"""Pytest plugin behind --gpu-report PATH: what ran, how it ended, on what machine, of what tree.

tools/check_gpu_report.py reads the report. conftest.py registers the plugin.
"""

import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tree_hash import tree_sha256

DEVICE_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-report", type=Path, metavar="PATH", help="write what ran, and on which GPU, as JSON"
    )


def register(config: pytest.Config) -> None:
    """Register the plugin if its option was given.

    With pytest-xdist's -n the report is that of the process that spreads the tests over others.

    Raises:
      pytest.UsageError: the installed package is not that of the tree.
    """
    path = config.getoption("--gpu-report")
    if path is None or hasattr(config, "workerinput"):
        return
    stale = stale_modules(config.rootpath)
    if stale:
        raise pytest.UsageError(
            f"--gpu-report: the installed jaxcudnn is not that of {config.rootpath} "
            f"({', '.join(stale)} differ); install it again"
        )
    config.pluginmanager.register(GpuReport(config, path), "gpu_report")


def stale_modules(root: Path) -> list[str]:
    """Python files of jaxcudnn that differ between `root` and the package that is imported."""
    spec = importlib.util.find_spec("jaxcudnn")
    if spec is None or spec.origin is None:
        return []
    here, installed = (
        {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.py")}
        for folder in (root / "jaxcudnn", Path(spec.origin).parent)
    )
    return sorted(name for name in {*here, *installed} if here.get(name) != installed.get(name))


class GpuReport:
    """Counts tests as pytest runs them and writes the report at the end of the session."""

    def __init__(self, config: pytest.Config, path: Path):
        self.path = config.invocation_params.dir / path
        self.root = config.rootpath
        # Tests that are left out by expression are only seen where they are collected.
        by_expression = config.option.keyword or config.option.markexpr not in ("", "gpu")
        self.left_out = not runs_all(config) or bool(by_expression)
        self.outcomes: dict[str, str] = {}
        self.durations: dict[str, float] = {}
        self.counts: dict[str, str] = {}

    def record(self, name: str, outcome: str) -> None:
        # The worst of a test's phases is its outcome.
        rank = ("passed", "skipped", "failed")
        self.outcomes[name] = max(self.outcomes.get(name, "passed"), outcome, key=rank.index)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self.record(report.nodeid, report.outcome)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.left_out |= any(item.get_closest_marker("gpu") for item in items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # An expected failure is a skip: it shows nothing that works.
        self.record(report.nodeid, report.outcome)
        self.durations[report.nodeid] = self.durations.get(report.nodeid, 0) + report.duration
        # What a test that runs many things says of them: record_property("counts", text).
        for name, value in report.user_properties:
            if name == "counts":
                self.counts[report.nodeid] = str(value)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        outcomes = list(self.outcomes.values())
        report = {
            "passed": outcomes.count("passed"),
            "failed": outcomes.count("failed"),
            "skipped": outcomes.count("skipped"),
            "complete": not (self.left_out or session.shouldstop or session.shouldfail),
            **machine(),
            "tree_sha256": tree_sha256(self.root),
            "seconds": round(sum(self.durations.values()), 3),
            "counts": dict(sorted(self.counts.items())),
            "durations": {name: round(time, 3) for name, time in sorted(self.durations.items())},
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(report, indent=1) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"GPU report written to {self.path}")


def runs_all(config: pytest.Config) -> bool:
    """Whether no path or test named on the command line leaves a part of tests/ out."""
    whole = {config.rootpath, config.rootpath / "tests"}
    return all((config.invocation_params.dir / name).resolve() in whole for name in config.args)


def machine() -> dict[str, str | None]:
    """What ran the tests; None for what there is not."""
    native = loaded_extension()
    return {
        "gpu": gpu_name(),
        "driver": driver_version(),
        "cudnn": cudnn_version(native.cudnn_version()) if native else None,
        "jax": importlib.metadata.version("jax"),
        "jaxlib": importlib.metadata.version("jaxlib"),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
    }


def loaded_extension() -> Any:
    """The extension with cuDNN, which a process that spreads tests over others has not loaded."""
    try:
        from jaxcudnn import _load

        return _load.cudnn()
    except (ImportError, RuntimeError):
        return None


def gpu_name() -> str | None:
    if not any(map(os.path.exists, DEVICE_FILES)):
        return None
    import jax

    jax.config.update("jax_platforms", "cuda,cpu")  # too late, and not needed, after any test here
    try:
        return jax.devices("cuda")[0].device_kind
    except RuntimeError:
        return None


def driver_version() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
        return answer.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        pass
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found and found[0]


def cudnn_version(version: object) -> str:
    """cuDNN's number, such as 91900, as 9.19.0; anything else as it is."""
    if isinstance(version, int):
        return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    return str(version)
