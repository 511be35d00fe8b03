# SPDX-License-Identifier: Apache-2.0
"""Convolutions of code that calls `lax`, computed by cuDNN: `install`, `uninstall`, `installed`.

For CUDA, and only there, JAX asks this module how `lax.conv_general_dilated_p` is lowered. JAX has
differentiated, mapped and rematerialised the calls by then, so that gradients arrive as it writes
them: that of lhs with `lhs_dilation`, that of rhs with `rhs_dilation` and exchanged dimension
numbers, and with `batch_group_count` where there are groups. `_readings` gives each the window of
the forward convolution.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.interpreters import mlir

from . import _foreign, _installation, _readings
from ._installation import Exclude


def install(exclude: Exclude | None = None) -> None:
    """Have cuDNN compute the convolutions of all code that calls `jax.lax`, until `uninstall`.

    It holds in every thread, for whatever is traced and lowered from now on: `jax.jit` compiles
    functions again that it compiled before. Gradients are included. Only CUDA is affected. What
    cuDNN does not compute, XLA does, as before; so it does where XLA divides a program among
    several devices, outside of `jax.shard_map`, with one warning.

    A second call takes the place of the first. Call it outside of functions that JAX traces: called
    while one is traced, it may or may not hold for that one, which computes the same either way.

    Args:
        exclude: what is left to XLA: a function that takes a `jaxcudnn.LaxConvolution` and says
            whether to leave that one. It must be pure, and should be one object: programs are
            compiled again for another. None leaves nothing.

    Raises:
        TypeError: if `exclude` is neither None nor a function.
        RuntimeError: if this version of JAX does not say how it lowers convolutions itself.

    Example:
        >>> import jaxcudnn
        >>> jaxcudnn.install(exclude=lambda call: call.dtype == "float32")
        >>> jaxcudnn.uninstall()
    """
    installation = _installation.parse("jaxcudnn.install", exclude)
    _require_stock("jaxcudnn.install")
    _installation.set_everywhere(installation)


def uninstall() -> None:
    """Undo `install`: what is traced and lowered from now on is XLA's. Without it, do nothing."""
    _installation.set_everywhere(None)


@contextmanager
def installed(active: bool = True, *, exclude: Exclude | None = None) -> Iterator[None]:
    """Have cuDNN compute the convolutions of code that calls `jax.lax`, in a `with` block.

    It holds in this thread, for what is traced and lowered in the block, as `install` does for
    everything, and over what that says. The innermost of several blocks decides alone.

    Inside a function that is traced, it holds for the calls that are written in the block and for
    their gradients, wherever they are lowered. `installed(False)` there leaves a part of a model to
    XLA. (Such operations carry the frontend attribute "jaxcudnn" in the program's text.)

    Args:
        active: False to leave convolutions to XLA.
        exclude: as in `install`; None inside a function that is traced.

    Raises:
        TypeError: if `active` is not a truth value, or `exclude` neither None nor a function, or a
            function inside a function that is traced.
        ValueError: if there is an `exclude` where nothing is active.
        RuntimeError: as `install`.

    Example:
        >>> import jax, jaxcudnn
        >>> @jaxcudnn.installed()
        ... def gradient(loss, params):
        ...     return jax.grad(loss)(params)
    """
    caller = "jaxcudnn.installed"
    if not isinstance(active, (bool, np.bool_)):
        raise TypeError(
            f"{caller}: active must be True or False, got {active!r}; write exclude={active!r} to "
            f"leave something out"
        )
    if not active and exclude is not None:
        raise ValueError(
            f"{caller}: exclude must be None where active is False, got {exclude!r}; leave it out"
        )
    installation = _installation.parse(caller, exclude) if active else None
    if active:
        _require_stock(caller)
    with ExitStack() as scopes:
        if _installation.is_tracing():
            scopes.enter_context(_installation.mark(caller, installation))
        scopes.enter_context(_installation.scope(installation))
        yield


def _stock_rule() -> Any:
    """Give the rule by which JAX lowers its convolution on CUDA; None if that is kept elsewhere."""
    try:
        return mlir._platform_specific_lowerings["cuda"][lax.conv_general_dilated_p].rule
    except (AttributeError, KeyError):
        return None


def _require_stock(caller: str) -> None:
    if _stock is None:
        raise RuntimeError(
            f"{caller}: JAX must keep its own rule for convolutions where this version of jaxcudnn "
            f"finds it, got jax {jax.__version__}, which does not; take jax 0.10 to 0.12, or call "
            f"jaxcudnn's functions"
        )


_stock = _stock_rule()


def _lower(ctx: mlir.LoweringRuleContext, lhs: Any, rhs: Any, **params: Any) -> Any:
    """Lower a call of `lax`'s on CUDA: to cuDNN's where that is wanted and possible."""
    if not _installation.is_left_to_xla():
        context = ctx.jaxpr_eqn_ctx
        marks = context.xla_metadata if context else None
        call = _foreign.decide((*ctx.avals_in, *ctx.avals_out), params, marks)
        if not isinstance(call, str) and not _is_divided(ctx.module_context.axis_context):
            compute = partial(_readings.convolve, call=call)
            return mlir.lower_fun(compute, multiple_results=False)(ctx, lhs, rhs)
    with _installation.left_to_xla(ctx) as isolated:  # of a complex call it makes real ones
        return _stock(isolated, lhs, rhs, **params)


def _is_divided(axes: mlir.AxisContext) -> bool:
    """Say whether XLA is to divide this part of a program among devices, and warn if it is."""
    if isinstance(axes, mlir.SPMDAxisContext):
        automatic = set(axes.mesh.shape) - axes.manual_axes
        devices = math.prod(axes.mesh.shape[name] for name in automatic)
    else:
        devices = axes.num_devices
    if devices > 1:
        _warn_of_division()
    return devices > 1


@cache
def _warn_of_division() -> None:
    warnings.warn(
        "jaxcudnn.install: in a program for several devices a convolution must be inside "
        "jax.shard_map, over all axes of the mesh, to be cuDNN's; got one outside, and left it to "
        "XLA, which divides it among them, as all others like it. Use jax.shard_map, or say "
        "jaxcudnn.installed(False) where that is wanted",
        RuntimeWarning,
        stacklevel=2,
    )


# JAX asks once a program for equal equations. What is decided depends on nothing but the equation,
# its types and its metadata, and on what holds for the whole program.
if _stock is not None:
    mlir.register_lowering(lax.conv_general_dilated_p, _lower, platform="cuda")
