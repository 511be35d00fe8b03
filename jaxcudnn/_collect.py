# SPDX-License-Identifier: Apache-2.0
"""The convolutions of a function, found by tracing it, and where in the user's code they stand."""

import os
import site
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jax.extend.source_info_util import SourceInfo
from jax.interpreters import partial_eval

from . import _foreign, _lowering
from ._foreign import Operation
from ._spec import ConvSpec, Epilogue, Layout

LEFT_TO_LAX = "its sizes are symbolic"


class Source(NamedTuple):
    """A line of code."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Found:
    """One convolution of a function."""

    op: str
    """The primitive's "fprop", "dgrad" or "wgrad", or "lax"."""
    spec: ConvSpec | None
    """None for one of `lax`'s."""
    layout: Layout | None
    shapes: tuple[tuple[int, ...], ...]
    """Of the operands, as the arrays are."""
    dtypes: tuple[str, ...]
    """Of the operands and the result."""
    stack: tuple[Source, ...]
    """The user's lines that lead to it, the innermost first."""
    call: str
    """The function that was called, as "conv_transpose"."""
    backward: bool
    """Whether it is part of what JAX transposed: of a gradient, or recomputed for one."""
    reason: str = ""
    """Why it is one of `lax`'s."""
    epilogue: Epilogue = field(default_factory=Epilogue)
    """What the primitive does to its sums."""

    def lowered(self) -> list[_lowering.Step]:
        """Give what it is lowered to on CUDA."""
        if self.spec is None or self.layout is None:
            return []
        return Operation(self.op, self.spec, self.layout, self.epilogue).lowered()


def collect(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Counter[Found]:
    """Trace a function and count its convolutions, in the order in which they come first.

    Each is counted as often as it stands in the traced program: one inside `lax.scan` once, one in
    a function that is called twice, twice; and not if nothing uses it, since XLA drops it then.
    Arrays and `jax.ShapeDtypeStruct`s are traced; all other arguments reach the function as they
    are.
    """
    leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)))
    traced = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def call(*arrays: jax.Array) -> Any:
        remaining = iter(arrays)
        given = [
            next(remaining) if is_traced else leaf
            for leaf, is_traced in zip(leaves, traced, strict=True)
        ]
        positional, named = jax.tree.unflatten(structure, given)
        # What is returned need not be of arrays.
        return [
            leaf
            for leaf in jax.tree.leaves(fn(*positional, **named))
            if isinstance(leaf, jax.Array)
        ]

    arrays = [leaf for leaf, is_traced in zip(leaves, traced, strict=True) if is_traced]
    jaxpr = jax.make_jaxpr(call)(*arrays).jaxpr
    used, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return _in_jaxpr(used, {})


def _in_jaxpr(jaxpr: Jaxpr, seen: dict[int, Counter[Found]]) -> Counter[Found]:
    """Count the convolutions of a jaxpr and of those in it; `seen` has what it gave before."""
    if id(jaxpr) not in seen:
        found: Counter[Found] = Counter()
        for equation in jaxpr.eqns:
            backward = "transpose(" in str(equation.source_info.name_stack)
            found.update(_read(equation, backward))
            for inner in jaxprs_in_params(equation.params):
                for each, count in _in_jaxpr(inner, seen).items():
                    found[replace(each, backward=each.backward or backward)] += count
        seen[id(jaxpr)] = found
    return seen[id(jaxpr)]


def _read(equation: JaxprEqn, backward: bool) -> list[Found]:
    """Read one equation: one of ours, or one of `lax`'s and what `install` makes of it."""
    is_of_lax = equation.primitive is lax.conv_general_dilated_p
    ours = _foreign.operation(equation.primitive, equation.params)
    if ours is None and not is_of_lax:
        return []
    stack, call = _written(equation.source_info)
    avals: list[Any] = [atom.aval for atom in (*equation.invars[:2], *equation.outvars)]
    found = Found(
        op="lax",
        spec=None,
        layout=None,
        shapes=tuple(tuple(aval.shape) for aval in avals[:2]),
        dtypes=tuple(aval.dtype.name for aval in avals),
        stack=stack,
        call=call or ("lax.conv_general_dilated" if is_of_lax else ""),
        backward=backward,
    )
    if ours is not None:
        return [_computed_by(ours, found)]
    decided = _foreign.decide(avals, equation.params, equation.ctx.xla_metadata)
    if isinstance(decided, str):
        return [replace(found, reason=LEFT_TO_LAX if call else decided)]
    return [_computed_by(each, found) for each in _foreign.operations(decided)]


def _computed_by(operation: Operation, found: Found) -> Found:
    return replace(
        found,
        op=operation.op,
        spec=operation.spec,
        layout=operation.layout,
        epilogue=operation.epilogue,
    )


def _folder(path: str) -> str:
    return os.path.realpath(path) + os.sep


_HERE = _folder(os.path.dirname(__file__))
_JAX = _folder(os.path.dirname(jax.__file__))
_INSTALLED = (
    "<frozen ",
    *(_folder(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *map(_folder, (*site.getsitepackages(), site.getusersitepackages())),
)


def _written(info: SourceInfo) -> tuple[tuple[Source, ...], str]:
    """Give the user's lines, and the function of this package that is called there or below.

    Lines of installed packages are left out, so that a layer of a library is found where the user
    made it; if there are no others, the innermost of those is given.
    """
    call, outside = "", []
    for source in _frames(info):
        if not source.file.startswith(_HERE):
            outside.append(source)
        elif not outside and source.function.isidentifier() and source.function[0] != "_":
            call = source.function  # and no method of what stands for one in a library's module
    own = tuple(source for source in outside if not source.file.startswith(_INSTALLED))
    return own or tuple(outside[:1]), call


def _frames(info: SourceInfo) -> Iterator[Source]:
    """Give the frames within the function that is traced and outside JAX, the innermost first."""
    for frame in info.traceback.frames if info.traceback else ():
        file = frame.file_name
        if not file.startswith("<"):  # as what is typed in, or made by exec
            file = os.path.realpath(file)
        if file == os.path.realpath(__file__):
            return
        if not file.startswith(_JAX):
            yield Source(file, frame.line_num, frame.function_name)
