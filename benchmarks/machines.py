# SPDX-License-Identifier: Apache-2.0
"""What the sections need of the machine: the GPU's part, and a stand-in for a machine without one.

The stand-in exists so that every line of the benchmarks but these can be run on a CPU, at sizes
that take no time. Its figures mean nothing.
"""

import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
from device_time import Kernel, Program, StepTime, device_times, traced_events
from frontend import Frontend
from step_times import Event

from jaxcudnn import _load, _plans

Samples = Mapping[str, Sequence[int]]


class Shrinkable(Protocol):
    """A convolution that has a small form."""

    def shrunk(self) -> Self:
        """Give a convolution of the same form that takes a CPU no time."""
        ...


Scaled = TypeVar("Scaled", bound=Shrinkable)


class Gpu:
    """The first GPU of this process."""

    def __init__(self) -> None:
        """Start JAX on the GPU, and with it the libraries that jaxcudnn then uses."""
        self.device = jax.devices("cuda")[0]
        self.native = _load.cudnn()
        self._frontend: Frontend | None = None

    def environment(self) -> dict[str, str | None]:
        """Name hardware and software, for whoever reads the figures."""
        version = self.native.cudnn_version()
        return {
            "gpu": self.device.device_kind,
            "driver": _driver_version(),
            "cudnn": f"{version // 10000}.{version // 100 % 100}.{version % 100}",
            "cudnn_frontend": _package_version("nvidia-cudnn-frontend"),
            **_software(),
        }

    def scaled(self, conv: Scaled) -> Scaled:
        """Give the convolution to measure."""
        return conv

    def device_times(
        self, programs: Mapping[str, Program], *, rounds: int, steps: int
    ) -> dict[str, StepTime]:
        """Time what programs do on the GPU."""
        return device_times(programs, rounds=rounds, steps=steps)

    def turn(self, program: Program, steps: int) -> list[Event]:
        """Give what runs on the GPU in some steps of a program that has run before."""
        return traced_events({"": program}, 1, steps)

    def plan(self, attributes: dict[str, Any]) -> Any:
        """Give jaxcudnn's plan, from its cache if it is there, measured if it has to be."""
        device = self.device.local_hardware_id
        return _plans.known(attributes, device) or _plans.measure(attributes, device).plan

    def candidates(self, attributes: dict[str, Any]) -> Sequence[Any]:
        """Build the plans that would be measured."""
        return _plans.candidates(attributes, self.device.local_hardware_id)

    def tune(self, attributes: dict[str, Any]) -> Any:
        """Measure plans, whatever is known of them."""
        return _plans.measure(attributes, self.device.local_hardware_id)

    def plans_built(self) -> int:
        """Count the look-ups in jaxcudnn's plan cache that found nothing."""
        return self.native.cache_info().misses

    def plans_kept(self) -> int:
        """Count the plans in jaxcudnn's cache."""
        return self.native.cache_info().size

    def frontend(
        self,
        attributes: dict[str, Any],
        plan_name: str,
        operands: Sequence[jax.Array],
        expected: jax.Array,
    ) -> Program:
        """Give the program of cuDNN's own Python frontend, whose result starts as NaN."""
        if self._frontend is None:
            self._frontend = Frontend(self.native.cudnn_path())
        result = jnp.full_like(expected, jnp.nan)
        return self._frontend.program(attributes, plan_name, operands, result)

    def stage_samples(self, run: Callable[[], object]) -> Samples:
        """Give the nanoseconds that jaxcudnn's handlers took during `run`, call by call."""
        self.native.time_stages(True)
        try:
            run()
            return self.native.stage_samples()
        finally:
            self.native.time_stages(False)


class DryRun:
    """A CPU that passes for a GPU."""

    def __init__(self) -> None:
        """Count the plans that are asked for."""
        self.plans: set[str] = set()

    def environment(self) -> dict[str, str | None]:
        """Say that the figures are not real."""
        return {"gpu": "none (dry run)", "driver": None, "cudnn": None, **_software()}

    def scaled(self, conv: Scaled) -> Scaled:
        """Give a convolution of the same form that takes a CPU no time."""
        return conv.shrunk()

    def device_times(
        self, programs: Mapping[str, Program], *, rounds: int, steps: int
    ) -> dict[str, StepTime]:
        """Time one step of each program on the host, and call it one kernel."""
        times = {}
        for label, program in programs.items():
            program.wait(program.step())
            start = time.perf_counter()
            program.wait(program.step())
            microseconds = (time.perf_counter() - start) * 1e6
            times[label] = StepTime((Kernel("dry-run", 1, microseconds),))
        return times

    def turn(self, program: Program, steps: int) -> list[Event]:
        """Time some steps of a program on the host, and call them one kernel."""
        start = time.perf_counter_ns()
        for _ in range(steps):
            program.wait(program.step())
        return [Event("dry-run", start, time.perf_counter_ns() - start)]

    def plan(self, attributes: dict[str, Any]) -> Any:
        """Invent a plan."""
        self.plans.add(str(attributes))
        return SimpleNamespace(name="eng0_k1=2", workspace_size=0)

    def candidates(self, attributes: dict[str, Any]) -> Sequence[Any]:
        """Invent two plans."""
        return self.tune(attributes).timings

    def tune(self, attributes: dict[str, Any]) -> Any:
        """Invent a race of two plans."""
        plans = {"eng0_k1=2": 2.0, "eng5": 3.0}
        timings = [
            SimpleNamespace(name=name, microseconds=us, reason="") for name, us in plans.items()
        ]
        chosen = SimpleNamespace(name="eng0_k1=2", tried=2)
        return SimpleNamespace(plan=chosen, timings=timings, milliseconds=10.0)

    def plans_built(self) -> int:
        """Say that every plan was in the cache."""
        return 0

    def plans_kept(self) -> int:
        """Count the plans that were asked for."""
        return len(self.plans)

    def frontend(
        self,
        attributes: dict[str, Any],
        plan_name: str,
        operands: Sequence[jax.Array],
        expected: jax.Array,
    ) -> Program:
        """Give a program that has the result already."""
        return Program(lambda: expected)

    def stage_samples(self, run: Callable[[], object]) -> Samples:
        """Invent samples."""
        run()
        calls = range(100)
        return {
            "initialize": [100 + i for i in calls],
            "execute": [10_000 + i for i in calls],
            "enqueue": [9_500 + i for i in calls],
        }


Machine = Gpu | DryRun


def _software() -> dict[str, str | None]:
    return {
        "jaxcudnn": _package_version("jaxcudnn"),
        "jax": _package_version("jax"),
        "jaxlib": _package_version("jaxlib"),
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver_version() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        return answer.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
