# SPDX-License-Identifier: Apache-2.0
"""Routes on the GPU, against the definition: exact integers through the public functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcudnn
import oracle
import sampled
from cases import CHANNELS_LAST, OPERANDS, Case, case, integers, parametrize
from jaxcudnn import _routes
from test_routes import TABLE, possible

pytestmark = pytest.mark.gpu

NWC, NHWC, NDHWC = CHANNELS_LAST.values()

LAYERS = {
    "matmul": [
        case("embedding", (224, 224), (16, 16), n=8, c=3, k=96, strides=(16, 16),
             dimension_numbers=NHWC),
        case("embedding-cropped", (230, 229), (14, 14), n=8, c=3, k=96, strides=(14, 14)),
        case("embedding-padded", (222, 221), (4, 4), ((1, 1), (3, 0)), n=8, c=3, k=64,
             strides=(4, 4), dimension_numbers=("NHWC", "HWIO", "NHWC")),
        case("video", (8, 112, 112), (2, 16, 16), n=4, c=3, k=96, strides=(2, 16, 16),
             dimension_numbers=NDHWC),
        case("spectrogram", (1 << 18,), (16,), n=8, c=1, k=64, strides=(16,),
             dimension_numbers=NWC),
    ],
    "space_to_depth": [
        case("stem", (224, 224), (7, 7), "SAME", n=8, c=3, k=64, strides=(2, 2),
             dimension_numbers=NHWC),
        case("stem-first", (223, 225), (3, 3), ((1, 1), (1, 1)), n=8, c=3, k=32, strides=(2, 2)),
        case("audio", (100003,), (10,), n=4, c=1, k=64, strides=(5,), dimension_numbers=NWC),
        case("volume", (33, 64, 65), (3, 7, 7), ((1, 1), (3, 3), (3, 3)), n=4, c=1, k=32,
             strides=(1, 2, 2), dimension_numbers=NDHWC),
    ],
    "blocks": [
        case("narrow", (224, 224), (3, 3), "SAME", n=8, c=3, k=64, dimension_numbers=NHWC),
        case("narrow-both", (256, 256), (5, 3), ((4, 1), (2, 0)), n=8, c=16, k=32,
             dimension_numbers=("NHWC", "HWIO", "NHWC")),
        case("narrow-volume", (48, 48, 48), (3, 3, 3), "SAME", n=4, c=32, k=32,
             dimension_numbers=NDHWC),
        case("narrow-audio", (1 << 16,), (7,), "SAME", n=8, c=8, k=8, dimension_numbers=NWC),
    ],
    "shifts": [
        case("causal", (4096,), (4,), ((3, 0),), n=4, c=128, k=128, groups=128,
             dimension_numbers=NWC),
        case("causal-first", (4097,), (3,), ((4, 0),), n=4, c=96, k=96, groups=96, dilation=(2,)),
    ],
    "toeplitz": [
        case("large", (32, 32), (31, 31), "SAME", n=4, c=256, k=256, groups=256,
             dimension_numbers=NHWC),
        case("large-wide", (40, 70), (17, 16), "SAME", n=8, c=64, k=64, groups=64),
    ],
}  # fmt: skip
BY_BLOCKS = {"narrow": "y", "narrow-both": "yx", "narrow-volume": "yx", "narrow-audio": "yx"}
"""The passes that blocks are faster for."""

CHOSEN = [
    pytest.param(name, each, role, id=f"{name}-{each.name}-{role}")
    for name, cases in LAYERS.items()
    for each in cases
    for role in OPERANDS
]


@pytest.mark.parametrize(("name", "case", "role"), CHOSEN)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_chosen(name: str, case: Case, role: str, dtype: str):
    numbers = sampled.exact_numbers(case)
    fill = jax.jit(numbers.fill, static_argnums=(0, 1, 2))
    a, b = (fill(case, operand, dtype, jnp.uint32(7)) for operand in OPERANDS[role])
    compute = case.cudnn(role)
    (row,) = jaxcudnn.explain(compute)(a, b)
    is_slower = (name, role, dtype) == ("toeplitz", "y", "float32") or (
        name == "blocks" and (dtype == "float32" or role not in BY_BLOCKS[case.name])
    )
    assert row.route == ("cuDNN" if is_slower else name)
    points = sampled.draw_points(case, role)
    computed = sampled.take(jax.jit(compute)(a, b), case, role, jnp.asarray(points))
    dtypes = dict.fromkeys("xwy", dtype)
    exact, _ = sampled.compute(role, case, points, numbers, dtypes, seed=7)
    np.testing.assert_array_equal(np.asarray(computed), exact.astype(jnp.dtype(dtype)))


@parametrize([each for each in TABLE if any(possible(n, each, "y") for n in _routes.KINDS)])
def test_small_ones(monkeypatch, case: Case):
    """Those that are possible, whatever rules say, by one program."""
    monkeypatch.setattr(_routes, "FEWEST_ELEMENTS", 0)
    for name, kind in _routes.KINDS.items():
        forced = {name: kind._replace(is_faster=lambda op, spec: True)}
        monkeypatch.setattr(_routes, "KINDS", forced)
        for role in OPERANDS:
            if not possible(name, case, role):
                continue
            a, b = case.operands(role, integers)
            compute = case.cudnn(role, options={"routes": [name], "algorithm": "heuristic"})
            computed = np.asarray(jax.jit(compute)(a, b))
            exact, _ = oracle.compute(role, a, b, case)
            if name == "fft":
                computed = np.round(computed)
            np.testing.assert_array_equal(computed, exact, err_msg=f"{name} {role}")


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_a_step(name: str):
    """Against cuDNN's own convolutions, in one program."""
    case = LAYERS[name][0]
    x, w = (integers(i, case.shape(role), "bfloat16") for i, role in enumerate("xw"))

    def gradients(x, w):
        return jax.grad(lambda x, w: (case.conv(x, w) % 4).astype("float32").sum(), (0, 1))(x, w)

    by_routes = jax.jit(gradients)(x, w)
    with jaxcudnn.options(routes=False):
        by_cudnn = jax.jit(gradients)(x, w)
    for ours, theirs in zip(by_routes, by_cudnn, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_deterministic():
    """Equal bits in two programs, of numbers that are rounded."""
    for name, cases in LAYERS.items():
        x, w = (jnp.sin(integers(i, cases[0].shape(role)) + i) for i, role in enumerate("xw"))
        with jaxcudnn.options(deterministic=True):
            first, second = (
                np.asarray(jax.jit(lambda x, w, cases=cases: cases[0].conv(x, w))(x, w))
                for _ in range(2)
            )
        np.testing.assert_array_equal(first, second, err_msg=name)
