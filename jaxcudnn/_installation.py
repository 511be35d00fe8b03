# SPDX-License-Identifier: Apache-2.0
"""Which of `lax`'s own convolutions are to be cuDNN's, and where that is said.

Two places say it. Programs are lowered under a context of `jit`'s, so that its caches notice; what
is said inside a function that is traced is over by then, so it is also written on the equations, as
`jax.experimental.xla_metadata`, which derivatives, `vmap` and `jit` inside keep.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.core import eval_context
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import get_opaque_trace_state
from jax.interpreters import mlir

from ._spec import Pads, Shape

MARK = "jaxcudnn"
"""The key under which equations say it."""

_TAKEN, _LEFT = "cudnn", "xla"


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


Exclude = Callable[[LaxConvolution], bool]
"""Says whether a convolution is left to XLA."""


@dataclass(frozen=True)
class Installation:
    """That `lax`'s convolutions are cuDNN's, but for some."""

    exclude: Exclude | None = None

    def excludes(self, convolution: LaxConvolution) -> bool:
        """Say whether a convolution is left to XLA."""
        return self.exclude is not None and bool(self.exclude(convolution))


_state = jax.make_user_context(default_value=None)
_left_to_xla: ContextVar[bool] = ContextVar("jaxcudnn_left_to_xla", default=False)


def parse(caller: str, exclude: Exclude | None) -> Installation:
    """Read what `exclude` says.

    Raises:
        TypeError: if it is neither None nor a function.
    """
    if exclude is not None and not callable(exclude):
        raise TypeError(
            f"{caller}: exclude must be a function of a jaxcudnn.LaxConvolution, got {exclude!r}; "
            f"write exclude=lambda call: call.dtype == 'float32'"
        )
    return Installation(exclude)


def set_everywhere(installation: Installation | None) -> None:
    """Say it for all threads, where no scope says otherwise."""
    _state.set_global(installation)


def scope(installation: Installation | None) -> AbstractContextManager[Any]:
    """Say it in a `with` block of this thread, for what is lowered there."""
    return _state(installation)


def mark(caller: str, installation: Installation | None) -> AbstractContextManager[Any]:
    """Say it in a `with` block of this thread, on the equations that are traced there.

    Raises:
        TypeError: if something is excluded, which equations cannot hold.
    """
    if installation is not None and installation.exclude is not None:
        raise TypeError(
            f"{caller}: exclude must be None inside a function that is being traced, got "
            f"{installation.exclude!r}; enter the scope outside of jax.jit, or leave a part out by "
            f"`with jaxcudnn.installed(False)`"
        )
    return set_xla_metadata(**{MARK: _LEFT if installation is None else _TAKEN})


def in_force(marks: Mapping[str, Any] | None) -> Installation | None:
    """Give what holds for an equation with these marks, lowered here and now."""
    mark = (marks or {}).get(MARK)
    if mark is None:
        return _state.value
    return Installation() if mark == _TAKEN else None


def is_tracing() -> bool:
    """Say whether JAX is tracing a function here."""
    with eval_context():
        clean = get_opaque_trace_state(convention=MARK)
    return get_opaque_trace_state(convention=MARK) != clean


@contextmanager
def left_to_xla(ctx: mlir.LoweringRuleContext) -> Iterator[mlir.LoweringRuleContext]:
    """Give a context in which XLA computes every convolution of `lax`, in a `with` block.

    What this package lowers to `lax` would come back to it otherwise. Equal equations of a program
    are lowered once, so the context has a cache of its own.
    """
    token = _left_to_xla.set(True)
    try:
        yield ctx.replace(module_context=ctx.module_context.replace(lowering_cache={}))
    finally:
        _left_to_xla.reset(token)


def is_left_to_xla() -> bool:
    """Say whether this is within `left_to_xla`."""
    return _left_to_xla.get()
