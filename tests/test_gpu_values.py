# SPDX-License-Identifier: Apache-2.0
"""Every number that cuDNN computes, against the definition in float64.

Small integers make every product and sum exact, whatever the order, so those results are compared
with == after the one rounding to the result's dtype. Random operands are held to the error bound.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import cases
import jaxcudnn
import oracle
from cases import OPERANDS, Case, case, integers, normal
from jaxcudnn import _load
from tolerance import assert_close

pytestmark = pytest.mark.gpu

NHWC = cases.CHANNELS_LAST[2]
# Sizes at which cuDNN offers its tensor-core engines; the shared table's are too small for them.
LAYERS = [
    case("3x3", (14, 14), (3, 3), "SAME", c=64, k=128, dimension_numbers=NHWC),
    case(
        "3x3-hwio",
        (14, 14),
        (3, 3),
        "SAME",
        c=64,
        k=128,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    ),
    case(
        "3x3-oihw",
        (14, 14),
        (3, 3),
        "SAME",
        c=64,
        k=128,
        dimension_numbers=("NHWC", "OIHW", "NHWC"),
    ),
    case("3x3-nchw", (14, 14), (3, 3), "SAME", c=64, k=128),
    case(
        "5x3-hwio-asymmetric",
        (12, 13),
        (5, 3),
        ((2, 1), (0, 2)),
        c=32,
        k=64,
        strides=(2, 1),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    ),
    case("1x1", (14, 14), (1, 1), c=64, k=256, dimension_numbers=NHWC),
    case("1x1-hwio", (14, 14), (1, 1), c=64, k=256, dimension_numbers=("NHWC", "HWIO", "NHWC")),
    case("strided", (15, 14), (3, 3), "SAME", c=64, k=64, strides=(2, 2), dimension_numbers=NHWC),
    case(
        "stem",
        (32, 32),
        (7, 7),
        ((3, 3), (3, 3)),
        c=3,
        k=64,
        strides=(2, 2),
        dimension_numbers=NHWC,
    ),
    case("patches", (32, 32), (8, 8), c=3, k=96, strides=(8, 8), dimension_numbers=NHWC),
    case(
        "dilated",
        (14, 14),
        (3, 3),
        ((2, 2), (2, 2)),
        c=32,
        k=32,
        dilation=(2, 2),
        dimension_numbers=NHWC,
    ),
    case("grouped", (14, 14), (3, 3), "SAME", c=64, k=64, groups=8, dimension_numbers=NHWC),
    case("depthwise", (14, 14), (3, 3), "SAME", c=64, k=64, groups=64, dimension_numbers=NHWC),
    case(
        "depthwise-5x5-strided",
        (14, 14),
        (5, 5),
        "SAME",
        c=32,
        k=32,
        groups=32,
        strides=(2, 2),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    ),
    case("odd-channels", (9, 9), (3, 3), "SAME", c=17, k=19, dimension_numbers=NHWC),
    case(
        "causal",
        (64,),
        (4,),
        ((9, 0),),
        c=64,
        k=64,
        dilation=(3,),
        dimension_numbers=cases.CHANNELS_LAST[1],
    ),
    case("3d", (6, 6, 6), (3, 3, 3), "SAME", c=32, k=32, dimension_numbers=cases.CHANNELS_LAST[3]),
    case(
        "3d-strided",
        (6, 6, 6),
        (2, 2, 2),
        strides=(2, 2, 2),
        c=32,
        k=64,
        dimension_numbers=cases.CHANNELS_LAST[3],
    ),
]

# dtype, and the precision that decides on TF32
KINDS = [
    pytest.param("bfloat16", None, id="bfloat16"),
    pytest.param("float16", None, id="float16"),
    pytest.param("float32", lax.Precision.DEFAULT, id="tf32"),
    pytest.param("float32", lax.Precision.HIGHEST, id="float32"),
]
over_kinds = pytest.mark.parametrize(("dtype", "precision"), KINDS)
over_cases = pytest.mark.parametrize("case", cases.CASES + LAYERS, ids=lambda case: case.name)


def all_three(case: Case, precision):
    """x, w and dy to y, dx and dw; through `lax`'s name where cuDNN's do not take the padding."""

    def conv(x, w):
        return jaxcudnn.conv_general_dilated(x, w, precision=precision, **case.arguments)

    @jax.jit
    def run(x, w, dy):
        if case.crops:
            y, pullback = jax.vjp(conv, x, w)
            return {"y": y, "x": pullback(dy)[0], "w": pullback(dy)[1]}
        arrays = {"x": x, "w": w, "y": dy}
        return {
            role: case.cudnn(role, precision=precision)(*(arrays[name] for name in OPERANDS[role]))
            for role in OPERANDS
        }

    return run


def draw(case: Case, how, dtype: str) -> dict[str, jax.Array]:
    return {role: how(seed, case.shape(role), dtype) for seed, role in enumerate("xwy")}


def is_empty(case: Case) -> bool:
    """Whether nothing is left to compute, after negative padding has cropped."""
    cropped = [
        size + min(low, 0) + min(high, 0)
        for size, (low, high) in zip(case.size, case.pads, strict=True)
    ]
    return min(cropped) <= 0 or 0 in (*case.x_shape, *case.w_shape, *case.y_shape)


@over_kinds
@over_cases
def test_every_role(case: Case, dtype: str, precision):
    run = all_three(case, precision)
    arrays = draw(case, integers, dtype)
    text = run.lower(arrays["x"], arrays["w"], arrays["y"]).as_text()
    assert text.count(f"@{_load.TARGET}(") == (0 if is_empty(case) else 3)  # no fall-back to lax

    for role, computed in run(arrays["x"], arrays["w"], arrays["y"]).items():
        exact, _ = oracle.compute(role, *(arrays[name] for name in OPERANDS[role]), case=case)
        np.testing.assert_array_equal(computed, exact.astype(dtype), err_msg=role)

    arrays = draw(case, normal, dtype)
    tf32 = dtype == "float32" and precision == lax.Precision.DEFAULT
    for role, computed in run(arrays["x"], arrays["w"], arrays["y"]).items():
        exact, magnitude = oracle.compute(
            role, *(arrays[name] for name in OPERANDS[role]), case=case
        )
        assert_close(computed, exact, magnitude, dtype=dtype, length=case.lengths[role], tf32=tf32)


@pytest.mark.parametrize("role", ["y", "x", "w"])
@pytest.mark.parametrize(
    "case", LAYERS[:2] + cases.named("3d-grouped-dilated"), ids=lambda c: c.name
)
def test_flipped_window(case: Case, role: str):
    a, b = case.operands(role, integers, "bfloat16")
    computed = jax.jit(case.cudnn(role, convolution_mode="CONVOLUTION"))(a, b)
    exact, _ = oracle.compute(role, a, b, case, flip=True)
    np.testing.assert_array_equal(computed, exact.astype("bfloat16"))


def lax_on_cpu(f, *arrays):
    """`lax` in float32 on integers, which is exact: an oracle for what oracle.py lacks."""
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        return jax.jit(f)(*(jax.device_put(array, cpu).astype(jnp.float32) for array in arrays))


def with_axis(shape, axis):
    """The shape with a mapped axis of size 3, if there is one."""
    return shape if axis is None else (*shape[:axis], 3, *shape[axis:])


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (1, 3), (4, 0)], ids=str)
@pytest.mark.parametrize("case", cases.named("2d-last", "2d-grouped", "3d"), ids=lambda c: c.name)
def test_vmap_of_values_and_gradients(case: Case, axes):
    x_axis, w_axis = axes
    x = integers(0, with_axis(case.x_shape, x_axis))
    w = integers(1, with_axis(case.w_shape, w_axis))

    def value_and_gradients(conv, x, w):
        y, pullback = jax.vjp(conv, x, w)
        return y, pullback(y)

    def batched(conv):
        return jax.vmap(partial(value_and_gradients, conv), axes)

    ours = jax.jit(batched(case.conv))(x, w)
    theirs = lax_on_cpu(batched(case.lax_conv), x, w)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize(
    "case", cases.named("2d-asymmetric", "2d-grouped-strided"), ids=lambda c: c.name
)
def test_second_derivatives(case: Case):
    x, w = case.operands("y", integers)

    def hessian_product(conv, x, w):
        loss = lambda x, w: jnp.sum(conv(x, w) ** 2)  # noqa: E731
        return jax.jvp(jax.grad(loss, argnums=(0, 1)), (x, w), (x, w))

    ours = jax.jit(partial(hessian_product, case.conv))(x, w)
    theirs = lax_on_cpu(partial(hessian_product, case.lax_conv), x, w)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


class TestTf32:
    """TF32 exactly where JAX's precision allows it."""

    case = LAYERS[0]

    def error(self, precision=None):
        x, w = self.case.operands("y")
        computed = jax.jit(
            partial(jaxcudnn.conv_general_dilated, precision=precision, **self.case.arguments)
        )(x, w)
        exact, magnitude = oracle.compute("y", x, w, self.case)
        return np.max(np.abs(np.asarray(computed, np.float64) - exact) / magnitude)

    # Rounding operands to 10 bits errs by far more than summing 576 products in float32 does.
    between = 2.0**-20 * math.sqrt(576)

    @pytest.mark.parametrize("precision", [None, "default", "high", lax.Precision.HIGH])
    def test_allowed(self, precision):
        assert self.error(precision) > self.between

    @pytest.mark.parametrize(
        "precision", ["highest", lax.Precision.HIGHEST, ("default", "highest")]
    )
    def test_forbidden(self, precision):
        assert self.error(precision) < self.between

    def test_default_matmul_precision(self):
        with jax.default_matmul_precision("float32"):
            assert self.error() < self.between
        with jax.default_matmul_precision("tensorfloat32"):
            assert self.error() > self.between
