# SPDX-License-Identifier: Apache-2.0
"""jaxcudnn.equinox against equinox.nn: the same leaves, outputs, gradients and refusals."""

import io
import pickle
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import modules
from jaxcudnn import _load, equinox
from modules import (
    ACTIVATIONS,
    NAMES,
    Program,
    Recorder,
    Side,
    assert_equal,
    assert_same,
    gradients,
    integers,
    pairwise,
)

NAMES_OF_CLASSES = [
    f"{kind}{dimensions}"
    for kind in ("Conv", "ConvTranspose")
    for dimensions in ("", "1d", "2d", "3d")
]
X = integers((4, 5, 6))


def module(name: str = "Conv2d", package: Any = equinox, **arguments: Any) -> Any:
    """One of 4 input and 6 output channels, whose parameters are integers."""
    if name in ("Conv", "ConvTranspose"):
        arguments = {"num_spatial_dims": 2, **arguments}
    arguments = {"in_channels": 4, "out_channels": 6, "kernel_size": 3, **arguments}
    shaped = eqx.filter_eval_shape(getattr(package, name), **arguments, key=jax.random.key(0))
    return jax.tree.map(_filled, shaped)


def _filled(leaf: Any) -> Any:
    is_array = isinstance(leaf, jax.ShapeDtypeStruct)
    return jnp.asarray(integers(leaf.shape, leaf.dtype)) if is_array else leaf


def stock(name: str, **arguments: Any) -> Any:
    return module(name, eqx.nn, **arguments)


def side(module: Any) -> Side:
    params, rest = eqx.partition(module, eqx.is_array)
    leaves, tree = jax.tree.flatten(params)  # the trees of two classes differ
    combine = lambda leaves: eqx.combine(jax.tree.unflatten(tree, leaves), rest)  # noqa: E731
    return Side(leaves, lambda leaves, x: combine(leaves)(x))


CONVS = pairwise(
    geometry=[
        {"kernel_size": (3, 2), "stride": (2, 1), "padding": 1, "dilation": 2},
        {"padding": "SAME", "padding_mode": "CIRCULAR"},
        {"padding": ((1, 0), (2, 1)), "padding_mode": "REFLECT", "stride": 2},
        {"padding": (1, 2), "padding_mode": "REPLICATE"},
        {"padding": "SAME_LOWER", "stride": 2},
    ],
    dtype=[None, jnp.bfloat16],
    groups=[1, 2],
    use_bias=[True, False],
    activation=[None, "relu"],
)
TRANSPOSED = pairwise(
    geometry=[
        {"kernel_size": (3, 2), "stride": (2, 1), "padding": 1, "dilation": 2},
        {"padding": "SAME", "padding_mode": "CIRCULAR"},
        {"padding": ((1, 0), (2, 1)), "stride": 2, "output_padding": 1},
    ],
    dtype=[None, jnp.bfloat16],
    groups=[1, 2],
    use_bias=[True, False],
    activation=ACTIVATIONS,
)


def check(name: str, case: dict[str, Any], x: np.ndarray) -> None:
    geometry, activation, *rest = case.pop("geometry"), case.pop("activation"), case
    arguments = {**geometry, **rest[0]}
    ours = module(name, activation=activation, **arguments)
    assert_same(side(ours), side(stock(name, **arguments)), x, activation)


@pytest.mark.parametrize("case", CONVS, ids=modules.name_of)
def test_conv(case):
    check("Conv2d", dict(case), integers((4, 5, 6), case["dtype"] or "float32"))


@pytest.mark.parametrize("case", TRANSPOSED, ids=modules.name_of)
def test_conv_transpose(case):
    check("ConvTranspose2d", dict(case), integers((4, 5, 6), case["dtype"] or "float32"))


@pytest.mark.parametrize("name", NAMES_OF_CLASSES)
def test_every_class(name):
    dimensions = int(name[-2]) if name.endswith("d") else 2
    x = integers((4, *(5, 6, 4)[:dimensions]))
    ours, theirs = module(name, activation="relu"), stock(name)
    assert isinstance(ours, type(theirs))
    general = "ConvTranspose" if "Transpose" in name else "Conv"
    assert isinstance(ours, getattr(equinox, general))
    np.testing.assert_array_equal(ours(x), jax.nn.relu(theirs(x)))


@pytest.mark.parametrize("name", ["Conv2d", "ConvTranspose2d"])
def test_initial_values(name):
    make = lambda package: getattr(package, name)(4, 6, 3, key=jax.random.key(3))  # noqa: E731
    assert_equal(jax.tree.leaves(make(equinox)), jax.tree.leaves(make(eqx.nn)))


class TestFusion:
    """What is computed by one call."""

    @pytest.fixture(name="recorder", autouse=True)
    def recording(self, monkeypatch):
        return Recorder(monkeypatch)

    @pytest.mark.parametrize("name", NAMES)
    def test_of_names(self, recorder, name):
        modules.assert_named(module(activation=name)(X / 4), module()(X / 4), name)
        module("ConvTranspose2d", activation=name, use_bias=False)(X)
        assert recorder.calls == [("conv_bias_act", (6,), name), ("conv_bias_act", None, name)]

    @pytest.mark.parametrize("activation", [None, modules.halved])
    def test_of_nothing_else(self, recorder, activation):
        module(activation=activation)(X)
        assert recorder.calls == []

    def test_not_of_a_bias_of_another_dtype(self, recorder):
        change = lambda m: eqx.tree_at(lambda m: m.bias, m, m.bias.astype("float16"))  # noqa: E731
        ours, theirs = change(module(activation="relu")), change(stock("Conv2d"))
        with pytest.raises(jax.dtypes.TypePromotionError):
            ours(X)
        with jax.numpy_dtype_promotion("standard"):
            np.testing.assert_array_equal(ours(X), jax.nn.relu(theirs(X)))
        assert recorder.calls == []


REFUSED: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "padding": ({"padding": "FULL"}, X.shape),
    "mode": ({"padding_mode": "WRAP"}, X.shape),
    "strides": ({"stride": (2, 2, 2)}, X.shape),
    "argument": ({"window": 3}, X.shape),
    "rank": ({}, (2, *X.shape)),
    "channels": ({}, (3, 5, 6)),
    "groups": ({"groups": 4}, X.shape),
    "output": ({"output_padding": 1}, X.shape),
}


@pytest.mark.parametrize("name", ["Conv2d", "ConvTranspose2d"])
@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(name, reason):
    arguments, shape = REFUSED[reason]
    x = integers(shape)
    for activation in (None, "relu"):
        modules.assert_refused_alike(
            lambda activation=activation: module(name, activation=activation, **arguments)(x),
            lambda: stock(name, **arguments)(x),
        )


@pytest.mark.parametrize("name", ["Conv", "Conv2d", "ConvTranspose", "ConvTranspose2d"])
def test_unknown_activation(name):
    text = re.escape(f"jaxcudnn.equinox.{name}: {modules.UNKNOWN}'swish'; ")
    with pytest.raises(ValueError, match=f"^{text}"):
        module(name, activation="swish")


@pytest.mark.parametrize("name", ["Conv2d", "ConvTranspose2d"])
def test_checkpoints(name):
    ours, theirs = module(name, activation="relu"), stock(name)
    for saved, like in [(ours, theirs), (theirs, ours)]:
        changed = jax.tree.map(lambda a: a + 1 if eqx.is_array(a) else a, saved)
        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, changed)
        file.seek(0)
        loaded = eqx.tree_deserialise_leaves(file, like)
        assert_equal(jax.tree.leaves(loaded), jax.tree.leaves(changed))


class TestTransformations:
    def test_jit_vmap_and_remat(self):
        ours = module(activation="relu")
        call = lambda m, x: m(x)  # noqa: E731
        x = integers((3, *X.shape))
        expected = jnp.stack([ours(each) for each in x])
        for transformed in (jax.vmap(ours), eqx.filter_vmap(ours), jax.jit(jax.vmap(ours))):
            np.testing.assert_array_equal(transformed(x), expected)
        for transform in (jax.jit, eqx.filter_jit, jax.checkpoint, eqx.filter_checkpoint):
            np.testing.assert_array_equal(transform(call)(ours, X), ours(X))

    def test_scan_over_modules(self):
        layer = module(out_channels=4, padding=1, activation="relu")
        layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), layer, layer, layer)
        y, _ = jax.lax.scan(lambda x, layer: (layer(x), None), jnp.asarray(X), layers)
        np.testing.assert_array_equal(y, layer(layer(layer(X))))

    @pytest.mark.parametrize("name", ["Conv2d", "ConvTranspose2d"])
    def test_pickle(self, name):
        ours = module(name, activation="relu")
        again = pickle.loads(pickle.dumps(ours))
        assert again.activation == "relu"
        np.testing.assert_array_equal(again(X), ours(X))


def test_an_activation_with_parameters():
    ours = module(activation=eqx.nn.PReLU(0.5))
    assert isinstance(ours.activation, eqx.nn.PReLU)
    assert len(jax.tree.leaves(ours)) == 3
    grads = eqx.filter_grad(lambda m: jnp.sum(m(X)))(ours)
    negative = jnp.minimum(module()(X), 0)
    np.testing.assert_allclose(grads.activation.negative_slope, jnp.sum(negative))


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("name, operation", [("Conv2d", "fprop"), ("ConvTranspose2d", "dgrad")])
def test_on_cuda(monkeypatch, name, operation, activation):
    monkeypatch.setattr(_load, "local_device", lambda: None)
    ours = side(module(name, activation=activation, stride=2))
    assert Program(ours.apply, ours.params, X).operations == [operation]
    assert Program(gradients(ours), ours.params, X).operations == ["dgrad", "fprop", "wgrad"]


def test_without_equinox(monkeypatch):
    modules.assert_says_what_to_install(monkeypatch, "equinox", "equinox", "equinox")
