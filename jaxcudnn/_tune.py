# SPDX-License-Identifier: Apache-2.0
"""Measuring the plans of every convolution of a function ahead of time: `tune`."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, overload

from . import _plans, _words
from ._collect import collect
from ._lowering import has_any_number_of_images
from ._measuring import call_key, is_settled, known_time, require_device
from ._progress import Progress
from ._spec import ConvSpec
from ._table import Column, Listing, Table

_CALLER = "jaxcudnn.tune"


@dataclass(frozen=True)
class TunedRow:
    """One convolution that cuDNN is given, and the plan that was chosen for it.

    Attributes:
        op: what cuDNN is given: 'fprop', 'dgrad' or 'wgrad'. It may be given another than is asked
            for, such as an input gradient as a forward convolution.
        spec: the convolution that it is given, or one piece of one that is too large for cuDNN.
        plan: the plan's name; empty if measuring failed.
        microseconds: the time of one execution on the device; None if it was never measured.
        workspace: the bytes of scratch memory that the plan needs.
        tried: how many plans were timed when it was chosen.
        milliseconds: what measuring cost now; 0 if it was not necessary.
        measured: whether it was measured now.
        failure: what went wrong; empty if nothing did.
    """

    op: str
    spec: ConvSpec
    plan: str = ""
    microseconds: float | None = None
    workspace: int = 0
    tried: int = 0
    milliseconds: float = 0.0
    measured: bool = False
    failure: str = ""


@dataclass(frozen=True, repr=False)
class Tuned(Listing[TunedRow]):
    """What `jaxcudnn.tune` did: an immutable sequence of `TunedRow`s, printed as a table.

    Attributes:
        rows: the function's different convolutions, in the order in which they come first.
        seconds: what all of it took.
        left_to_lax: how many convolutions of the function cuDNN is not given.
    """

    rows: tuple[TunedRow, ...]
    seconds: float
    left_to_lax: int

    @overload
    def __getitem__(self, index: int) -> TunedRow: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[TunedRow, ...]: ...

    def __getitem__(self, index):
        """Give one row, or several."""
        return self.rows[index]

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.rows)

    @property
    def measured(self) -> int:
        """How many convolutions were measured."""
        return sum(row.measured for row in self.rows)

    @property
    def skipped(self) -> int:
        """How many had their plans already: from an earlier time, or by name or order."""
        return len(self.rows) - self.measured - self.failed

    @property
    def failed(self) -> int:
        """How many could not be measured. They run by whatever plan builds."""
        return sum(bool(row.failure) for row in self.rows)

    def _table(self) -> tuple[Table, str]:
        table = Table(_COLUMNS)
        for row in self.rows:
            failure = f"failed {table.note(row.failure)}" if row.failure else ""
            table.rows.append([
                row.op,
                _words.of_spec(row.spec),
                row.plan or failure,
                _words.microseconds(row.microseconds),
                _words.size(row.workspace) if row.plan else "",
                str(row.tried) if row.tried else "",
                f"{row.milliseconds:.0f} ms" if row.measured else "",
            ])  # fmt: skip
        summary = f"{self.measured} measured in {self.seconds:.1f} s, {self.skipped} known before"
        if self.failed:
            summary += f", {self.failed} failed"
        if self.left_to_lax:
            summary += f", {self.left_to_lax} left to lax"
        return table, summary


_COLUMNS = (
    Column("op"),
    Column("convolution", limit=72),
    Column("plan", limit=30),
    Column("us", right=True),
    Column("workspace", right=True),
    Column("tried", right=True),
    Column("cost", right=True),
)


def tune(fn: Callable[..., Any], *args: Any, progress: bool = True, **kwargs: Any) -> Tuned:
    """Measure the plans of every convolution of a function ahead of time.

    The function is traced and not run. What is chosen is remembered, in this process and in the
    store, and used wherever the same convolution is traced under the same options. Convolutions
    whose plans were measured before are skipped, and those whose options name a plan or take
    cuDNN's first one. Under `deterministic=True`, which otherwise takes plans untimed, it is the
    way to have the fastest.

    Args:
        fn: a function that JAX can trace: for a training step, the whole of it.
        *args: its arguments. Arrays may be `jax.ShapeDtypeStruct`s.
        progress: whether to say on stderr how far it is, with a bar in a terminal if tqdm is
            installed, and a line for each convolution otherwise.
        **kwargs: its arguments by name.

    Returns:
        A `Tuned`: a sequence with a `TunedRow` for each different convolution, which prints as a
        table. One that cannot be measured says why, and does not stop the others.

    Raises:
        RuntimeError: if JAX has no GPU, or cuDNN is missing.
    """
    device = require_device(_CALLER)
    start = time.perf_counter()
    calls: dict[Any, tuple[str, ConvSpec, dict[str, Any]]] = {}
    left_to_lax = 0
    for found, count in collect(fn, args, kwargs).items():
        steps = found.lowered()
        left_to_lax += count * (not steps or any(step.reason for step in steps))
        for step in steps:
            if step.attributes is not None:
                call = step.attributes["op"], step.spec, step.attributes
                calls.setdefault(call_key(step.attributes), call)
    rows = []
    with Progress(_CALLER, len(calls), shown=progress) as shown:
        for op, spec, attributes in calls.values():
            row = _tuned(op, spec, attributes, device)
            rows.append(row)
            shown.step(f"{_words.convolution(op, spec)}: {_outcome(row)}")
    return Tuned(tuple(rows), time.perf_counter() - start, left_to_lax)


def _tuned(op: str, spec: ConvSpec, attributes: dict[str, Any], device: int) -> TunedRow:
    if has_any_number_of_images(attributes):
        return TunedRow(op, spec, failure="the number of images is symbolic; tune for a number")
    try:
        plan = _plans.known(attributes, device)
        if plan is not None and is_settled(attributes, plan):
            return _row(op, spec, plan)
        tuning = _plans.measure(attributes, device)
    except RuntimeError as error:
        return TunedRow(op, spec, failure=str(error))
    if known_time(tuning.plan) is None:  # it is cuDNN's first, for want of anything better
        reasons = dict.fromkeys(timing.reason for timing in tuning.timings if timing.reason)
        return TunedRow(op, spec, failure=f"no plan could be timed: {'; '.join(reasons)}")
    row = _row(op, spec, tuning.plan)
    return replace(row, milliseconds=tuning.milliseconds, measured=True)


def _row(op: str, spec: ConvSpec, plan: Any) -> TunedRow:
    return TunedRow(op, spec, plan.name, known_time(plan), plan.workspace_size, plan.tried)


def _outcome(row: TunedRow) -> str:
    if row.failure:
        return f"failed, {row.failure}"
    time = "" if row.microseconds is None else f", {_words.microseconds(row.microseconds)} us"
    cost = f"measured in {row.milliseconds:.0f} ms" if row.measured else "known before"
    return f"{row.plan}{time}, {cost}"
