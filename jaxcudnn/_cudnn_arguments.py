# SPDX-License-Identifier: Apache-2.0
"""Reading the arguments that cuDNN's convolution attributes have, by cuDNN's names for them."""

from typing import Any

import numpy as np

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
) -> dict[str, Any]:
    """Read what cuDNN's convolution attributes say into fields of `ConvSpec`."""
    _check_compute_data_type(caller, compute_data_type)
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


def _is_convolution(caller: Caller, mode: Any) -> bool:
    """Read cuDNN's convolution mode, of which the one called convolution reverses the window."""
    name = _enumerator(caller, "convolution_mode", mode)
    if name not in ("CROSS_CORRELATION", "CONVOLUTION"):
        raise ValueError(
            f"{caller}: convolution_mode must be 'CROSS_CORRELATION' or 'CONVOLUTION', got "
            f"{mode!r}; leave it out for the former"
        )
    return name == "CONVOLUTION"


def _check_compute_data_type(caller: Caller, data_type: Any) -> None:
    """Accept what means float32, in JAX's words or in cuDNN's, or leaves the choice open."""
    if data_type is None:
        return
    is_dtype = isinstance(data_type, (type, np.dtype))
    name = np.dtype(data_type).name if is_dtype else data_type
    if _enumerator(caller, "compute_data_type", name) not in ("FLOAT", "FLOAT32", "NOT_SET"):
        raise NotImplementedError(
            f"{caller}: compute_data_type must be float32, got {data_type!r}; leave it out"
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
