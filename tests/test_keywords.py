# SPDX-License-Identifier: Apache-2.0
"""No parameter of a public function is ignored: some value changes the result or is refused.

The result is the program that XLA gets, with the names of its operations.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcudnn


def ones(*shape: int, dtype: str = "float32"):
    return np.ones(shape, jnp.dtype(dtype))


X, W, Y = ones(2, 4, 6, 6), ones(4, 4, 3, 3), ones(2, 4, 6, 6)
PAIRS = ((1, 0), (1, 0))
IOHW = ("NCHW", "IOHW", "NCHW")
HALF = {"dtype": "bfloat16"}

# Of each function arguments that it accepts, and for each parameter another value; with a
# dictionary, beside what else is to be changed in both calls.
LAX: dict[str, Any] = {
    "lhs": ones(2, 4, 7, 6),
    "rhs": ones(4, 4, 2, 3),
    "window_strides": (1, 2),
    "padding": "SAME",
    "precision": "highest",
    "preferred_element_type": (
        "float32",
        {"lhs": ones(*X.shape, **HALF), "rhs": ones(*W.shape, **HALF)},
    ),
}
DILATIONS: dict[str, Any] = {"lhs_dilation": (2, 2), "rhs_dilation": (2, 1)}
GENERAL: dict[str, Any] = {"lhs": X, "rhs": W, "window_strides": (1, 1), "padding": PAIRS}
CUDNN: dict[str, Any] = {
    "padding": 2,
    "pre_padding": (1, {"padding": None, "post_padding": 1}),
    "post_padding": (1, {"padding": None, "pre_padding": 1}),
    "stride": 2,
    "dilation": 2,
    "convolution_mode": "CONVOLUTION",
    "compute_data_type": "HALF",
    "name": "stem",
    "dimension_numbers": IOHW,
    "precision": "highest",
    "preferred_element_type": "float16",
    **dict.fromkeys(["image_descale", "weight_descale", "loss_descale", "filter_descale"], 2.0),
}
TORCH: dict[str, Any] = {
    "a": X, "weight": W, "bias": None, "stride": 1, "padding": 0, "dilation": 1,
    "transposed": False, "output_padding": 0, "groups": 1,
}  # fmt: skip
TABLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "conv": (GENERAL | {"padding": "VALID"}, LAX),
    "conv_with_general_padding": (GENERAL | dict.fromkeys(DILATIONS), LAX | DILATIONS),
    "conv_general_dilated": (
        GENERAL,
        LAX
        | DILATIONS
        | {
            "dimension_numbers": IOHW,
            "feature_group_count": (2, {"rhs": ones(4, 2, 3, 3)}),
            "batch_group_count": 2,
            "out_sharding": jax.P("x"),
        },
    ),
    "conv_transpose": (
        {"lhs": X, "rhs": ones(3, 3, 6, 6), "strides": (1, 1), "padding": PAIRS},
        LAX
        | {
            "rhs": ones(2, 3, 6, 6),
            "strides": (2, 1),
            "rhs_dilation": (2, 1),
            "dimension_numbers": ("NHWC", "HWOI", "NHWC"),
            "transpose_kernel": True,
            "use_consistent_padding": True,
            "preferred_element_type": (
                "float32",
                {"lhs": ones(*X.shape, **HALF), "rhs": ones(3, 3, 6, 6, **HALF)},
            ),
        },
    ),
    "conv_fprop": (
        {"image": X, "weight": W, "padding": 1},
        {"image": ones(2, 4, 7, 6), "weight": ones(4, 4, 2, 3), **CUDNN},
    ),
    "conv_dgrad": (
        {"loss": Y, "filter": W, "image_spatial_shape": (6, 6), "padding": 1},
        {
            **CUDNN,
            "loss": ones(3, 4, 6, 6),
            "filter": ones(4, 2, 3, 3),
            "image_spatial_shape": ((12, 12), {"stride": 2}),
            "groups": 2,
        },
    ),
    "conv_wgrad": (
        {"image": X, "loss": Y, "filter_spatial_shape": (3, 3), "padding": 1},
        {
            **CUDNN,
            "image": ones(2, 2, 6, 6),
            "loss": ones(2, 2, 6, 6),
            "filter_spatial_shape": ((1, 1), {"padding": 0}),
            "groups": 2,
        },
    ),
    "convolution": (
        TORCH,
        {
            "a": ones(2, 4, 7, 6),
            "weight": ones(4, 4, 2, 3),
            "bias": ones(4),
            "stride": 2,
            "padding": "same",
            "dilation": 2,
            "transposed": True,
            "output_padding": (1, {"transposed": True, "stride": 2}),
            "groups": (2, {"weight": ones(4, 2, 3, 3)}),
            "precision": "highest",
        },
    ),
}
EPILOGUE: dict[str, Any] = {"bias": ones(4), "residual": ones(2, 4, 5, 5), "activation": "gelu"}


def with_epilogue(name: str, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The row of a function with x and w for lhs and rhs, and with what it adds."""
    words = {"lhs": "x", "rhs": "w"}

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {words.get(key, key): renamed(each) for key, each in value.items()}
        if isinstance(value, tuple) and isinstance(value[-1], dict):
            return value[0], renamed(value[1])
        return value

    base, others = map(renamed, TABLE[name])
    return base, others | EPILOGUE | changes


TABLE["conv_bias_act"] = with_epilogue("conv_general_dilated")
TABLE["conv_transpose_bias_act"] = with_epilogue(
    "conv_transpose", bias=ones(6), residual=ones(2, 3, 5, 6)
)
FUNCTIONS = {name: function for name, function in vars(jaxcudnn).items() if name.startswith("conv")}
PARAMETERS = [
    (name, parameter)
    for name, function in FUNCTIONS.items()
    for parameter in inspect.signature(function).parameters
]


def outcome(name: str, arguments: dict[str, Any]) -> tuple[bool, str]:
    """Whether the call is accepted, and the program or else the error."""
    arrays = {key: value for key, value in arguments.items() if isinstance(value, np.ndarray)}
    rest = {key: value for key, value in arguments.items() if key not in arrays}
    call = jax.jit(lambda arrays: FUNCTIONS[name](**arrays, **rest))
    try:
        traced = call.trace(arrays)
        names = traced.jaxpr.jaxpr.pretty_print(name_stack=True)
        return True, names + traced.lower().as_text()
    except (TypeError, ValueError, NotImplementedError) as error:
        return False, str(error)


@pytest.mark.parametrize("name, parameter", PARAMETERS)
def test_every_parameter_matters(name: str, parameter: str):
    base, others = TABLE[name]
    value, context = {**others, "options": {"deterministic": True}}[parameter], {}
    if isinstance(value, tuple) and isinstance(value[-1], dict):
        value, context = value
    accepted, program = outcome(name, base | context | {parameter: value})
    assert (accepted, program) != outcome(name, base | context)
    if not accepted:
        assert parameter in program


@pytest.mark.parametrize("name", FUNCTIONS)
def test_equal_calls_give_equal_programs(name: str):
    base, _ = TABLE[name]
    assert outcome(name, base) == outcome(name, dict(base))
    assert outcome(name, base)[0]
