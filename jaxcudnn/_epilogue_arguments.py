# SPDX-License-Identifier: Apache-2.0
"""Reading what users say of an epilogue: bias, residual and activation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._activations import ACTIVATIONS, OF_INTEGERS
from ._arguments import Caller
from ._array_arguments import check_is_array
from ._epilogue import Extras
from ._spec import Layout, Shape


class Asked(NamedTuple):
    """What the user gave."""

    bias: Any = None
    residual: Any = None
    activation: Any = None


def parse_extras(caller: Caller, asked: Asked, layout: Layout, shape: Shape, dtype: str) -> Extras:
    """Check an epilogue against the result, whose shape is that of the user's array."""
    channels = shape[layout.axis("y", 1)]
    return Extras(
        residual=_parse_array(
            caller, "residual", asked.residual, shape, dtype,
            "the shape of the result", "broadcast it, or check padding and strides",
        ),
        bias=_parse_array(
            caller, "bias", asked.bias, (channels,), dtype,
            "the shape (K,), that is", f"reshape it, or check {caller.w}",
        ),
        activation=_parse_activation(caller, asked.activation, dtype),
    )  # fmt: skip


def _parse_array(
    caller: Caller, name: str, value: Any, shape: Shape, dtype: str, rule: str, remedy: str
) -> jax.Array | None:
    if value is None:
        return None
    check_is_array(caller, name, value)
    array = jnp.asarray(value)
    if array.shape != shape:
        raise ValueError(f"{caller}: {name} must have {rule} {shape}, got {array.shape}; {remedy}")
    if array.dtype != dtype:
        raise TypeError(
            f"{caller}: {name} must have the dtype of the result, {dtype}, got {array.dtype}; cast "
            f"it, or give preferred_element_type"
        )
    return array


def _parse_activation(caller: Caller, activation: Any, dtype: str) -> str | Callable[..., Any]:
    if activation is None:
        return ""
    if not isinstance(activation, str):
        if callable(activation):
            return activation
        raise TypeError(
            f"{caller}: activation must be a name, a function or None, got {activation!r}; write "
            f"'relu', for example"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{caller}: activation must be one of {', '.join(ACTIVATIONS)} or None, got "
            f"{activation!r}; give any other as a function"
        )
    if jnp.issubdtype(dtype, jnp.floating):
        return activation
    integers = jnp.issubdtype(dtype, jnp.integer)
    if not (integers and activation in OF_INTEGERS):
        allowed = f"{', '.join(OF_INTEGERS)} or None" if integers else "None"
        raise TypeError(
            f"{caller}: activation must be {allowed} for a result of {dtype}, got {activation!r}; "
            f"give it as a function if it is meant"
        )
    return activation
