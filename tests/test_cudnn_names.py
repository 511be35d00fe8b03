# SPDX-License-Identifier: Apache-2.0
"""The functions that have cuDNN's names, beside those of cuDNN's own Python frontend.

The frontend describes graphs without a GPU. It loads cuDNN, and so gets a process of its own.
"""

import importlib.metadata
import inspect
import json
import re
from typing import Any

import pytest

import jaxcudnn
from processes import run_python

VERSION = "1.28.0"

# What ours take beside cuDNN's arguments.
OURS = {
    name: {"dimension_numbers", "precision", "preferred_element_type", "options", *others}
    for name, others in {
        "conv_fprop": ("image_descale", "weight_descale"),
        "conv_dgrad": ("groups", "image_spatial_shape", "loss_descale", "filter_descale"),
        "conv_wgrad": ("groups", "filter_spatial_shape", "image_descale", "loss_descale"),
    }.items()
}

SCRIPT = """
import json

import cudnn
import jax.numpy as jnp
import numpy as np

import jaxcudnn

FLOAT = cudnn.data_type.FLOAT
MODES = cudnn._compiled_module.convolution_mode
graph = cudnn.pygraph()
x, w = jnp.arange(240.0).reshape(2, 4, 5, 6), jnp.arange(144.0).reshape(6, 4, 3, 2)


def described(shape):
    strides = np.cumprod((1, *shape[:0:-1]))[::-1].tolist()
    return graph.tensor(dim=list(shape), stride=strides, data_type=FLOAT)


# The shapes of the three results, ours and the frontend's, for the same arguments.
shapes = []
for padding in ({"padding": [1, 2]}, {"pre_padding": [1, 0], "post_padding": [2, 1]}):
    arguments = padding | {
        "stride": [2, 1],
        "dilation": [1, 2],
        "convolution_mode": MODES.CONVOLUTION,
        "compute_data_type": FLOAT,
        "name": "stem",
    }
    y = jaxcudnn.conv_fprop(image=x, weight=w, **arguments)
    dx = jaxcudnn.conv_dgrad(loss=y, filter=w, image_spatial_shape=[5, 6], **arguments)
    dw = jaxcudnn.conv_wgrad(image=x, loss=y, filter_spatial_shape=[3, 2], **arguments)
    image, weight, loss = map(described, (x.shape, w.shape, y.shape))
    results = (
        graph.conv_fprop(image=image, weight=weight, **arguments),
        graph.conv_dgrad(loss=loss, filter=weight, out_dims=list(x.shape), **arguments),
        graph.conv_wgrad(image=image, loss=loss, out_dims=list(w.shape), **arguments),
    )
    for ours, theirs in zip((y, dx, dw), results, strict=True):
        shapes.append((ours.shape, theirs.get_dim()))


def equal_to_named(mode):
    by_enumerator = jaxcudnn.conv_fprop(x, w, padding=0, convolution_mode=mode)
    by_name = jaxcudnn.conv_fprop(x, w, padding=0, convolution_mode=mode.name)
    return bool((by_enumerator == by_name).all())


def accepted(data_type):
    try:
        jaxcudnn.conv_fprop(x, w, padding=0, compute_data_type=data_type)
    except NotImplementedError:
        return False
    return True


print(json.dumps({
    "shapes": shapes,
    "modes": {name: equal_to_named(mode) for name, mode in MODES.__members__.items()},
    "data_types": {name: accepted(t) for name, t in cudnn.data_type.__members__.items()},
    "signatures": {
        name: getattr(cudnn._compiled_module.backend_graph, name).__doc__
        for name in ("conv_fprop", "conv_dgrad", "conv_wgrad")
    },
}))
"""


@pytest.fixture(name="frontend", scope="module")
def ask_frontend() -> dict[str, Any]:
    try:
        installed = importlib.metadata.version("nvidia-cudnn-frontend")
    except importlib.metadata.PackageNotFoundError:
        installed = "none"
    if installed != VERSION:
        pytest.skip(f"nvidia-cudnn-frontend {VERSION} is not installed ({installed})")
    return json.loads(run_python(SCRIPT)[-1])


def test_same_arguments_give_the_same_shapes(frontend):
    assert len(frontend["shapes"]) == 6
    for ours, theirs in frontend["shapes"]:
        assert ours == theirs


def test_enumerators_are_understood(frontend):
    assert frontend["modes"] == {"CROSS_CORRELATION": True, "CONVOLUTION": True}
    accepted = {name for name, taken in frontend["data_types"].items() if taken}
    assert accepted == {"FLOAT", "NOT_SET"}
    assert {"HALF", "BFLOAT16", "DOUBLE"} <= set(frontend["data_types"])


@pytest.mark.parametrize("name", OURS)
def test_arguments_have_their_names_and_order(frontend, name: str):
    """cuDNN has two overloads, one with `padding`, one with `pre_padding` and `post_padding`."""
    overloads = re.findall(
        rf"^\d+\. {name}\(self: [\w.]+, (.*)\) ->", frontend["signatures"][name], re.M
    )
    theirs = [re.findall(r"(?:^|, )(\w+): ", overload) for overload in overloads]
    parameters = inspect.signature(getattr(jaxcudnn, name)).parameters
    ours = [parameter for parameter in parameters if parameter not in OURS[name]]
    assert len(theirs) == 2
    assert set(ours) == set(theirs[0]) | set(theirs[1])
    for names, overload in zip(theirs, overloads, strict=True):
        assert [parameter for parameter in ours if parameter in names] == names
        assert f"<convolution_mode.{parameters['convolution_mode'].default}: " in overload
