# SPDX-License-Identifier: Apache-2.0
"""The activations in NumPy, from their definitions, and the epilogues that tests draw from."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jaxcudnn
from cases import Case

_erf = np.vectorize(math.erf, otypes=[np.float64])

ACTIVATIONS: dict[str | None, Callable[[np.ndarray], np.ndarray]] = {
    None: lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "relu6": lambda z: np.clip(z, 0, 6),
    "leaky_relu": lambda z: np.where(z >= 0, z, 0.01 * z),
    "gelu": lambda z: z * (1 + _erf(z / math.sqrt(2))) / 2,
    "gelu_tanh": lambda z: z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2,
    "silu": lambda z: z / (1 + np.exp(-z)),
    "elu": lambda z: np.where(z > 0, z, np.expm1(np.minimum(z, 0))),
    "softplus": lambda z: np.logaddexp(z, 0),
    "tanh": np.tanh,
    "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
}
NAMES = [name for name in ACTIVATIONS if name is not None]
FROM_INPUT = ("gelu", "gelu_tanh", "silu")
"""Those whose derivative is not a function of the output."""

ADDENDS = list(itertools.product((False, True), repeat=2))
"""Whether there is a bias, and whether there is a residual."""


def conv(case: Case, activation: Any = "relu", **changes: Any) -> Callable[..., jax.Array]:
    """Of x, w, bias and residual, the last two of which may be None."""
    arguments = case.arguments | changes
    return lambda x, w, bias=None, residual=None: jaxcudnn.conv_bias_act(
        x, w, bias, residual, activation, **arguments
    )


def channels_shape(case: Case) -> tuple[int]:
    """That of a bias."""
    return (case.k,)


def per_channel(case: Case, bias: Any) -> np.ndarray:
    """A bias in float64, such that it is added to the right axis."""
    shape = [1] * len(case.y_shape)
    shape[case.axes("y")[1]] = case.k
    return np.asarray(bias, np.float64).reshape(shape)


def exact_sum(case: Case, y: np.ndarray, bias: Any = None, residual: Any = None) -> np.ndarray:
    """A convolution's exact result, bias and residual added."""
    total = y
    if bias is not None:
        total = total + per_channel(case, bias)
    if residual is not None:
        total = total + np.asarray(residual, np.float64)
    return total
