# SPDX-License-Identifier: Apache-2.0
"""The plans of one convolution: known, possible, measured."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Plan:
    """One of cuDNN's plans for a convolution."""

    name: str
    workspace_size: int
    notes: list[str]
    source: str
    microseconds: float
    tried: int


@dataclass(frozen=True)
class Timing:
    """What measuring found of one plan."""

    name: str
    microseconds: float
    reason: str


@dataclass(frozen=True)
class Tuning:
    """What measuring found for one convolution."""

    plan: Plan
    timings: list[Timing] = field(default_factory=list)
    milliseconds: float = 0.0


def known(attributes: Mapping[str, Any], device: int) -> Plan | None:
    """Give the plan that a call will run, if that is known without measuring."""
    raise NotImplementedError


def candidates(attributes: Mapping[str, Any], device: int) -> list[Plan]:
    """Give every plan that the options allow."""
    raise NotImplementedError


def measure(
    attributes: Mapping[str, Any],
    device: int,
    progress: Callable[[int, int], None] | None = None,
) -> Tuning:
    """Time plans, choose one and remember it."""
    raise NotImplementedError
