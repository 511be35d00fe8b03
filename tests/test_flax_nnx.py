# SPDX-License-Identifier: Apache-2.0
"""jaxcudnn.flax against flax.nnx: the same parameters, outputs, gradients and refusals."""

import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcudnn
import modules
from jaxcudnn import _load, flax
from jaxcudnn.flax._filters import CONV_TRANSPOSE
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
from processes import run_python

PAIRS = {"Conv": (nnx.Conv, flax.Conv), "ConvTranspose": (nnx.ConvTranspose, flax.ConvTranspose)}
EXACT: dict[str, Any] = {
    "kernel_size": (3, 3),
    "kernel_init": modules.initial,
    "bias_init": modules.initial,
}
X = integers((2, 5, 6, 4))


def side(module: nnx.Module) -> Side:
    graph, state = nnx.split(module)
    return Side(state, lambda state, x: nnx.merge(graph, state)(x))


def conv(make: Any = flax.Conv, **kwargs: Any):
    return make(4, 6, rngs=nnx.Rngs(0), **EXACT | kwargs)


transposed = partial(conv, make=flax.ConvTranspose)


@pytest.mark.parametrize("case", flax_convs(CONV_GEOMETRIES), ids=modules.name_of)
def test_conv(case):
    case = FlaxCase(case)
    ours, stock = conv(**case.ours), conv(make=nnx.Conv, **case.stock)
    assert_same(side(ours), side(stock), case.x, case.activation, case.convert)


@pytest.mark.parametrize("case", flax_transposes(TRANSPOSE_GEOMETRIES), ids=modules.name_of)
def test_conv_transpose(case):
    case = FlaxCase(case)
    ours, stock = transposed(**case.ours), conv(make=nnx.ConvTranspose, **case.stock)
    with jax.numpy_dtype_promotion("standard"):
        assert_same(side(ours), side(stock), case.x, case.activation, case.convert)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("layout", ["HWIO", "OHWI"])
def test_initial_values(name, layout):
    stock, ours = (
        make(4, 6, (3, 3), rngs=nnx.Rngs(7), **keywords)
        for make, keywords in zip(PAIRS[name], ({}, {"filter_layout": layout}), strict=True)
    )
    expected = flax.convert_filters(nnx.state(stock), "HWIO", layout)
    assert_equal(nnx.state(ours), expected)


def test_metadata():
    module = conv(
        filter_layout="OHWI",
        kernel_init=nnx.with_metadata(modules.initial, axes=("out", None, None, "in")),
        kernel_metadata={"tag": 1},
        bias_metadata={"tag": 2},
    )
    assert_equal(module.kernel[...], conv(filter_layout="OHWI").kernel[...])
    assert module.kernel.axes == ("out", None, None, "in")
    assert (module.kernel.tag, module.bias.tag) == (1, 2)


@pytest.mark.parametrize("activation", [None, "relu"])
def test_explicit_sharding(activation):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        y = conv(activation=activation)(jax.device_put(X, jax.P()), out_sharding=jax.P("d"))
        assert jax.typeof(y).sharding.spec[0] == "d"
    np.testing.assert_array_equal(y, modules.reference(activation)(conv()(X)))


class TestFusion:
    """What is computed by one call."""

    @pytest.fixture(name="recorder", autouse=True)
    def recording(self, monkeypatch):
        return Recorder(monkeypatch)

    @pytest.mark.parametrize("name", modules.NAMES)
    def test_names(self, recorder, name):
        modules.assert_named(conv(activation=name)(X / 4), conv()(X / 4), name)
        modules.assert_named(transposed(activation=name)(X / 4), transposed()(X / 4), name)
        assert recorder.calls == [
            ("conv_bias_act", (6,), name),
            ("conv_transpose_bias_act", (6,), name),
        ]

    def test_without_a_bias(self, recorder):
        y = conv(activation="relu", use_bias=False)(X)
        np.testing.assert_array_equal(y, jax.nn.relu(conv(use_bias=False)(X)))
        assert recorder.calls == [("conv_bias_act", None, "relu")]

    @pytest.mark.parametrize(
        "module",
        [
            lambda activation: conv(activation=activation),
            lambda activation: transposed(activation=activation, padding="CIRCULAR"),
        ],
        ids=["function", "circular"],
    )
    @pytest.mark.parametrize("activation", [None, halved, "relu"])
    def test_what_is_not(self, recorder, module, activation):
        module(activation)(X)
        circular = module(activation).padding == "CIRCULAR"
        assert bool(recorder.calls) is (activation == "relu" and not circular)

    def test_another_function(self, recorder):
        called = []

        def convolve(*args, **kwargs):
            called.append(kwargs["dimension_numbers"].rhs_spec)
            return jax.lax.conv_general_dilated(*args, **kwargs)

        module = conv(activation="relu", filter_layout="OHWI", conv_general_dilated=convolve)
        np.testing.assert_array_equal(module(X), jax.nn.relu(conv()(X)))
        assert called == [(0, 3, 1, 2)]
        assert recorder.calls == []


REFUSED: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "padding": ({"padding": "FULL"}, (2, 5, 6, 4)),
    "pads": ({"padding": [1, 2, 3]}, (2, 5, 6, 4)),
    "causal": ({"padding": "CAUSAL"}, (2, 5, 6, 4)),
    "mask": ({"mask": np.ones((3, 3, 6, 4), np.float32)}, (2, 5, 6, 4)),
    "groups": ({"feature_group_count": 3}, (2, 5, 6, 4)),
    "features": ({}, (2, 5, 6, 3)),
    "strides": ({"strides": (2, 2, 2)}, (2, 5, 6, 4)),
    "argument": ({"window": 3}, (2, 5, 6, 4)),
    "rank": ({}, (4,)),
    "dtype": ({"dtype": "float23"}, (2, 5, 6, 4)),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.parametrize("ours", [{}, {"activation": "relu", "filter_layout": "OHWI"}])
def test_refusals(name, reason, ours):
    arguments, shape = REFUSED[reason]
    stock, mine = PAIRS[name]
    x = integers(shape)
    modules.assert_refused_alike(
        lambda: conv(make=mine, **arguments, **ours)(x), lambda: conv(make=stock, **arguments)(x)
    )


@pytest.mark.parametrize(
    "name, layouts", [("Conv", "HWIO, OHWI"), ("ConvTranspose", "HWIO, OHWI, IHWO")]
)
def test_refusals_of_what_is_ours(name, layouts):
    make = partial(PAIRS[name][1], 4, 6, 3, rngs=nnx.Rngs(0))
    text = re.escape(f"jaxcudnn.flax.{name}: {modules.UNKNOWN}'swish'; pass another as a function")
    with pytest.raises(ValueError, match=f"^{text}"):
        make(activation="swish")
    with pytest.raises(TypeError, match=re.escape(f"{modules.UNKNOWN}[1]; ")):
        make(activation=[1])
    text = f"jaxcudnn.flax.{name}: filter_layout must be one of {layouts}, got 'WHIO'; leave it out"
    with pytest.raises(ValueError, match=f"^{text}"):
        make(filter_layout="WHIO")


class TestCheckpoints:
    @pytest.mark.parametrize("name", PAIRS)
    def test_of_the_stock_module_and_back(self, name):
        stock, ours = (conv(make=make, bias_init=nnx.initializers.ones) for make in PAIRS[name])
        saved = nnx.to_pure_dict(nnx.state(stock))
        assert_equal(nnx.to_pure_dict(nnx.state(ours)), saved)
        for module in (ours, stock):
            state = nnx.state(module)
            nnx.replace_by_pure_dict(state, jax.tree.map(lambda a: a + 1, saved))
            nnx.update(module, state)
        np.testing.assert_array_equal(ours(X), stock(X))

    def test_of_another_layout(self):
        saved = nnx.to_pure_dict(nnx.state(conv(make=nnx.Conv)))
        converted = flax.convert_filters(saved, "HWIO", "OHWI")
        assert_equal(nnx.to_pure_dict(nnx.state(conv(filter_layout="OHWI"))), converted)
        assert_equal(flax.convert_filters(converted, "OHWI", "HWIO"), saved)

    @pytest.mark.parametrize("source, target", [("HWIO", "HIWO"), ("OIHW", "HWIO")])
    def test_unknown_layout(self, source, target):
        with pytest.raises(
            ValueError, match=r"^jaxcudnn\.flax\.convert_filters: filter_layout must be"
        ):
            flax.convert_filters(X, source, target)

    def test_layouts_are_those_of_their_letters(self):
        numbers = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
        for target in ("OHWI", "IHWO"):
            order = ["HWIO".index(letter) for letter in target]
            expected = numbers.transpose(order)
            np.testing.assert_array_equal(flax.convert_filters(numbers, "HWIO", target), expected)
            back = flax.convert_filters(expected, target, "HWIO")
            np.testing.assert_array_equal(back, numbers)
        between = flax.convert_filters(numbers.transpose(3, 0, 1, 2), "OHWI", "IHWO")
        np.testing.assert_array_equal(between, numbers.transpose(2, 0, 1, 3))


class TestTransformations:
    MODULE = staticmethod(partial(conv, activation="relu", filter_layout="OHWI"))

    @pytest.mark.parametrize("jit", [nnx.jit, jax.jit, nnx.remat], ids=["nnx", "jax", "remat"])
    def test_of_calls(self, jit):
        module = self.MODULE()
        np.testing.assert_array_equal(jit(lambda m, x: m(x))(module, X), module(X))

    def test_vmap(self):
        module = self.MODULE()
        mapped = nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(module, X[:, None])
        np.testing.assert_array_equal(mapped[:, 0], module(X))

    def test_scan_over_modules(self):
        layer = partial(flax.Conv, 4, 4, activation="relu", **EXACT)
        layers = nnx.vmap(lambda rngs: layer(rngs=rngs))(nnx.Rngs(0).split(3))
        run = nnx.scan(lambda x, m: m(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        one = layer(rngs=nnx.Rngs(0))
        np.testing.assert_array_equal(run(jnp.asarray(X), layers), one(one(one(jnp.asarray(X)))))

    def test_gradients_of_the_module(self):
        grads = nnx.grad(lambda m: jnp.sum(m(X)))(self.MODULE())
        assert grads.kernel.shape == (6, 3, 3, 4)

    @pytest.mark.parametrize("name", PAIRS)
    def test_pickle(self, name):
        module = conv(make=PAIRS[name][1], activation="relu", filter_layout="OHWI")
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(module))(X), module(X))


def test_an_activation_with_parameters():
    module = conv(activation=nnx.PReLU())
    assert set(nnx.to_pure_dict(nnx.state(module))) == {"kernel", "bias", "activation"}
    np.testing.assert_array_equal(module(X), nnx.PReLU()(conv()(X)))


class TestOnCuda:
    @pytest.fixture(autouse=True)
    def no_gpu(self, monkeypatch):
        monkeypatch.setattr(_load, "local_device", lambda: None)

    @pytest.mark.parametrize("activation", [None, "relu"])
    def test_conv(self, activation):
        ours = side(conv(activation=activation))
        assert Program(ours.apply, ours.params, X).operations == ["fprop"]
        # In TF32 an input's gradient with a filter that is copied is a forward convolution.
        program = Program(gradients(ours), ours.params, X)
        assert program.operations == ["fprop", "fprop", "wgrad"]

    @pytest.mark.parametrize("activation", [None, "relu"])
    @pytest.mark.parametrize("reverse", [False, True])
    def test_conv_transpose(self, activation, reverse):
        arguments = {"strides": (2, 2), "transpose_kernel": reverse}
        ours = side(transposed(activation=activation, **arguments))
        assert Program(ours.apply, ours.params, X).operations == ["dgrad"]
        program = Program(gradients(ours), ours.params, X)
        assert program.operations == ["dgrad", "fprop", "wgrad"]

    @pytest.mark.parametrize(
        "module, activation, call",
        [
            (conv, None, "conv_general_dilated"),
            (conv, "relu", "conv_bias_act"),
            (transposed, None, "conv_transpose"),
            (transposed, "relu", "conv_transpose_bias_act"),
        ],
    )
    def test_explain_names_the_function_that_computes_it(self, module, activation, call):
        (row,) = jaxcudnn.explain(module(activation=activation, strides=(2, 2)))(X)
        assert row.call == call

    @pytest.mark.parametrize(
        "module, layout",
        [
            (conv, "OHWI"),
            (partial(transposed, strides=(2, 2)), "IHWO"),
            (partial(transposed, strides=(2, 2), transpose_kernel=True), "OHWI"),
        ],
        ids=["conv", "transposed", "reversed"],
    )
    @pytest.mark.parametrize("activation", [None, "relu"])
    def test_nothing_is_reordered_for_a_filter_in_cudnns_layout(self, module, layout, activation):
        for filter_layout in (layout, "HWIO"):
            ours = side(module(activation=activation, filter_layout=filter_layout))
            assert Program(ours.apply, ours.params, X).reorders is (filter_layout == "HWIO")
            program = Program(gradients(ours), ours.params, X)
            assert program.reorders is (filter_layout == "HWIO")


def test_documented_code():
    page = (Path(__file__).parents[1] / "docs" / "modules.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec("".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)), names)
    assert names["conv"].kernel.shape == names["ours"]["kernel"].shape == (16, 3, 3, 3)
    assert_equal(names["again"], names["stock"])
    for word in (*modules.NAMES, *CONV_TRANSPOSE):
        assert f"`{word}`" in page


def test_jaxcudnn_imports_none_of_these_libraries():
    (names,) = run_python("import sys, jaxcudnn; print(*sys.modules)")
    assert {"jax", "jaxcudnn"} < set(names.split())
    assert not {"flax", "equinox", "haiku"} & set(names.split())


def test_without_flax(monkeypatch):
    modules.assert_says_what_to_install(monkeypatch, "flax", "flax", "flax")
