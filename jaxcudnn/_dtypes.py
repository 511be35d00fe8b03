# SPDX-License-Identifier: Apache-2.0
"""The dtypes that convolutions take: what products are summed in, and what cuDNN is given.

Whatever `lax` takes, this takes. cuDNN is given arrays of one dtype, one of `CUDNN`, such that no
number changes on the way: both operands are converted to it without rounding, and the result is
wanted in it, or it is the one in which products are summed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

PrecisionPair = tuple[lax.Precision, lax.Precision]


class Dtypes(NamedTuple):
    """The dtypes of a convolution's three arrays, and of their gradients."""

    x: str
    w: str
    y: str


CUDNN = ("float16", "bfloat16", "float32", "float64")
"""The dtypes in which cuDNN computes all three operations by precompiled plans of any size, the
cheaper first. docs/decisions.md says what became of the plans for 8 bits and for wider results."""


def computed_in(first: str, second: str, result: str) -> str | None:
    """Give the dtype in which cuDNN is given a convolution of two dtypes, if there is one."""
    sums = accumulator(first, second, result)
    return next(
        (
            dtype
            for dtype in CUDNN
            if is_exact(first, dtype) and is_exact(second, dtype) and dtype in (result, sums)
        ),
        None,
    )


def accumulator(first: str, second: str, result: str) -> str:
    """Give the dtype in which products of two dtypes are summed, whatever computes them.

    Integers wrap around, so that any wide enough integer gives the same result.
    """
    if is_integer(result):
        return result if jnp.iinfo(result).bits >= 32 else "int32"
    double = {"float64", "complex128"}.intersection((first, second, result))
    return "float64" if double else "float32"


def multiplied_in(first: str, second: str, result: str) -> str:
    """Give the dtype to which `lax` has operands converted: their own, where it has kernels."""
    own = first if first == second else None
    sums = accumulator(first, second, result)
    return own if own in ("float16", "bfloat16") and sums == "float32" else sums


def is_integer(dtype: str) -> bool:
    """Say whether a dtype is one of integers."""
    return jnp.issubdtype(dtype, jnp.integer)


def is_complex(dtype: str) -> bool:
    """Say whether a dtype is one of complex numbers."""
    return jnp.issubdtype(dtype, jnp.complexfloating)


def is_exact(dtype: str, target: str) -> bool:
    """Say whether every number of a dtype is also one of `target`, a floating-point dtype."""
    return _fits(dtype, target, int(jnp.finfo(target).nmant))


def _fits(dtype: str, floating: str, fraction_bits: int) -> bool:
    if is_integer(dtype):
        return jnp.iinfo(dtype).bits <= fraction_bits + 1
    source, target = jnp.finfo(dtype), jnp.finfo(floating)
    return (
        source.nmant <= fraction_bits
        and float(source.max) <= float(target.max)
        and float(source.smallest_subnormal) >= float(target.smallest_subnormal)
    )


def allows_tf32(first: str, second: str, precision: PrecisionPair) -> bool:
    """Say whether operands given as float32 may be rounded to TF32, which has 10 bits of fraction.

    They may if they are not changed by it, and else, as XLA:GPU decides it for
    `lax.conv_general_dilated`, unless one of two float32 operands asks for `Precision.HIGHEST`.
    """
    rounded = [dtype for dtype in (first, second) if not _fits(dtype, "float32", 10)]
    forbidden = any(map(is_integer, rounded)) or lax.Precision.HIGHEST in precision
    return not (rounded and forbidden)


def resolve_precision(caller: object, precision: lax.PrecisionLike) -> PrecisionPair:
    """Turn any `precision` that `lax` accepts into one value for each operand.

    None takes `jax_default_matmul_precision` as it is now: the result belongs to the trace, and a
    later change of the setting does not reach it. Dot algorithms count as DEFAULT, because that is
    what `lax` writes for a convolution when it is given one, F32_F32_F32 included.
    """
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    if precision is None or _is_dot_algorithm(precision):
        return lax.Precision.DEFAULT, lax.Precision.DEFAULT
    pair = precision if isinstance(precision, (tuple, list)) else (precision, precision)
    try:
        first, second = (_one_precision(value) for value in pair)
    except ValueError as error:
        raise ValueError(
            f"{caller}: precision must be None, a jax.lax.Precision, its name, a pair of these, "
            f"or a jax.lax.DotAlgorithmPreset, got {precision!r}; leave it out for the default"
        ) from error
    return first, second


def _is_dot_algorithm(precision: object) -> bool:
    if isinstance(precision, str):
        return precision in lax.DotAlgorithmPreset.__members__
    return isinstance(precision, (lax.DotAlgorithm, lax.DotAlgorithmPreset))


def _one_precision(value: object) -> lax.Precision:
    # The enumeration would also take None and its own integers, which lax refuses.
    if not isinstance(value, (str, lax.Precision)):
        raise ValueError(value)
    return lax.Precision(value)
