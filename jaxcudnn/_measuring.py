# SPDX-License-Identifier: Apache-2.0
"""When the plan of a custom call is measured because the user asks for it."""

import math
from collections.abc import Hashable, Mapping
from typing import Any

from . import _load, _plans

TimedPlan = tuple[Any, float | None]
"""A plan and the microseconds of one execution, both as far as they are known."""


def require_device(caller: str) -> int:
    """Give CUDA's number of the GPU on which plans are measured.

    Raises:
        RuntimeError: there is none.
    """
    device = _load.local_device()
    if device is None:
        raise RuntimeError(
            f"{caller}: plans must be listed and measured where JAX has an NVIDIA GPU, got none in "
            f"this process; run it on such a machine, with jax[cuda13] or jax[cuda12] installed"
        )
    return device


def call_key(attributes: Mapping[str, Any]) -> Hashable:
    """Give what is equal for equal custom calls."""
    return tuple(
        (name, tuple(value) if isinstance(value, list) else value)
        for name, value in attributes.items()
    )


def is_settled(attributes: Mapping[str, Any], plan: Any) -> bool:
    """Say whether tuning would not change a plan: one measured, named or wanted untimed."""
    return plan.source != "heuristic" or attributes["algorithm"] == "heuristic"


def known_time(plan: Any) -> float | None:
    """Give the microseconds of one execution of a plan or timing; None if it was never timed."""
    return None if math.isnan(plan.microseconds) else plan.microseconds


def timed_plan(attributes: dict[str, Any], device: int) -> TimedPlan:
    """Give the plan that a call will use and its time, which is measured if it is not known."""
    plan = _plans.known(attributes, device)
    if plan is not None and known_time(plan) is not None:
        return plan, known_time(plan)
    tuning = _plans.measure(attributes, device)
    plan = _plans.known(attributes, device) or tuning.plan
    times = {timing.name: known_time(timing) for timing in tuning.timings}
    # One that is used because it comes first, or has been named, keeps no time of its own.
    return plan, times.get(plan.name) if known_time(plan) is None else known_time(plan)
