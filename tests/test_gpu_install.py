# SPDX-License-Identifier: Apache-2.0
"""Networks of Flax and Equinox on the GPU, with their convolutions by XLA and by cuDNN."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcudnn
import lowered
from networks import NETWORKS, Network
from tolerance import TF32_ROUNDOFF

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def as_libraries_expect():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
    jaxcudnn.uninstall()


def train(network: Network, dtype: str, *, installed: bool) -> Any:
    """The outputs and the gradients, in NumPy's float64."""
    arguments = jax.tree.map(lambda a: jnp.asarray(a, dtype), network.arrays(seed=7))
    with jaxcudnn.installed(installed):
        step = jax.jit(lambda *given: network.train(*given))
        ours, of_xla = lowered.count(step.lower(*arguments).as_text())
        results = step(*arguments)
    assert (of_xla if installed else ours) == 0
    assert (ours if installed else of_xla) == 3 * network.convolutions - 1
    return jax.tree.map(lambda a: np.asarray(a.astype(dtype), np.float64), results)


def exact(network: Network, dtype: str) -> Any:
    """The same from arguments in a dtype, computed in float64."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        arguments = jax.tree.map(
            lambda a: jnp.asarray(a, dtype).astype("float64"), network.arrays(seed=7)
        )
        results = jax.jit(lambda *given: network.train(*given))(*arguments)
        return jax.tree.map(np.asarray, results)


def error(results: Any, reference: Any) -> float:
    """How far the outputs, or the gradients as one vector, are off, as a part of their norm."""

    def norm(arrays: Any) -> float:
        return float(np.sqrt(sum(np.sum(a**2) for a in jax.tree.leaves(arrays))))

    apart = jax.tree.map(np.subtract, results, reference)
    return max(norm(a) / norm(b) for a, b in zip(apart, reference, strict=True))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_same_in_full_precision(name: str):
    network = NETWORKS[name]()
    with jax.default_matmul_precision("highest"):
        ours, theirs = (train(network, "float32", installed=which) for which in (True, False))
    assert error(ours, theirs) <= 1e-5


@pytest.mark.parametrize("name", NETWORKS)
def test_no_worse_in_tf32(name: str):
    """Where XLA chooses a kernel without TF32, its error is no measure: then the roundings are.

    Both operands of each convolution are rounded, once forward and once backward, and errors of
    layers add up at most.
    """
    network = NETWORKS[name]()
    reference = exact(network, "float32")
    ours, theirs = (
        error(train(network, "float32", installed=which), reference) for which in (True, False)
    )
    roundings = 2 * 2 * network.convolutions
    assert ours <= max(1.5 * theirs, roundings * TF32_ROUNDOFF)


@pytest.mark.parametrize("name", NETWORKS)
def test_no_worse_in_bfloat16(name: str):
    """XLA may add a bias before it rounds a sum: then we have two roundings for its one."""
    network = NETWORKS[name]()
    reference = exact(network, "bfloat16")
    ours, theirs = (
        error(train(network, "bfloat16", installed=which), reference) for which in (True, False)
    )
    assert ours <= 2 * theirs


def conv(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(
        x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def integers(seed: int, shape: tuple[int, ...], dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), dtype)


def on_cpu(f: Any, *arrays: jax.Array) -> Any:
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.jit(f)(*(jnp.asarray(np.asarray(array)) for array in arrays))


def pullback(x: jax.Array, w: jax.Array) -> Any:
    y, gradients = jax.vjp(conv, x, w)
    return y, *gradients(y)


# Below, integers are so small that TF32 has them all, and strided kernels transform nothing.
def test_without_jit():
    x, w = integers(1, (2, 16, 16, 8)), integers(2, (3, 3, 8, 16))
    jaxcudnn.install()
    results = pullback(x, w)
    jaxcudnn.uninstall()
    jax.tree.map(np.testing.assert_array_equal, results, on_cpu(pullback, x, w))


def test_integers_which_xla_has_no_kernel_for():
    x, w = integers(1, (2, 16, 16, 8), "int8"), integers(2, (3, 3, 8, 16), "int8")
    with jaxcudnn.installed():
        np.testing.assert_array_equal(jax.jit(conv)(x, w), on_cpu(conv, x, w))


def test_a_part_left_to_xla():
    x, w = integers(1, (2, 16, 16, 8)), integers(2, (3, 3, 8, 8))

    def f(x, w):
        with jaxcudnn.installed(False):
            x = conv(x, w)
        return conv(x, w)

    with jaxcudnn.installed():
        step = jax.jit(f)
        assert lowered.count(step.lower(x, w).as_text()) == (1, 1)
        np.testing.assert_array_equal(step(x, w), on_cpu(f, x, w))


def test_tune_finds_what_is_installed(measuring):
    x, w = integers(1, (2, 16, 16, 8)), integers(2, (3, 3, 8, 16))
    step = jax.grad(lambda x, w: jnp.sum(conv(x, w) ** 2), argnums=(0, 1))
    with jaxcudnn.installed():
        tuned = jaxcudnn.tune(step, x, w, progress=False)
    assert sorted(row.op for row in tuned) == ["dgrad", "fprop", "wgrad"]
    assert tuned.left_to_lax == tuned.failed == 0
    assert jaxcudnn.tune(step, x, w, progress=False).left_to_lax == 3
