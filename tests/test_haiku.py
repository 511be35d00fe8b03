# SPDX-License-Identifier: Apache-2.0
"""jaxcudnn.haiku against haiku: the same parameters and names, outputs, gradients and refusals."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import modules
from jaxcudnn import _load, _modules
from modules import (
    ACTIVATIONS,
    Program,
    Recorder,
    Side,
    assert_equal,
    assert_same,
    gradients,
    integers,
    pairwise,
)

hk = pytest.importorskip("haiku")
layer_stack = pytest.importorskip("haiku.experimental").layer_stack

from jaxcudnn import haiku  # noqa: E402 (it needs the library)

# Of all classes arguments, and how many spatial dimensions they have.
CLASSES: dict[str, tuple[dict[str, Any], int]] = {
    "ConvND": ({"num_spatial_dims": 2, "output_channels": 6}, 2),
    "Conv1D": ({"output_channels": 6}, 1),
    "Conv2D": ({"output_channels": 6}, 2),
    "Conv3D": ({"output_channels": 6}, 3),
    "ConvNDTranspose": ({"num_spatial_dims": 2, "output_channels": 6}, 2),
    "Conv1DTranspose": ({"output_channels": 6}, 1),
    "Conv2DTranspose": ({"output_channels": 6}, 2),
    "Conv3DTranspose": ({"output_channels": 6}, 3),
    "DepthwiseConv1D": ({"channel_multiplier": 2}, 1),
    "DepthwiseConv2D": ({"channel_multiplier": 2}, 2),
    "DepthwiseConv3D": ({"channel_multiplier": 2}, 3),
    "SeparableDepthwiseConv2D": ({"channel_multiplier": 2}, 2),
}
X = integers((2, 5, 6, 4))
KEY = 0


def initial(shape: Any, dtype: Any) -> jax.Array:
    return jnp.asarray(integers(shape, dtype))


def side(name: str, package: Any, x: Any = X, **arguments: Any) -> Side:
    arguments = {**CLASSES[name][0], "kernel_shape": 3, "w_init": initial, **arguments}
    if arguments.get("with_bias", True):
        arguments.setdefault("b_init", initial)
    model = hk.without_apply_rng(hk.transform(lambda x: getattr(package, name)(**arguments)(x)))
    return Side(model.init(jax.random.key(KEY), x), model.apply)


def run(name: str, package: Any = haiku, x: Any = X, **arguments: Any) -> jax.Array:
    one = side(name, package, x, **arguments)
    return one.apply(one.params, x)


CONVS = pairwise(
    geometry=[
        {"kernel_shape": (3, 2), "stride": (2, 1), "padding": "SAME", "rate": 1},
        {"padding": hk.pad.causal, "rate": 2},
        {"padding": [(1, 0), (2, 1)], "stride": 2, "feature_group_count": 2},
    ],
    data_format=["channels_last", "channels_first"],
    with_bias=[True, False],
    batch=[(2,), ()],
    masked=[False, True],
    activation=ACTIVATIONS,
)
TRANSPOSED = pairwise(
    geometry=[
        {"kernel_shape": (3, 2), "stride": (2, 1), "padding": "SAME"},
        {"stride": 2, "output_shape": (10, 11), "padding": "SAME"},
        {"padding": [(1, 0), (2, 1)], "stride": 2},
    ],
    data_format=["channels_last", "channels_first"],
    with_bias=[True, False],
    batch=[(2,), ()],
    masked=[False, True],
    activation=ACTIVATIONS,
)


def check(name: str, case: dict[str, Any], filter_channels: tuple[int, int]) -> None:
    case = dict(case)
    activation, masked, batch = (case.pop(key) for key in ("activation", "masked", "batch"))
    arguments = {**case.pop("geometry"), **case}
    if masked:
        window = arguments.get("kernel_shape", (3, 3))
        groups = arguments.get("feature_group_count", 1)
        inputs, outputs = filter_channels
        arguments["mask"] = np.abs(integers((*window, inputs // groups, outputs)))
    channels_last = arguments["data_format"] == "channels_last"
    x = integers((*batch, 5, 6, 4) if channels_last else (*batch, 4, 5, 6))
    ours = side(name, haiku, x, activation=activation, **arguments)
    assert_same(ours, side(name, hk, x, **arguments), x, activation)


@pytest.mark.parametrize("case", CONVS, ids=modules.name_of)
def test_conv(case):
    check("Conv2D", case, (4, 6))


@pytest.mark.parametrize("case", TRANSPOSED, ids=modules.name_of)
def test_conv_transpose(case):
    check("Conv2DTranspose", case, (6, 4))


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_every_class(name, activation):
    x = integers((2, *(5, 6, 4)[: CLASSES[name][1]], 4))
    assert issubclass(getattr(haiku, name), getattr(hk, name))
    ours, stock = side(name, haiku, x, activation=activation), side(name, hk, x)
    assert_equal(ours.params, stock.params)
    expected = modules.reference(activation)(stock.apply(stock.params, x))
    np.testing.assert_array_equal(ours.apply(ours.params, x), expected)


def test_every_class_is_tried():
    classes = {name for name, value in vars(haiku).items() if isinstance(value, type)}
    ours = {name for name in classes if getattr(haiku, name).__module__ == haiku.__name__}
    assert set(CLASSES) == {name for name in ours if not name.startswith("_")}
    stock = {name for name in vars(hk) if "Conv" in name and not name.endswith("LSTM")}
    assert set(CLASSES) == stock


def test_initial_values():
    ours, stock = (side("Conv2D", package, w_init=None) for package in (haiku, hk))
    assert_equal(ours.params, stock.params)


class TestFusion:
    """What is computed by one call."""

    @pytest.fixture(name="recorder", autouse=True)
    def recording(self, monkeypatch):
        return Recorder(monkeypatch)

    @pytest.mark.parametrize(
        "name, function",
        [
            ("Conv2D", "conv_bias_act"),
            ("Conv2DTranspose", "conv_transpose_bias_act"),
            ("DepthwiseConv2D", "conv_bias_act"),
            ("SeparableDepthwiseConv2D", "conv_bias_act"),
        ],
    )
    @pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
    def test_of_names(self, recorder, name, function, data_format):
        x = X / 4 if data_format == "NHWC" else integers((2, 4, 5, 6)) / np.float32(4)
        plain = run(name, x=x, data_format=data_format)
        assert recorder.calls == []
        y = run(name, x=x, data_format=data_format, activation="tanh")
        modules.assert_named(y, plain, "tanh")
        channels = plain.shape[-1 if data_format == "NHWC" else 1]
        # Haiku runs the model to make parameters, and again.
        assert recorder.calls == [(function, (channels,), "tanh")] * 2

    def test_of_no_bias(self, recorder):
        run("Conv2D", with_bias=False, activation="relu")
        assert recorder.calls == [("conv_bias_act", None, "relu")] * 2

    def test_of_no_function(self, recorder):
        run("Conv2D", activation=modules.halved)
        assert recorder.calls == []

    @pytest.mark.parametrize("with_bias", [False, True])
    def test_of_no_bias_that_haiku_adds_to_a_spatial_dimension(self, recorder, with_bias):
        """Of channels first it has the shape (K, 1, 1), which here means the first of three."""
        x = integers((2, 4, 8, 5, 6))
        arguments = {"data_format": "NCDHW", "with_bias": with_bias}
        y = run("DepthwiseConv3D", x=x, activation="relu", **arguments)
        stock = run("DepthwiseConv3D", hk, x=x, **arguments)
        np.testing.assert_array_equal(y, jax.nn.relu(stock))
        assert bool(recorder.calls) is not with_bias


REFUSED: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "padding": ({"padding": "FULL"}, X.shape),
    "strides": ({"stride": (2, 2, 2)}, X.shape),
    "argument": ({"window": 3}, X.shape),
    "rank": ({}, (5, 6)),
    "groups": ({"feature_group_count": 3}, X.shape),
    "mask": ({"mask": np.ones((3, 3, 5, 6), np.float32)}, X.shape),
}


@pytest.mark.parametrize(
    "name, reason",
    [
        *((name, each) for name in ("Conv2D", "DepthwiseConv2D") for each in REFUSED),
        *(("Conv2DTranspose", each) for each in (*REFUSED, "output")),
    ],
)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_refusals(name, reason, activation):
    arguments, shape = {**REFUSED, "output": ({"output_shape": (3, 3)}, X.shape)}[reason]
    x = integers(shape)
    modules.assert_refused_alike(
        lambda: run(name, x=x, activation=activation, **arguments),
        lambda: run(name, hk, x=x, **arguments),
    )


@pytest.mark.parametrize("name", CLASSES)
def test_unknown_activation(name):
    text = re.escape(f"jaxcudnn.haiku.{name}: {modules.UNKNOWN}'swish'; ")
    with pytest.raises(ValueError, match=f"^{text}"):
        run(name, activation="swish")


def test_checkpoints():
    ours, stock = side("Conv2D", haiku), side("Conv2D", hk)
    np.testing.assert_array_equal(ours.apply(stock.params, X), stock.apply(ours.params, X))


class TestTransformations:
    def test_jit_and_vmap(self):
        params, apply = side("Conv2D", haiku, activation="relu")
        expected = apply(params, X)
        np.testing.assert_array_equal(jax.jit(apply)(params, X), expected)
        np.testing.assert_array_equal(jax.vmap(apply, (None, 0))(params, X), expected)

    def test_remat_and_layer_stack(self):
        def model(x):
            layer = lambda x: haiku.Conv2D(  # noqa: E731
                4, 3, activation="relu", w_init=initial, b_init=initial
            )(x)
            return layer_stack(3)(hk.remat(layer))(x)

        stack = hk.without_apply_rng(hk.transform(model))
        params = stack.init(jax.random.key(KEY), X)
        one = side("Conv2D", haiku, output_channels=4, activation="relu")
        expected = one.apply(one.params, one.apply(one.params, one.apply(one.params, X)))
        np.testing.assert_array_equal(stack.apply(params, X), expected)


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize(
    "name, operation",
    [("Conv2D", "fprop"), ("Conv2DTranspose", "dgrad"), ("DepthwiseConv2D", "fprop")],
)
def test_on_cuda(monkeypatch, name, operation, activation):
    monkeypatch.setattr(_load, "local_device", lambda: None)
    ours = side(name, haiku, activation=activation, stride=2)
    assert Program(ours.apply, ours.params, X).operations == [operation]
    assert Program(gradients(ours), ours.params, X).operations == ["dgrad", "fprop", "wgrad"]


def test_without_haiku(monkeypatch):
    modules.assert_says_what_to_install(monkeypatch, "haiku", "haiku", "dm-haiku")


def test_stock_code_that_convolves_otherwise():
    def stock(x, *, y=2):
        return len(x) + y

    counted = _modules.with_names(stock, len=lambda x: 10 * len(x))
    assert counted("ab") == 22
    text = r"^jaxcudnn: test_haiku\..*stock must refer to 'lax', got a version that does not; "
    with pytest.raises(RuntimeError, match=text):
        _modules.with_names(stock, lax=jax.lax)
