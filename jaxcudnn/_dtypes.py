# SPDX-License-Identifier: Apache-2.0
"""The dtypes that convolutions take, and the precision that each is computed with."""

from typing import NamedTuple

import jax
from jax import lax

PrecisionPair = tuple[lax.Precision, lax.Precision]


class DType(NamedTuple):
    """What one dtype of operands and result implies."""

    accumulate: str
    """Name of the dtype that products are summed in, on every platform."""

    rounds_to_tf32: bool
    """Whether tensor cores may round operands of this dtype to TF32 before they multiply."""


DTYPES = {
    "float16": DType(accumulate="float32", rounds_to_tf32=False),
    "bfloat16": DType(accumulate="float32", rounds_to_tf32=False),
    "float32": DType(accumulate="float32", rounds_to_tf32=True),
}


def allows_tf32(dtype: str, precision: PrecisionPair) -> bool:
    """Say whether TF32 is acceptable, as XLA:GPU decides it for `lax.conv_general_dilated`.

    It is unless one of two float32 operands asks for `Precision.HIGHEST`. 16-bit operands have
    nothing to round, so nothing is forbidden for them.
    """
    return not DTYPES[dtype].rounds_to_tf32 or lax.Precision.HIGHEST not in precision


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
