# SPDX-License-Identifier: Apache-2.0
"""Models of other libraries under `installed`: all of their convolutions are ours on CUDA.

They are traced and lowered, and not run: see test_gpu_install.py for that.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxcudnn
import lowered
from jaxcudnn import _load
from networks import NETWORKS
from processes import run_python


@pytest.fixture(autouse=True)
def as_libraries_expect(monkeypatch):
    monkeypatch.setattr(_load, "local_device", lambda: None)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def of_training(convolutions: int) -> tuple[int, int]:
    """One forward and two backward for each layer; of the first, no gradient by the images."""
    return 3 * convolutions - 1, 0


@pytest.mark.parametrize("name", NETWORKS)
def test_small_networks(name: str):
    network = NETWORKS[name]()
    arguments = network.parameters, network.images
    with jaxcudnn.installed():
        assert lowered.convolutions(network.apply, *arguments) == (network.convolutions, 0)
        assert lowered.convolutions(network.train, *arguments) == of_training(network.convolutions)
    assert lowered.convolutions(network.apply, *arguments) == (0, network.convolutions)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "convolutions"), [("ResNet50", 53), ("MobileNetV1", 27)])
def test_haiku(name: str, convolutions: int):
    haiku = pytest.importorskip("haiku")
    net = getattr(haiku.nets, name)
    model = haiku.transform_with_state(lambda x: net(num_classes=10)(x, is_training=True))
    images = jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.float32)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    parameters, state = jax.eval_shape(model.init, key, images)

    def loss(parameters, state, images):
        return jnp.mean(model.apply(parameters, state, None, images)[0] ** 2)

    with jaxcudnn.installed():
        found = lowered.convolutions(jax.grad(loss), parameters, state, images)
    assert found == of_training(convolutions)


TESTS = str(Path(__file__).parent)
KERAS = {
    "ResNet50": 53,
    "MobileNetV2": 52,
    "EfficientNetB0": 81,
    "ConvNeXtTiny": 22,
    "DenseNet121": 120,
}

KERAS_SCRIPT = """
import json

import jax
import keras
import numpy as np

import jaxcudnn
import lowered

# Random numbers would have to be compiled for each shape, and no number matters here.
for kind in (keras.initializers.VarianceScaling, keras.initializers.Zeros, keras.initializers.Ones):
    kind.__call__ = lambda self, shape, dtype=None: np.zeros(shape, dtype or "float32")

def kinds(variables):
    return [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in variables]

def convolutions(name):
    model = getattr(keras.applications, name)(weights=None, input_shape=(32, 32, 3), classes=3)

    def loss(trained, others, images):
        return model.stateless_call(trained, others, images, training=True)[0].sum()

    images = jax.ShapeDtypeStruct((2, 32, 32, 3), "float32")
    with jaxcudnn.installed():
        return lowered.convolutions(
            jax.grad(loss), kinds(model.trainable_variables), kinds(model.non_trainable_variables),
            images,
        )

print(json.dumps({name: convolutions(name) for name in NAMES}))
"""


@pytest.mark.slow
def test_keras():
    """In a process of its own, since Keras reads its backend once."""
    if find_spec("keras") is None:  # importing it here would choose its backend
        pytest.skip("keras is not installed")
    script = f"import sys; sys.path.insert(0, {TESTS!r}); NAMES = {list(KERAS)}\n{KERAS_SCRIPT}"
    *_, last = run_python(script, KERAS_BACKEND="jax")
    found = {name: tuple(count) for name, count in json.loads(last).items()}
    assert found == {name: of_training(count) for name, count in KERAS.items()}
