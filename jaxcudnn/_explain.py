# SPDX-License-Identifier: Apache-2.0
"""What becomes of every convolution of a function on CUDA: `explain`."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, overload

from . import _load, _plans, _roofline, _routes, _words
from ._collect import Found, Source, collect
from ._lowering import Step, has_any_number_of_images
from ._measuring import TimedPlan, call_key, known_time, require_device, timed_plan
from ._spec import ConvSpec, Layout
from ._table import Column, Listing, Table


@dataclass(frozen=True)
class Row:
    """One convolution of a function, and what computes it on CUDA.

    Attributes:
        op: 'fprop', 'dgrad' or 'wgrad'; 'lax' for a call of `jax.lax`'s own.
        call: the function that the user's code calls, such as 'conv_transpose'.
        backward: whether it is part of what JAX transposed: of a gradient, or recomputed for one.
        count: how often it stands in the traced program. What a loop repeats counts once.
        stack: file, line and function of the user's lines that lead to it, the innermost first,
            without those of installed packages. A gradient has those of the call of which it is
            the gradient. Empty for a function of this package that is explained itself.
        spec: the forward convolution whose result or gradient is computed; None if `op` is 'lax'.
        layout: the axis of each array at which each logical dimension sits; None likewise.
        shapes: those of the two operands.
        dtypes: those of the two operands and of the result.
        route: 'cuDNN', 'cuDNN in 3 pieces' where an array is too large for one call, 'lax', or the
            name of another computation of the same sums, such as 'matmul' (docs/plans.md).
        reason: why it is left to `lax`, or a part of it; empty if nothing is.
        epilogue: what is done to the sums, as 'residual + bias + relu'; empty for nothing.
        unfused: why XLA does that, and not cuDNN with the convolution; empty if cuDNN does.
        plan: the name of cuDNN's plan; empty if it is not known here and now. Those of pieces that
            differ have ' + ' between them.
        notes: cuDNN's notes on the plan, such as 'tensor core' or 'runtime compilation'.
        workspace: the bytes of scratch memory that the plan needs; None if it is not known.
        tried: how many plans were timed when it was chosen.
        chosen: 'heuristic', 'named', 'measured' or 'stored' (measured by another process); empty if
            there is no plan yet.
        allow_tf32: whether operands in float32 may be rounded to TF32.
        microseconds: the time of one execution of the plan on the device; None if it was never
            measured, or there is none.
        floor_microseconds: the least time that the device can need, from measured rates of matrix
            products and copies; None if `microseconds` is, or without memory to measure them.
    """

    op: str
    call: str
    backward: bool
    count: int
    stack: tuple[Source, ...]
    spec: ConvSpec | None
    layout: Layout | None
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    route: str
    reason: str = ""
    epilogue: str = ""
    unfused: str = ""
    plan: str = ""
    notes: tuple[str, ...] = ()
    workspace: int | None = None
    tried: int = 0
    chosen: str = ""
    allow_tf32: bool = False
    microseconds: float | None = None
    floor_microseconds: float | None = None

    @property
    def share(self) -> float | None:
        """The share of the roofline that is reached: 1 if no time is lost; None if not known.

        It can be more where arrays stay in the GPU's caches.
        """
        if self.microseconds is None or self.floor_microseconds is None:
            return None
        return self.floor_microseconds / self.microseconds

    @property
    def reading(self) -> str:
        """How the call became this operation, in words."""
        if self.op == "lax":
            return self.call
        if self.backward:
            return f"{self.op} in the backward pass of {self.call}"
        return self.call if self._is_as_written else f"{self.call} read as {self.op}"

    @property
    def _is_cudnns(self) -> bool:
        """Whether a plan of cuDNN's computes it, or a part of it."""
        kind = _routes.KINDS.get(self.route.partition(" ")[0])
        return self.op != "lax" and self.route != "lax" and (kind is None or kind.is_cudnns)

    @property
    def _is_as_written(self) -> bool:
        return self.op == (self.call[5:] if self.call in ("conv_dgrad", "conv_wgrad") else "fprop")


@dataclass(frozen=True, repr=False)
class Explanation(Listing[Row]):
    """The convolutions of a function: an immutable sequence of `Row`s, printed as a table.

    Attributes:
        rows: the convolutions, in the order in which they come first.
        has_gpu: whether there was a GPU to ask for plans.
    """

    rows: tuple[Row, ...]
    has_gpu: bool

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...

    def __getitem__(self, index):
        """Give one row, or several."""
        return self.rows[index]

    def __len__(self) -> int:
        """Count the rows, of which each stands for `count` convolutions."""
        return len(self.rows)

    def _table(self) -> tuple[Table, str]:
        table = Table(_COLUMNS)
        for row in self.rows:
            table.rows.append(_cells(row, table, self.has_gpu))
        total = sum(row.count for row in self.rows)
        computed = [row for row in self.rows if not row.reason]
        of_cudnn = sum(row.count for row in computed if row._is_cudnns)
        summary = f"{total} convolution{'s' * (total != 1)}, {of_cudnn} by cuDNN"
        by_route = sum(row.count for row in computed) - of_cudnn
        if by_route:
            summary += f", {by_route} by other routes"
        times = [row.count * row.microseconds for row in self.rows if row.microseconds is not None]
        if times:
            summary += f"; {_words.microseconds(sum(times))} us"
            summary += " in all" if len(times) == len(self.rows) else " where times are known"
        if of_cudnn and not self.has_gpu:
            summary += "; without a GPU here, plans are chosen where the program runs"
        return table, summary


_COLUMNS = (
    Column("n", right=True),
    Column("pass"),
    Column("op"),
    Column("where", limit=18),
    Column("convolution", limit=40),
    Column("layout", limit=14),
    Column("dtype", limit=14),
    Column("route", limit=20),
    Column("plan", limit=14),
    Column("notes", limit=20),
    Column("workspace", right=True),
    Column("choice"),
    Column("us", right=True),
    Column("roof", right=True),
)


def _cells(row: Row, table: Table, has_gpu: bool) -> list[str]:
    route = row.route
    if row.reason:
        route += " " + table.note(f"left to lax: {row.reason}")
    op = row.op
    if row.epilogue and not row.unfused:
        op += f" + {row.epilogue}"
    elif row.unfused and not row.reason:
        op += " " + table.note(f"{row.epilogue} left to XLA: {row.unfused}")
    if row.op != "lax" and not row.backward and not row._is_as_written:
        op += " " + table.note(row.reading)
    convolution = _words.product(row.shapes)
    if row.spec and row.layout:  # the forward one, whatever is computed
        x = row.layout.to_array("x", row.spec.x_shape)
        w = row.layout.to_array("w", row.spec.w_shape)
        convolution = f"{_words.product((x, w))} {_words.geometry(row.spec)}".strip()
    dtype = _words.dtypes(*row.dtypes)
    if row.allow_tf32 and "float32" in row.dtypes:
        dtype += " tf32"
    unknown = "first run" if has_gpu and row._is_cudnns else ""
    return [
        str(row.count),
        "bwd" if row.backward else "fwd",
        op,
        _where(row.stack),
        convolution,
        _words.layout_letters(row.layout) if row.layout else "",
        dtype,
        route,
        row.plan or unknown,
        ", ".join(row.notes),
        "" if row.workspace is None else _words.size(row.workspace),
        f"{row.chosen}/{row.tried}" if row.tried else row.chosen,
        _words.microseconds(row.microseconds),
        "" if row.share is None else f"{100 * row.share:.0f}%",
    ]


def _where(stack: tuple[Source, ...]) -> str:
    """Write a line and the one from which its function is called: 'net.py:31 < train.py:58'."""
    lines, last = [], ""
    for source in stack[:2]:
        file = source.file.rpartition("/")[2]
        lines.append(f"{'' if file == last else file}:{source.line}")
        last = file
    return " < ".join(lines)


def explain(fn: Callable[..., Any], *, measure: bool = False) -> Callable[..., Explanation]:
    """Say what becomes of every convolution of a function on CUDA, forward and backward.

    The function is traced and not run. To see a gradient's convolutions, explain the gradient.
    Convolutions of which nothing is used are left out, as they are by XLA.

    Args:
        fn: what to explain: any function that JAX can trace, under `jax.jit` or not.
        measure: whether plans whose times are not known are timed first, as `jaxcudnn.tune` does.

    Returns:
        A function that takes the arguments of `fn` and returns an `Explanation`: a sequence with a
        `Row` for each convolution, which prints as a table and is one in a notebook. Arrays may be
        `jax.ShapeDtypeStruct`s; arguments that are neither reach `fn` as they are.

        Without a GPU it says all but the plans, which are chosen where the program runs. With one,
        a plan that will be measured at the first execution is not known before.

    Raises:
        RuntimeError: if `measure` is asked for and JAX has no GPU; or the extension is missing, or
            with a GPU cuDNN, or that fails.

    Example:
        >>> import jax, jaxcudnn
        >>> def f(x, w):
        ...     return jaxcudnn.conv_general_dilated(x, w, (2, 2), "SAME").sum()
        >>> x = jax.ShapeDtypeStruct((8, 3, 32, 32), "bfloat16")
        >>> w = jax.ShapeDtypeStruct((16, 3, 3, 3), "bfloat16")
        >>> [(row.op, row.route) for row in jaxcudnn.explain(jax.grad(f, argnums=(0, 1)))(x, w)]
        [('wgrad', 'cuDNN'), ('dgrad', 'cuDNN')]
    """

    @wraps(fn)
    def explained(*args: Any, **kwargs: Any) -> Explanation:
        device = require_device("jaxcudnn.explain") if measure else _load.local_device()
        plans: dict[Hashable, TimedPlan] = {}
        rows = (
            _row(found, count, device, measure, plans)
            for found, count in collect(fn, args, kwargs).items()
        )
        return Explanation(tuple(rows), device is not None)

    return explained


def _row(
    found: Found,
    count: int,
    device: int | None,
    measure: bool,
    plans: dict[Hashable, TimedPlan],
) -> Row:
    """Follow one convolution down to its plan; `plans` has those already asked for."""
    row = Row(
        op=found.op,
        call=found.call,
        backward=found.backward,
        count=count,
        stack=found.stack,
        spec=found.spec,
        layout=found.layout,
        shapes=found.shapes,
        dtypes=found.dtypes,
        route="lax",
        reason=found.reason,
        epilogue=str(found.epilogue),
    )
    if found.spec is None or found.layout is None:
        return row
    steps = found.lowered()
    calls = [(step.spec, step.attributes) for step in steps if step.attributes is not None]
    row = replace(
        row,
        route=_route(steps),
        reason=_joined(step.reason for step in steps),
        unfused=_joined(step.unfused for step in steps),
        allow_tf32=any(attributes["allow_tf32"] for _, attributes in calls),
    )
    if device is None or not calls or any(has_any_number_of_images(each) for _, each in calls):
        return row
    for _, attributes in calls:
        key = call_key(attributes)
        if key not in plans:
            plans[key] = _plan(attributes, device, measure)
    return _planned(row, calls, [plans[call_key(attributes)] for _, attributes in calls])


def _joined(reasons: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(reason for reason in reasons if reason))


def _route(steps: Sequence[Step]) -> str:
    """Say how many of a convolution's pieces are computed how."""
    kinds = Counter("lax" if step.reason else step.route or "cuDNN" for step in steps)
    first, *others = sorted(kinds.items(), key=lambda kind: kind[0] == "lax")
    if not others and (first[0] == "lax" or first[1] == 1):
        return first[0]
    return ", ".join([f"{first[0]} in {first[1]} pieces", *(f"{n} in {k}" for n, k in others)])


def _plan(attributes: dict[str, Any], device: int, measure: bool) -> TimedPlan:
    if measure:
        return timed_plan(attributes, device)
    plan = _plans.known(attributes, device)
    return plan, None if plan is None else known_time(plan)


def _planned(row: Row, calls: list[tuple[ConvSpec, dict[str, Any]]], plans: list[TimedPlan]) -> Row:
    """Add to a row what is said of plans, if those of all its calls are known."""
    found = [plan for plan, _ in plans if plan is not None]
    if len(found) < len(plans):
        return row
    times = [time for _, time in plans if time is not None]
    microseconds = floor = None
    if len(times) == len(plans) and not row.reason:  # of what is left to lax no time is known
        microseconds = sum(times)
        floors = [_roofline.floor_microseconds(call[1]["op"], *call) for call in calls]
        floor = None if None in floors else sum(filter(None, floors))
    return replace(
        row,
        plan=" + ".join(dict.fromkeys(plan.name for plan in found)),
        notes=tuple(dict.fromkeys(_words.notes(note for plan in found for note in plan.notes))),
        workspace=max(plan.workspace_size for plan in found),
        tried=max(plan.tried for plan in found),
        chosen=found[0].source,
        microseconds=microseconds,
        floor_microseconds=floor,
    )
