# SPDX-License-Identifier: Apache-2.0
"""What `install` reads in calls of `lax` and in the gradients that JAX writes of them.

Each is traced without this package and computed twice: as JAX does it, and with every convolution
computed by the function that `install` has lowered on CUDA. Operands are small integers, so that
values are compared with ==.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal

import jaxcudnn
import lowered
import oracle
from cases import CASES, Case, integers, named, parametrize
from jaxcudnn import _foreign, _readings
from jaxcudnn._readings import Call

NHWC_HWIO = ("NHWC", "HWIO", "NHWC")


class Recorder:
    """Computes functions with the convolutions that `install` makes of `lax`'s."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    @property
    def windows(self) -> list[tuple[int, ...]]:
        """Of the operations that were computed."""
        operations = [each for call in self.calls for each in _foreign.operations(call)]
        return [each.spec.w_shape[2:] for each in operations]

    def compute(self, f: Any, *arguments: jax.Array) -> list[Any]:
        closed = jax.make_jaxpr(f)(*arguments)
        values: dict[Any, Any] = dict(zip(closed.jaxpr.invars, arguments, strict=True))
        values |= zip(closed.jaxpr.constvars, closed.consts, strict=True)
        read = lambda atom: atom.val if isinstance(atom, Literal) else values[atom]  # noqa: E731
        for equation in closed.jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            if equation.primitive is lax.conv_general_dilated_p:
                results = [self._convolve(equation, *operands)]
            else:
                results = equation.primitive.bind(*operands, **equation.params)
                results = results if equation.primitive.multiple_results else [results]
            values |= zip(equation.outvars, results, strict=True)
        return [read(atom) for atom in closed.jaxpr.outvars]

    def _convolve(self, equation: Any, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        types = [atom.aval for atom in (*equation.invars, *equation.outvars)]
        with jaxcudnn.installed():
            call = _foreign.decide(types, equation.params, None)
        assert isinstance(call, Call), call
        self.calls.append(call)
        result = _readings.convolve(lhs, rhs, call)
        assert (result.shape, result.dtype) == (types[2].shape, types[2].dtype)
        return result


def training(conv: Any):
    """The convolution and, as JAX writes them, its two gradients."""

    def f(x, w, dy):
        y, pullback = jax.vjp(conv, x, w)
        return y, *pullback(dy)

    return f


def check(conv: Any, x: jax.Array, w: jax.Array, expected: Any = None) -> Recorder:
    y = jax.eval_shape(conv, x, w)
    arguments = x, w, integers(3, y.shape).astype(y.dtype)
    recorder = Recorder()
    ours = jax.jit(partial(recorder.compute, training(conv)))(*arguments)
    expected = (expected or jax.jit(training(conv)))(*arguments)
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(recorder.calls) == 3
    return recorder


EMPTY = named(
    "2d-crop-of-everything", "2d-crop-to-nothing", "no-images", "no-input-channels",
    "no-output-channels", "no-channels-grouped", "empty-image", "empty-image-padded-to-output",
    "window-larger-than-image", "window-larger-than-padded-image",
)  # fmt: skip


@parametrize([case for case in CASES if case not in EMPTY])
def test_values(case: Case):
    """Strides, paddings, dilations, groups and layouts, against the definition.

    Not against JAX, whose gradients have negative padding, which XLA's CPU compiler gets wrong up
    to jax 0.11.
    """

    def definition(x, w, dy):
        operands = {"y": (x, w), "x": (dy, w), "w": (x, dy)}
        return [oracle.compute(role, *pair, case)[0] for role, pair in operands.items()]

    check(case.lax_conv, *case.operands("y", integers), definition)


@parametrize(EMPTY)
def test_what_is_empty_is_never_cudnns(case: Case):
    types = [jax.ShapeDtypeStruct(case.shape(role), jnp.float32) for role in "xwy"]
    f = training(case.lax_conv)
    with jaxcudnn.installed():
        ours, _ = lowered.convolutions(f, *types)
        rows = jaxcudnn.explain(f)(*types)
    assert ours == sum(row.count for row in rows if row.route == "cuDNN")
    assert all(0 not in shape for row in rows if row.spec for shape in row.shapes)


@pytest.mark.parametrize(
    ("dtype", "preferred"),
    [
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("complex64", None),
    ],
)
@parametrize(named("2d-same-strided", "2d-grouped-strided"))
def test_dtypes(case: Case, dtype: str, preferred: str | None):
    conv = partial(lax.conv_general_dilated, **case.arguments, preferred_element_type=preferred)
    recorder = check(conv, *case.operands("y", integers, dtype))
    assert len(recorder.windows) == (9 if dtype == "complex64" else 3)


TRANSPOSED = {
    "spread": ((2, 3, 5, 4), (4, 3, 3, 2), {"lhs_dilation": (2, 3)}),
    "spread and dilated": (
        (2, 3, 5, 4), (4, 3, 3, 2), {"lhs_dilation": (3, 1), "rhs_dilation": (1, 2)},
    ),
    "spread and strided": (
        (2, 3, 5, 4), (4, 3, 3, 2), {"lhs_dilation": (2, 3), "window_strides": (3, 2)},
    ),
    "spread and grouped": (
        (2, 4, 5, 4), (6, 2, 3, 2), {"lhs_dilation": (2, 2), "feature_group_count": 2},
    ),
    "groups of images": ((4, 3, 6, 5), (4, 3, 3, 2), {"batch_group_count": 2}),
    "groups of images, strided": (
        (6, 2, 6, 5), (3, 2, 3, 2), {"batch_group_count": 3, "window_strides": (2, 1)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSPOSED)
def test_what_is_not_a_forward_convolution(name: str):
    x, w, arguments = TRANSPOSED[name]
    arguments = {"window_strides": (1, 1), "padding": [(1, 2), (0, 1)]} | arguments
    check(partial(lax.conv_general_dilated, **arguments), integers(1, x), integers(2, w))


# Sizes at which a gradient with a filter as large as the image would be slow.
LAYERS = {
    "3x3": ((2, 56, 56, 16), (3, 3, 16, 16), {}),
    "3x3, channels first": (
        (2, 16, 56, 56), (16, 16, 3, 3), {"dimension_numbers": ("NCHW", "OIHW", "NCHW")},
    ),
    "strided": ((2, 56, 56, 16), (3, 3, 16, 32), {"window_strides": (2, 2)}),
    "stem": ((2, 112, 112, 3), (7, 7, 3, 16), {"window_strides": (2, 2)}),
    "patches": ((2, 112, 112, 3), (16, 16, 3, 32), {"window_strides": (16, 16)}),
    "dilated": ((2, 56, 56, 16), (3, 3, 16, 16), {"rhs_dilation": (4, 4)}),
    "pointwise": ((2, 56, 56, 16), (1, 1, 16, 32), {}),
    "grouped": ((2, 56, 56, 16), (3, 3, 4, 16), {"feature_group_count": 4}),
    "depthwise": ((2, 56, 56, 16), (7, 7, 1, 16), {"feature_group_count": 16}),
    "depthwise, strided": (
        (2, 56, 56, 16), (5, 5, 1, 32), {"feature_group_count": 16, "window_strides": (2, 2)},
    ),
    "causal": (
        (2, 1024, 16), (4, 1, 16),
        {"dimension_numbers": ("NWC", "WIO", "NWC"), "window_strides": (1,),
         "padding": [(3, 0)], "feature_group_count": 16},
    ),
    "3d": (
        (1, 24, 24, 24, 8), (3, 3, 3, 8, 8),
        {"dimension_numbers": ("NDHWC", "DHWIO", "NDHWC"), "window_strides": (2, 2, 2)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_the_small_operand_is_the_window(name: str):
    """Nothing is computed here, only traced."""
    x, w, arguments = LAYERS[name]
    arguments = {
        "window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NHWC_HWIO,
    } | arguments  # fmt: skip
    conv = partial(lax.conv_general_dilated, **arguments)
    axes = lax.conv_dimension_numbers(x, w, arguments["dimension_numbers"]).rhs_spec[2:]
    types = jax.ShapeDtypeStruct(x, "bfloat16"), jax.ShapeDtypeStruct(w, "bfloat16")
    with jaxcudnn.installed():
        rows = jaxcudnn.explain(training(conv))(*types, jax.eval_shape(conv, *types))
    windows = [row.spec and row.spec.w_shape[2:] for row in rows]
    assert windows == [tuple(w[axis] for axis in axes)] * 3


def test_transposed_convolutions_have_their_filter_for_a_window():
    """As layers of Flax, Haiku and Keras write them."""

    def conv(x, w):
        return lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=NHWC_HWIO)

    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((2, 32, 32, 16), (4, 4, 16, 8)))
    with jaxcudnn.installed():
        rows = jaxcudnn.explain(training(conv))(x, w, jax.eval_shape(conv, x, w))
    assert [row.op for row in rows] == ["dgrad", "wgrad", "fprop"]
    assert {row.spec.w_shape[2:] for row in rows if row.spec} == {(4, 4)}


@pytest.mark.parametrize(
    ("precision", "allowed"), [(None, True), ("default", True), ("highest", False)]
)
def test_precision(precision: str | None, allowed: bool):
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 8, 8, 8), (8, 8, 3, 3)))
    conv = partial(lax.conv_general_dilated, window_strides=(1, 1), padding="SAME")
    with jaxcudnn.installed():
        said = jaxcudnn.explain(partial(conv, precision=precision))(x, w)
        with jax.default_matmul_precision(precision):
            set_ = jaxcudnn.explain(training(conv))(x, w, jax.eval_shape(conv, x, w))
    assert [row.allow_tf32 for row in (*said, *set_)] == [allowed] * 4


def test_options_are_those_where_it_is_lowered():
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 8, 8, 8), (8, 8, 3, 3)))
    conv = partial(lax.conv_general_dilated, window_strides=(1, 1), padding="SAME")
    with jaxcudnn.installed(), jaxcudnn.options(deterministic=True):
        (row,) = jaxcudnn.explain(conv)(x, w)
    assert row.spec is not None
    assert row.spec.options.deterministic
