# SPDX-License-Identifier: Apache-2.0
"""Every plan that cuDNN has for one convolution: `plans`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, overload

from . import _lowering, _plans, _words
from ._measuring import known_time, require_device
from ._options import OPERATIONS, Options, changed
from ._spec import ConvSpec
from ._table import Column, Listing, Table

_CALLER = "jaxcudnn.plans"


@dataclass(frozen=True)
class Candidate:
    """One of cuDNN's plans for a convolution.

    Attributes:
        name: engine and knobs, such as 'eng62_k2=0_k13=1'; the value of `algorithm` that pins it.
        notes: cuDNN's notes, such as 'tensor core'.
        workspace: the bytes of scratch memory that it needs; None for one that could not be built.
        microseconds: the time of one execution on the device; None if it was not timed.
        chosen: whether the convolution will run by it, if cuDNN is given it as it is here: channels
            last, and no other operation (docs/plans.md).
        reason: why it was not timed, or is not used; empty otherwise.
    """

    name: str
    notes: tuple[str, ...]
    workspace: int | None
    microseconds: float | None
    chosen: bool
    reason: str


@dataclass(frozen=True, repr=False)
class PlanTable(Listing[Candidate]):
    """cuDNN's plans for one convolution: an immutable sequence, printed as a table.

    Attributes:
        op: 'fprop', 'dgrad' or 'wgrad'.
        spec: the convolution.
        candidates: its plans, those that were timed first and the fastest before others, the rest
            in cuDNN's order.
        milliseconds: what measuring cost; None if nothing was measured.
    """

    op: str
    spec: ConvSpec
    candidates: tuple[Candidate, ...]
    milliseconds: float | None

    @overload
    def __getitem__(self, index: int) -> Candidate: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Candidate, ...]: ...

    def __getitem__(self, index):
        """Give one plan, or several."""
        return self.candidates[index]

    def __len__(self) -> int:
        """Count the plans."""
        return len(self.candidates)

    @property
    def chosen(self) -> Candidate | None:
        """The plan by which the convolution will run; None if it is not known."""
        return next((each for each in self.candidates if each.chosen), None)

    def _table(self) -> tuple[Table, str]:
        table = Table(_COLUMNS)
        for each in self.candidates:
            table.rows.append([
                "*" if each.chosen else "",
                each.name,
                _words.microseconds(each.microseconds),
                "" if each.workspace is None else _words.size(each.workspace),
                ", ".join(each.notes),
                each.reason,
            ])  # fmt: skip
        count = len(self.candidates)
        summary = f"{count} plan{'s' * (count != 1)} for {_words.convolution(self.op, self.spec)}"
        if self.milliseconds is not None:
            summary += f", measured in {self.milliseconds:.0f} ms"
        return table, summary


_COLUMNS = (
    Column(" "),
    Column("plan", limit=48),
    Column("us", right=True),
    Column("workspace", right=True),
    Column("notes", limit=48),
    Column("not timed because", limit=40),
)


def plans(
    spec: ConvSpec,
    op: str = "fprop",
    *,
    measure: bool = True,
    options: Options | Mapping[str, Any] | None = None,
) -> PlanTable:
    """List cuDNN's plans for one convolution, with their notes, workspace and time.

    Args:
        spec: the convolution, as a `Row` of `jaxcudnn.explain` has it.
        op: what to compute: 'fprop' for the output, 'dgrad' or 'wgrad' for the gradient with
            respect to its input or its filter.
        measure: whether plans are timed, as `algorithm` and `tuning_budget` of the options say,
            and the fastest is remembered for this convolution if the algorithm is one that
            measures. False lists them untimed.
        options: those under which plans are considered, or a dict of those that differ from the
            spec's own; None for the spec's own.

    Returns:
        A `PlanTable`: a sequence with a `Candidate` for each plan, which prints as a table.

    Raises:
        TypeError: if `spec` or `options` is of the wrong kind, or an option has another name.
        ValueError: if `op` is another word, or the number of images symbolic; as
            `jaxcudnn.Options`.
        NotImplementedError: if cuDNN is not asked for such a convolution.
        RuntimeError: if JAX has no GPU, or cuDNN is missing or fails.
    """
    if not isinstance(spec, ConvSpec):
        raise TypeError(
            f"{_CALLER}: spec must be a jaxcudnn.ConvSpec, got {spec!r}; take it from a row, as in "
            f"jaxcudnn.explain(fn)(*args)[0].spec"
        )
    if op not in OPERATIONS:
        raise ValueError(f"{_CALLER}: op must be one of {', '.join(OPERATIONS)}, got {op!r}")
    if isinstance(options, Mapping):
        options = changed(spec.options, options, _CALLER)
    elif options is not None and not isinstance(options, Options):
        raise TypeError(
            f"{_CALLER}: options must be jaxcudnn.Options or a dict of some of its attributes, got "
            f"{options!r}; write options={{'workspace_limit': 1 << 20}}"
        )
    if options is not None:
        spec = replace(spec, options=options)
    reason = _lowering.refusal(op, spec)
    if reason:
        raise NotImplementedError(
            f"{_CALLER}: the convolution must be one for which cuDNN is asked, got "
            f"{_words.convolution(op, spec)}, which is left to lax because {reason}"
        )
    device = require_device(_CALLER)
    attributes = _lowering._attributes(op, spec)
    if _lowering.has_any_number_of_images(attributes):
        raise ValueError(
            f"{_CALLER}: the number of images must be known, got {spec.x_shape[0]}; replace it in "
            f"the spec's x_shape by a number"
        )
    listed = {plan.name: plan for plan in _plans.candidates(attributes, device)}
    tuning = _plans.measure(attributes, device) if measure and listed else None
    chosen = _plans.known(attributes, device) if listed else None  # named, or first, all the same
    if chosen is None and tuning:
        chosen = tuning.plan
    timings = {timing.name: timing for timing in tuning.timings} if tuning else {}
    if chosen is not None:
        listed.setdefault(chosen.name, chosen)
    found = [
        _candidate(name, listed.get(name), timings.get(name), chosen)
        for name in dict.fromkeys((*listed, *timings))
    ]
    timed_first = sorted(
        found, key=lambda each: math.inf if each.microseconds is None else each.microseconds
    )
    return PlanTable(op, spec, tuple(timed_first), tuning.milliseconds if tuning else None)


def _candidate(name: str, plan: Any, timing: Any, chosen: Any) -> Candidate:
    is_chosen = chosen is not None and name == chosen.name
    times = [known_time(each) for each in (timing, plan) if each is not None]
    return Candidate(
        name=name,
        notes=tuple(_words.notes(plan.notes)) if plan else (),
        workspace=plan.workspace_size if plan else None,
        microseconds=next((time for time in times if time is not None), None),
        chosen=is_chosen,
        reason=timing.reason if timing else "",
    )
