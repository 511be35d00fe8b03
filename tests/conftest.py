# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: strict JAX, CPU unless a test asks for the GPU, no silent skip.

JAXCUDNN_REQUIRE_GPU=1 makes every skip of a test marked `gpu` a failure.
"""

import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

# `python -m pytest`, and `python -c` in a test, put the checkout first on the path, where jaxcudnn/
# has no extension: an installed package is what is tested.
ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = [entry for entry in sys.path if Path(entry or os.curdir).resolve() != ROOT]
if PathFinder.find_spec("jaxcudnn", ELSEWHERE):
    sys.path[:] = ELSEWHERE
    os.environ["PYTHONSAFEPATH"] = "1"

# JAX starts on CPU, so that no module starts CUDA while tests are collected; a GPU is looked for
# only when a test that needs one has been selected. Subprocesses of tests get the same platforms.
CHOSEN_PLATFORMS = os.environ.get("JAX_PLATFORMS", "")
os.environ["JAX_PLATFORMS"] = "cpu"
# Tests that end a process, or need a fresh one, share the GPU's memory with this process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# What a test computes is the same whatever a store holds, and it takes cuDNN's first plan unless it
# asks for another: measuring tens of thousands of drawn convolutions would take an hour.
os.environ["JAXCUDNN_STORE"] = "off"
os.environ.setdefault("JAXCUDNN_ALGORITHM", "heuristic")

import jax  # noqa: E402
import pytest  # noqa: E402

import gpu_report  # noqa: E402
import jaxcudnn  # noqa: E402

jax.config.update("jax_enable_x64", False)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

REQUIRE_GPU = os.environ.get("JAXCUDNN_REQUIRE_GPU", "0") not in ("", "0")
NO_GPU = pytest.StashKey[str | None]()


def pytest_addoption(parser: pytest.Parser) -> None:
    gpu_report.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    gpu_report.register(config)


def pytest_collection_finish(session: pytest.Session) -> None:
    config = session.config
    wanted = any(item.get_closest_marker("gpu") for item in session.items)
    platforms = getattr(config, "workerinput", {}).get("platforms", CHOSEN_PLATFORMS)
    wanted = wanted and not config.option.collectonly
    config.stash[NO_GPU] = start_gpu(platforms) if wanted else None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Tell a process of pytest-xdist what was chosen; its environment has what was put instead."""
    node.workerinput["platforms"] = CHOSEN_PLATFORMS


def start_gpu(platforms: str) -> str | None:
    """Put JAX on the GPU, CPU beside it; the reason when that is not possible."""
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return f"JAX_PLATFORMS={platforms}"
    if not any(map(os.path.exists, gpu_report.DEVICE_FILES)):
        return "no NVIDIA GPU on this machine"
    use_platforms("cuda,cpu")
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        use_platforms("cpu")
        return f"JAX finds no GPU: {str(error).splitlines()[0]}"
    return None


def use_platforms(platforms: str) -> None:
    os.environ["JAX_PLATFORMS"] = platforms
    jax.config.update("jax_platforms", platforms)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := item.config.stash[NO_GPU]):
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    required = REQUIRE_GPU and item.get_closest_marker("gpu")
    if required and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"JAXCUDNN_REQUIRE_GPU=1, but {reason}"
    return report


@pytest.fixture(autouse=True)
def default_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests without the mark `gpu` run on CPU, also in a session that has the GPU."""
    if os.environ["JAX_PLATFORMS"] == "cpu" or request.node.get_closest_marker("gpu"):
        yield
    else:
        with jax.default_device(jax.devices("cpu")[0]):
            yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the cases that are JAX's own: see lax_matrix.py."""

    def count(*outcomes: str) -> int:
        reports = (r for outcome in outcomes for r in terminalreporter.stats.get(outcome, []))
        return sum("lax_matrix.py::" in report.nodeid for report in reports)

    passed, failed, skipped = count("passed"), count("failed", "error"), count("skipped")
    if passed or failed or skipped:
        terminalreporter.write_line(
            f"JAX's own tests of convolutions: {passed} passed, {failed} failed, {skipped} skipped"
        )


@pytest.fixture
def measuring() -> Iterator[None]:
    """The default, which the environment above turns off."""
    with jaxcudnn.options(algorithm="measure"):
        yield
