# SPDX-License-Identifier: Apache-2.0
"""jaxcudnn.flax.linen against flax.linen: the same parameters, outputs, gradients and refusals."""

import pickle
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import modules
from jaxcudnn import _load
from jaxcudnn.flax import convert_filters, linen
from modules import (
    CONV_GEOMETRIES,
    TRANSPOSE_GEOMETRIES,
    FlaxCase,
    Program,
    Recorder,
    Side,
    assert_equal,
    assert_same,
    flax_convs,
    flax_transposes,
    gradients,
    halved,
    integers,
)

PAIRS = {"Conv": (nn.Conv, linen.Conv), "ConvTranspose": (nn.ConvTranspose, linen.ConvTranspose)}
EXACT: dict[str, Any] = {
    "kernel_size": (3, 3),
    "kernel_init": modules.initial,
    "bias_init": modules.initial,
}
KEY = 0
X = integers((2, 5, 6, 4))


def side(module: nn.Module, x: Any = X) -> Side:
    apply: Any = module.apply
    return Side(module.init(jax.random.key(KEY), x), apply)


def conv(make: Any = linen.Conv, **kwargs: Any):
    return make(6, **EXACT | kwargs)


transposed = partial(conv, make=linen.ConvTranspose)


def run(module: nn.Module, x: Any = X):
    return module.init_with_output(jax.random.key(KEY), x)[0]


@pytest.mark.parametrize("case", flax_convs(CONV_GEOMETRIES[::2]), ids=modules.name_of)
def test_conv(case):
    case = FlaxCase(case)
    ours, stock = conv(**case.ours), conv(make=nn.Conv, **case.stock)
    assert_same(side(ours, case.x), side(stock, case.x), case.x, case.activation, case.convert)


@pytest.mark.parametrize("case", flax_transposes(TRANSPOSE_GEOMETRIES[::2]), ids=modules.name_of)
def test_conv_transpose(case):
    case = FlaxCase(case)
    ours, stock = transposed(**case.ours), conv(make=nn.ConvTranspose, **case.stock)
    with jax.numpy_dtype_promotion("standard"):
        assert_same(side(ours, case.x), side(stock, case.x), case.x, case.activation, case.convert)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("layout", ["HWIO", "OHWI"])
def test_initial_values(name, layout):
    stock, ours = PAIRS[name]
    expected = convert_filters(side(stock(6, (3, 3))).params, "HWIO", layout)
    assert_equal(side(ours(6, (3, 3), filter_layout=layout)).params, expected)


def test_names_in_a_model():
    """Parameters are named after the class, which therefore has the stock name."""

    class Model(nn.Module):
        conv: Any
        transpose: Any

        @nn.compact
        def __call__(self, x):
            return self.transpose(6, **EXACT)(self.conv(6, **EXACT)(self.conv(6, **EXACT)(x)))

    ours = Model(linen.Conv, linen.ConvTranspose)
    assert_same(side(ours), side(Model(nn.Conv, nn.ConvTranspose)), X)
    assert set(side(ours).params["params"]) == {"Conv_0", "Conv_1", "ConvTranspose_0"}


def test_partitioned_kernel():
    init = nn.with_partitioning(modules.initial, ("out", None, None, "in"))
    params = side(conv(kernel_init=init, filter_layout="OHWI")).params
    assert nn.get_partition_spec(params)["params"]["kernel"] == jax.P("out", None, None, "in")
    assert_equal(nn.unbox(params), side(conv(filter_layout="OHWI")).params)


def test_the_output_is_captured_once():
    module = conv(activation="relu")
    variables = side(module).params
    y, captured = module.apply(variables, X, capture_intermediates=True)
    (once,) = captured["intermediates"]["__call__"]
    np.testing.assert_array_equal(once, y)


class TestFusion:
    """What is computed by one call."""

    @pytest.fixture(name="recorder", autouse=True)
    def recording(self, monkeypatch):
        return Recorder(monkeypatch)

    def test_of_names(self, recorder):
        modules.assert_named(run(conv(activation="silu"), X / 4), run(conv(), X / 4), "silu")
        # Both when parameters are made and when the output is computed, which here is at once.
        assert recorder.calls == [("conv_bias_act", (6,), "silu")]
        run(transposed(activation="silu", use_bias=False))
        assert recorder.calls[1:] == [("conv_transpose_bias_act", None, "silu")]

    @pytest.mark.parametrize(
        "module",
        [
            conv(),
            conv(activation=halved),
            transposed(activation="relu", padding="CIRCULAR"),
            conv(activation="relu", conv_general_dilated=jax.lax.conv_general_dilated),
        ],
        ids=["none", "function", "circular", "another"],
    )
    def test_of_nothing_else(self, recorder, module):
        run(module)
        assert recorder.calls == []

    @pytest.mark.parametrize("deprecated", [False, True])
    def test_another_function(self, deprecated):
        called = []

        def convolve(*args, **kwargs):
            called.append(kwargs["dimension_numbers"].rhs_spec)
            return jax.lax.conv_general_dilated(*args, **kwargs)

        name, value = "conv_general_dilated_cls", lambda: convolve
        if deprecated:
            name, value = "conv_general_dilated", convolve
        module = conv(activation="relu", filter_layout="OHWI", **{name: value})
        np.testing.assert_array_equal(run(module), jax.nn.relu(run(conv())))
        assert called == [(0, 3, 1, 2)]


REFUSED: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "padding": ({"padding": "FULL"}, (2, 5, 6, 4)),
    "pads": ({"padding": [1, 2, 3]}, (2, 5, 6, 4)),
    "causal": ({"padding": "CAUSAL"}, (2, 5, 6, 4)),
    "mask": ({"mask": np.ones((3, 3, 6, 4), np.float32)}, (2, 5, 6, 4)),
    "groups": ({"feature_group_count": 3}, (2, 5, 6, 4)),
    "strides": ({"strides": (2, 2, 2)}, (2, 5, 6, 4)),
    "argument": ({"window": 3}, (2, 5, 6, 4)),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.parametrize("ours", [{}, {"activation": "relu", "filter_layout": "OHWI"}])
def test_refusals(name, reason, ours):
    arguments, shape = REFUSED[reason]
    stock, mine = PAIRS[name]
    x = integers(shape)
    modules.assert_refused_alike(
        lambda: run(conv(make=mine, **arguments, **ours), x),
        lambda: run(conv(make=stock, **arguments), x),
    )


@pytest.mark.parametrize(
    "name, layouts", [("Conv", "HWIO, OHWI"), ("ConvTranspose", "HWIO, OHWI, IHWO")]
)
def test_refusals_of_what_is_ours(name, layouts):
    make = partial(PAIRS[name][1], 6, 3)
    text = re.escape(f"jaxcudnn.flax.linen.{name}: {modules.UNKNOWN}'swish'; ")
    with pytest.raises(ValueError, match=f"^{text}"):
        make(activation="swish")
    text = f"jaxcudnn.flax.linen.{name}: filter_layout must be one of {layouts}, got 'WHIO'; "
    with pytest.raises(ValueError, match=f"^{text}"):
        make(filter_layout="WHIO")


@pytest.mark.parametrize("name", PAIRS)
def test_checkpoints(name):
    stock, ours = (conv(make=make) for make in PAIRS[name])
    saved = side(stock).params
    np.testing.assert_array_equal(ours.apply(saved, X), stock.apply(saved, X))
    np.testing.assert_array_equal(stock.apply(side(ours).params, X), stock.apply(saved, X))
    converted = convert_filters(saved, "HWIO", "OHWI")
    other = ours.clone(filter_layout="OHWI")
    np.testing.assert_array_equal(other.apply(converted, X), stock.apply(saved, X))


class TestTransformations:
    MODULE = staticmethod(partial(conv, activation="relu", filter_layout="OHWI"))

    def test_jit_and_vmap(self):
        params, apply = side(self.MODULE())
        np.testing.assert_array_equal(jax.jit(apply)(params, X), apply(params, X))
        mapped = jax.vmap(apply, (None, 0))(params, X[:, None])
        np.testing.assert_array_equal(mapped[:, 0], apply(params, X))

    def test_remat(self):
        params, apply = side(self.MODULE())
        again = side(nn.remat(linen.Conv)(6, **EXACT, activation="relu", filter_layout="OHWI"))
        assert_equal(again.params, params)
        cotangent = integers((2, 5, 6, 6))
        loss = lambda apply: jax.grad(lambda p: jnp.sum(apply(p, X) * cotangent))(params)  # noqa: E731
        assert_equal(loss(again.apply), loss(apply))

    def test_scan(self):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return linen.Conv(4, **EXACT, activation="relu")(x), None

        layers = nn.scan(
            Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )()
        variables = layers.init(jax.random.key(KEY), jnp.asarray(X), None)
        y, _ = layers.apply(variables, jnp.asarray(X), None)
        one = linen.Conv(4, **EXACT, activation="relu")
        np.testing.assert_array_equal(y, run(one, run(one, run(one))))

    @pytest.mark.parametrize("name", PAIRS)
    def test_pickle_and_hash(self, name):
        module = conv(make=PAIRS[name][1], activation="relu", filter_layout="OHWI")
        assert pickle.loads(pickle.dumps(module)) == module
        assert hash(module.clone()) == hash(module)
        assert module != module.clone(activation=None)


def test_an_activation_with_parameters():
    params = side(conv(activation=nn.PReLU())).params
    assert set(params["params"]) == {"kernel", "bias", "activation"}
    expected = nn.leaky_relu(run(conv()), 0.01)
    np.testing.assert_array_equal(run(conv(activation=nn.PReLU())), expected)


class TestOnCuda:
    @pytest.fixture(autouse=True)
    def no_gpu(self, monkeypatch):
        monkeypatch.setattr(_load, "local_device", lambda: None)

    @pytest.mark.parametrize("activation", [None, "relu"])
    @pytest.mark.parametrize("make, operation", [(conv, "fprop"), (transposed, "dgrad")])
    def test_operations(self, make, operation, activation):
        ours = side(make(activation=activation, strides=(2, 2)))
        assert Program(ours.apply, ours.params, X).operations == [operation]
        program = Program(gradients(ours), ours.params, X)
        assert program.operations == ["dgrad", "fprop", "wgrad"]

    @pytest.mark.parametrize("activation", [None, "relu"])
    @pytest.mark.parametrize("make, layout", [(conv, "OHWI"), (transposed, "IHWO")])
    def test_nothing_is_reordered_for_a_filter_in_cudnns_layout(self, make, layout, activation):
        for filter_layout in (layout, "HWIO"):
            ours = side(make(activation=activation, strides=(2, 2), filter_layout=filter_layout))
            program = Program(gradients(ours), ours.params, X)
            assert program.reorders is (filter_layout == "HWIO")
