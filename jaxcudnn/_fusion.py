# SPDX-License-Identifier: Apache-2.0
"""Which convolutions cuDNN is asked to compute together with their epilogue.

cuDNN has precompiled engines for fprop with residual, bias and either ReLU or nothing, given a
bias. For the other activations, and for dgrad, it compiles a kernel at run time. It is always
asked whether it has a plan, and what it refuses is computed by two programs, its own and XLA's. The
rules here are for what would be slow, and for programs that are lowered where there is no GPU to
ask.
"""

from dataclasses import replace

import jax.numpy as jnp

from ._options import ALGORITHMS, Options
from ._spec import ConvSpec, Epilogue

PRECOMPILED = ("", "relu")
"""Activations that cuDNN has in precompiled engines, for fprop alone."""

SLOW = {"relu6": "cuDNN has only a slow engine with relu6"}
"""Activations that are never fused, and why."""

DTYPES = ("float16", "bfloat16", "float32")
"""Of all arrays of what is fused."""

COMPILE_MILLISECONDS = 3000
"""What cuDNN takes to compile a kernel for an epilogue, 1.3 to 3.2 seconds. What fusing saves, a
pass over the result, earns that in some ten thousand runs, so that the user has to ask for it."""

FEWEST_CHANNELS = 16
"""In a group, if there are several."""


def fused_form(op: str, spec: ConvSpec, epilogue: Epilogue, *, has_device: bool) -> str:
    """Say why a convolution is not fused with its epilogue; nothing if cuDNN is asked for it.

    Args:
        op: "fprop" or "dgrad".
        spec: the forward convolution, and the options of the call.
        epilogue: what would be fused.
        has_device: whether there is a GPU here that can be asked for a plan.
    """
    dtype = spec.dtype("y" if op == "fprop" else "x")
    inputs, outputs = spec.w_shape[1], spec.w_shape[0] // spec.groups
    if dtype not in DTYPES:
        return f"cuDNN fuses {', '.join(DTYPES)}, and the result is {dtype}"
    if spec.options.algorithm_for(op) not in ALGORITHMS:
        return "the options name a plan, and names are of plans for the convolution alone"
    if spec.groups > 1 and min(inputs, outputs) < FEWEST_CHANNELS:
        return f"it has fewer than {FEWEST_CHANNELS} channels a group"
    if epilogue.activation in SLOW:
        return SLOW[epilogue.activation]
    precompiled = _has_precompiled_engine(op, epilogue)
    if not precompiled and not spec.options.allow_runtime_compilation:
        return "cuDNN would compile a kernel at run time, which the options forbid"
    if not precompiled and not _may_compile(spec.options, op):
        return (
            f"cuDNN would compile a kernel at run time, for which tuning_budget is less than "
            f"{COMPILE_MILLISECONDS} ms"
        )
    multiple = 16 // jnp.dtype(dtype).itemsize
    certain = precompiled and spec.groups == 1 and inputs % multiple == outputs % multiple == 0
    if not has_device and not certain:
        return "without a GPU here, cuDNN is not known to have a plan for both together"
    return ""


def _may_compile(options: Options, op: str) -> bool:
    budget = options.tuning_budget.milliseconds
    return options.algorithm_for(op) == "exhaustive" or budget >= COMPILE_MILLISECONDS


def completed(op: str, epilogue: Epilogue) -> Epilogue:
    """Add the bias that precompiled engines want, which is then of zeros."""
    return replace(epilogue, bias=True) if _has_precompiled_engine(op, epilogue) else epilogue


def takes_any_address(op: str, epilogue: Epilogue) -> bool:
    """Say whether cuDNN has a plan for arrays at any address, as its precompiled generic engine is.

    Kernels that are compiled at run time want multiples of 16 bytes.
    """
    return _has_precompiled_engine(op, epilogue)


def _has_precompiled_engine(op: str, epilogue: Epilogue) -> bool:
    return op == "fprop" and epilogue.activation in PRECOMPILED
