# SPDX-License-Identifier: Apache-2.0
"""How far a computed sum of products may be from the exact one: the only place with such numbers.

Operands are given exactly, and each element of a result is a sum of `length` products. Let u be the
unit roundoff of a dtype, eps / 2. Whatever the order of summation (N. J. Higham, Accuracy and
Stability of Numerical Algorithms, 2nd edition, sections 3.1 and 4.2), to first order

    |computed - exact|  <=  (length u_float32 + 2 u_operand) magnitude  +  u_result |exact|,

where magnitude is the same sum over absolute values; u_operand is the error of rounding an operand
before it is multiplied, which is 0 unless TF32 is allowed, and then 2^-10, for hardware that keeps
10 bits by truncation; and the last term, for 16-bit results alone, is the rounding of the float32
sum. Below the smallest normal number, roundings err by up to the smallest subnormal one instead.

float64 is summed in float64, as the exact result is here too, so that both err by length u_float64.
A sum of several such results, `parts` of them, has a rounding of each and of each addition, of
which none is larger than u_result magnitude.
"""

import jax.numpy as jnp
import numpy as np

TF32_ROUNDOFF = 2.0**-10
SECOND_ORDER = 1.01  # makes up for what the first order leaves out while length u is small

# Central differences in float32 with step h err by h^2 / 6 third derivatives and by u_float32 / h
# values. Those differenced here are polynomials of degree 3 in the operands, with values of 10 to
# 100, which makes 2e-5 and 6e-4 at this step.
DIFFERENCES = {"eps": 1e-2, "atol": 2e-3, "rtol": 2e-3}

# Of a linear function they err by rounding alone, whatever the step. With a step of 1 and sums of
# a hundred products of integers up to 3 with normal numbers, that is 100 * 10 * u_float32 = 6e-5.
LINEAR_DIFFERENCES = {"eps": 1.0, "atol": 1e-3, "rtol": 1e-3}


def bound(
    exact: np.ndarray,
    magnitude: np.ndarray,
    *,
    dtype: str,
    length: int,
    tf32: bool = False,
    parts: int = 1,
) -> np.ndarray:
    """The largest error allowed in each element."""
    result = jnp.finfo(dtype)
    roundoff = float(result.eps) / 2
    if dtype == "float64":
        summed, rounded = 2 * length * roundoff, 0.0
    else:
        summed = length * float(jnp.finfo(jnp.float32).eps) / 2 + (2 * TF32_ROUNDOFF if tf32 else 0)
        rounded = 0.0 if dtype == "float32" else roundoff
    if parts > 1:
        summed += parts * roundoff
    return (
        SECOND_ORDER * (summed * magnitude + rounded * np.abs(exact))
        + float(result.smallest_subnormal) * length
    )


def assert_close(
    computed,
    exact: np.ndarray,
    magnitude: np.ndarray,
    *,
    dtype: str,
    length: int,
    tf32: bool = False,
    parts: int = 1,
) -> None:
    """Check dtype, shape and every element of a result."""
    assert str(computed.dtype) == dtype
    assert computed.shape == exact.shape
    error = np.abs(np.asarray(computed, np.float64) - exact)
    allowed = bound(exact, magnitude, dtype=dtype, length=length, tf32=tf32, parts=parts)
    excess = np.max(error - allowed, initial=-np.inf)
    assert excess <= 0, f"an error exceeds the {np.max(allowed):.3g} allowed by {excess:.3g}"


# No activation has a derivative of more than this: that of gelu at sqrt(2).
STEEPEST = 1.13
# How far an evaluated activation may be from the exact one, relative to 1 + |its argument|: some
# units of float32 for XLA's, and for kernels that cuDNN compiles the 2^-10.987 of tanh.approx.f32
# (PTX ISA, "Floating Point Instructions: tanh"), of which they make their exponentials.
EVALUATED = 2.0**-20
APPROXIMATED = 2.0**-10


def assert_close_activated(
    computed,
    activation,
    exact: np.ndarray,
    magnitude: np.ndarray,
    *,
    dtype: str,
    length: int,
    tf32: bool = False,
    evaluated: float = EVALUATED,
) -> None:
    """Check every element of a function of an exact sum, which may be of rounded parts.

    The convolution is rounded to `dtype` before the other terms are added, at most, and the sum
    before it is activated, if that is differentiated. Neither is larger than `magnitude`, the sum
    of all terms' absolute values.
    """
    sums = bound(magnitude, magnitude, dtype=dtype, length=length + 2, tf32=tf32, parts=2)
    wanted = activation(exact)
    rounded = 0.0 if dtype == "float32" else float(jnp.finfo(dtype).eps) / 2
    allowed = (
        STEEPEST * sums + evaluated * (1 + np.abs(exact)) + SECOND_ORDER * rounded * np.abs(wanted)
    )
    assert str(computed.dtype) == dtype
    assert computed.shape == wanted.shape
    excess = np.max(np.abs(np.asarray(computed, np.float64) - wanted) - allowed, initial=-np.inf)
    assert excess <= 0, f"an error exceeds the {np.max(allowed):.3g} allowed by {excess:.3g}"
