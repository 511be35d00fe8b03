# SPDX-License-Identifier: Apache-2.0
"""That the benchmark of padded channels times two computations of the same thing."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from cases import integers
from jaxcudnn._spec import ROLES

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
channel_padding = importlib.import_module("channel_padding")

LAYERS = [channel_padding.Layer(*numbers, "float32") for numbers in [
    (1, 1, 1, 32), (2, 1, 64, 3), (2, 8, 17, 17), (3, 4, 3, 5),
]]  # fmt: skip


@pytest.mark.parametrize("op", ROLES)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_padding_changes_no_result(monkeypatch, layer, op: str):
    monkeypatch.setattr(channel_padding, "SPATIAL", {1: (8,), 2: (5, 6), 3: (3, 4, 3)})
    wide = layer.padded()
    assert wide.inputs % 4 == wide.outputs % 4 == 0 and wide != layer
    shapes = layer.shapes()
    operands = [integers(i, shapes[role]) for i, role in enumerate(ROLES[op][:2])]
    computed = channel_padding.with_padding(layer, op)(*operands)
    np.testing.assert_array_equal(computed, layer.function(op)(*operands))


def test_layers_have_few_or_odd_channels():
    for layer in channel_padding.layers(quick=False):
        assert layer.padded() != layer
