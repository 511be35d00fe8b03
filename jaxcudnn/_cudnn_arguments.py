# SPDX-License-Identifier: Apache-2.0
"""Reading the arguments that cuDNN's convolution attributes have, by cuDNN's names for them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ._arguments import Caller, parse_ints


def parse_geometry(
    caller: Caller,
    num_spatial: int,
    *,
    padding: Any,
    pre_padding: Any,
    post_padding: Any,
    stride: Any,
    dilation: Any,
    convolution_mode: Any,
    compute_data_type: Any,
    sums: str,
) -> dict[str, Any]:
    """Read what cuDNN's convolution attributes say into fields of `ConvSpec`.

    `sums` is the dtype in which products are summed, which is not the user's to choose.
    """
    _check_compute_data_type(caller, compute_data_type, sums)
    sides = {"padding": padding, "pre_padding": pre_padding, "post_padding": post_padding}
    given = {name: value for name, value in sides.items() if value is not None}
    if [*given] not in (["padding"], ["pre_padding", "post_padding"]):
        both = "padding" in given
        remedy = "leave out padding or the others" if both else "give the other one too"
        raise TypeError(
            f"{caller}: either padding or both pre_padding and post_padding must be given, got "
            f"{' and '.join(given) or 'none of them'}; "
            f"{remedy if given else 'write padding=0 for none'}"
        )
    low, *_, high = [
        parse_ints(caller, name, value, num_spatial, minimum=0, scalar=True)
        for name, value in (*given.items(), *given.items())
    ]
    return {
        "strides": parse_ints(caller, "stride", stride, num_spatial, minimum=1, scalar=True),
        "padding": tuple(zip(low, high, strict=True)),
        "dilation": parse_ints(caller, "dilation", dilation, num_spatial, minimum=1, scalar=True),
        "flip": _is_convolution(caller, convolution_mode),
    }


def parse_descales(
    caller: Caller, descales: Mapping[str, ArrayLike | None], result_dtype: str
) -> jax.Array | None:
    """Read factors of the sums into one, in float32 or, for a float64 result, in float64."""
    given = {name: value for name, value in descales.items() if value is not None}
    if not given:
        return None
    if not jnp.issubdtype(result_dtype, jnp.floating):
        raise TypeError(
            f"{caller}: {' and '.join(given)} must be for a floating-point result, got one of "
            f"{result_dtype}; give preferred_element_type"
        )
    product = jnp.ones((), "float64" if result_dtype == "float64" else "float32")
    for name, value in given.items():
        try:
            factor = jnp.asarray(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{caller}: {name} must be a number, got {value!r}; leave it out for 1"
            ) from error
        if factor.size != 1 or not _is_real(factor):
            raise ValueError(
                f"{caller}: {name} must be a real number for the whole array, got shape "
                f"{factor.shape} and dtype {factor.dtype}; multiply the result by what differs "
                f"between channels"
            )
        product *= factor.reshape(()).astype(product.dtype)
    return product


def _is_real(array: jax.Array) -> bool:
    return any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.integer))


def _is_convolution(caller: Caller, mode: Any) -> bool:
    """Read cuDNN's convolution mode, of which the one called convolution reverses the window."""
    name = _enumerator(caller, "convolution_mode", mode)
    if name not in ("CROSS_CORRELATION", "CONVOLUTION"):
        raise ValueError(
            f"{caller}: convolution_mode must be 'CROSS_CORRELATION' or 'CONVOLUTION', got "
            f"{mode!r}; leave it out for the former"
        )
    return name == "CONVOLUTION"


def _check_compute_data_type(caller: Caller, data_type: Any, sums: str) -> None:
    """Accept what means the dtype `sums`, in JAX's words or in cuDNN's, or leaves it open."""
    if data_type is None:
        return
    is_dtype = isinstance(data_type, (type, np.dtype))
    name = np.dtype(data_type).name if is_dtype else data_type
    meant = _enumerator(caller, "compute_data_type", name)
    cudnn = {"float32": "FLOAT", "float64": "DOUBLE"}.get(sums, sums.upper())
    if meant not in ("NOT_SET", cudnn, sums.upper()):
        raise NotImplementedError(
            f"{caller}: compute_data_type must be {sums} for these dtypes, got {data_type!r}; "
            f"leave it out"
        )


def _enumerator(caller: Caller, argument: str, value: Any) -> str:
    """Give the name of an enumerator of cuDNN's, or one written as a string, in capitals."""
    name = value if isinstance(value, str) else getattr(value, "name", None)
    if not isinstance(name, str):
        raise TypeError(
            f"{caller}: {argument} must be a string or an enumerator of cuDNN's, got {value!r}; "
            f"leave it out for the default"
        )
    return name.upper()
