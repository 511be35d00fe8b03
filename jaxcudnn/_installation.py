# SPDX-License-Identifier: Apache-2.0
"""Which of `lax`'s own convolutions are to be cuDNN's, and where that is said.

Two places say it. Programs are lowered under a context of `jit`'s, so that its caches notice; what
is said inside a function that is traced is over by then, so it is also written on the equations, as
`jax.experimental.xla_metadata`, which derivatives, `vmap` and `jit` inside keep.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.core import eval_context
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import get_opaque_trace_state

from ._spec import Pads, Shape

MARK = "jaxcudnn"
"""The key under which equations say it."""

_LEFT = "xla"


@dataclass(frozen=True)
class LaxConvolution:
    """A call of `jax.lax.conv_general_dilated`, as `exclude` is asked about it.

    Gradients are such calls, too, with the geometry that JAX writes.

    Attributes:
        lhs_shape: that of the first operand, in the order of `dimension_numbers`.
        rhs_shape: that of the second operand.
        out_shape: that of the result.
        dtype: that of the operands.
        result_dtype: that of the result.
        window_strides: one for each spatial dimension.
        padding: (low, high) for each spatial dimension; may be negative.
        lhs_dilation: one for each spatial dimension.
        rhs_dilation: one for each spatial dimension.
        dimension_numbers: the axes of images, channels and positions, for lhs, rhs and the result.
        feature_group_count: the groups of channels.
        batch_group_count: the groups of images.
        scope: the names of `jax.named_scope` around it, with '/' between them; but not those that
            are outside of a function given to `jax.jit`, `jax.checkpoint`, `jax.shard_map` or
            control flow such as `lax.scan`, which XLA does not know.
    """

    lhs_shape: Shape
    rhs_shape: Shape
    out_shape: Shape
    dtype: str
    result_dtype: str
    window_strides: Shape
    padding: Pads
    lhs_dilation: Shape
    rhs_dilation: Shape
    dimension_numbers: lax.ConvDimensionNumbers
    feature_group_count: int
    batch_group_count: int
    scope: str

    def is_in(self, name: str) -> bool:
        """Say whether it is in the scope of this name, or of these names one in another."""
        return f"/{name}/" in f"/{self.scope}/"


Exclude = str | Iterable[str] | Callable[[LaxConvolution], bool] | None
"""What is left to XLA: scopes by their names, what a function says, or nothing."""


@dataclass(frozen=True)
class Installation:
    """That `lax`'s convolutions are cuDNN's, but for some."""

    exclude: tuple[str, ...] | Callable[[LaxConvolution], bool] = ()

    def excludes(self, convolution: LaxConvolution) -> bool:
        """Say whether a convolution is left to XLA."""
        if callable(self.exclude):
            return bool(self.exclude(convolution))
        return any(map(convolution.is_in, self.exclude))


_state = jax.make_user_context(default_value=None)
_lowering_ours: ContextVar[bool] = ContextVar("jaxcudnn_lowering_ours", default=False)


def parse(caller: str, exclude: Exclude) -> Installation:
    """Read what `exclude` says.

    Raises:
        TypeError: if it is neither None, nor names, nor a function.
        ValueError: if a name is empty.
    """
    if exclude is None:
        return Installation()
    if callable(exclude):
        return Installation(exclude)
    names = (exclude,) if isinstance(exclude, str) else exclude
    names = tuple(names) if isinstance(names, Iterable) else (names,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{caller}: exclude must be the name of a jax.named_scope, several names or a function "
            f"of a jaxcudnn.LaxConvolution, got {exclude!r}; write exclude=('stem', 'head')"
        )
    if not all(name.strip("/") for name in names):
        raise ValueError(
            f"{caller}: exclude must hold names of scopes, got {exclude!r}; leave it out to "
            f"exclude nothing"
        )
    return Installation(tuple(name.strip("/") for name in names))


def set_everywhere(installation: Installation | None) -> None:
    """Say it for all threads, where no scope says otherwise."""
    _state.set_global(installation)


def scope(installation: Installation | None) -> AbstractContextManager[Any]:
    """Say it in a `with` block of this thread, for what is lowered there."""
    return _state(installation)


def mark(caller: str, installation: Installation | None) -> AbstractContextManager[Any]:
    """Say it in a `with` block of this thread, on the equations that are traced there.

    Raises:
        TypeError: if a function says what is left out, since equations hold only text.
    """
    if installation is not None and callable(installation.exclude):
        raise TypeError(
            f"{caller}: exclude must be names of scopes inside a function that is being traced, "
            f"got {installation.exclude!r}; enter the scope outside of jax.jit, or leave a part "
            f"out by `with jaxcudnn.installed(False)`"
        )
    text = _LEFT if installation is None else json.dumps(installation.exclude)
    return set_xla_metadata(**{MARK: text})


def in_force(marks: Mapping[str, Any] | None) -> Installation | None:
    """Give what holds for an equation with these marks, lowered here and now."""
    text = (marks or {}).get(MARK)
    if text is None:
        return _state.value
    return None if text == _LEFT else Installation(tuple(json.loads(text)))


def is_tracing() -> bool:
    """Say whether JAX is tracing a function here."""
    with eval_context():
        clean = get_opaque_trace_state(convention=MARK)
    return get_opaque_trace_state(convention=MARK) != clean


@contextmanager
def lowering_ours() -> Iterator[None]:
    """Have XLA compute every convolution of `lax` that is lowered in a `with` block.

    What this package lowers to `lax` would come back to it otherwise.
    """
    token = _lowering_ours.set(True)
    try:
        yield
    finally:
        _lowering_ours.reset(token)


def is_lowering_ours() -> bool:
    """Say whether this is within `lowering_ours`."""
    return _lowering_ours.get()


_JIT = re.compile(r"\bp?jit\([^()]*\)")
_TRANSFORM = re.compile(r"\w*\(|\)")  # as "transpose(jvp(" and what closes it


def scope_of(name_stack: str) -> str:
    """Give the names of `jax.named_scope` in a name stack, without JAX's transformations."""
    names = _TRANSFORM.sub("", _JIT.sub("", name_stack)).split("/")
    return "/".join(filter(None, names))
