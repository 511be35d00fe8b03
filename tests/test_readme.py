# SPDX-License-Identifier: Apache-2.0
"""The README's own code runs as it stands there."""

import re
from pathlib import Path

import numpy as np

import jaxcudnn
from jaxcudnn import _load

README = (Path(__file__).parents[1] / "README.md").read_text()
FIRST, SECOND, THIRD, FOURTH, FIFTH = re.findall(
    r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL
)


def test_first_block():
    names = {}
    exec(FIRST, names)
    assert names["y"].shape == (8, 16, 16, 32)
    assert names["dx"].shape == (8, 3, 32, 32)
    assert names["dw"].shape == (16, 3, 3, 3)


def test_second_block():
    names = {}
    exec(FIRST + SECOND, names)
    assert names["y"].shape == names["dy"].shape
    assert names["dx"].shape == names["x"].shape
    assert names["dw"].shape == names["w"].shape


def test_third_block():
    names = {}
    exec(FIRST + SECOND + THIRD, names)
    y, x8, w8 = (names[name] for name in ("y", "x8", "w8"))
    assert y.dtype == "bfloat16"
    same = jaxcudnn.conv_fprop(x8, w8, padding=1, preferred_element_type="float32") * 0.125
    np.testing.assert_array_equal(y, same.astype("bfloat16"))


def test_fourth_block():
    names = {}
    exec(FIRST + SECOND + FOURTH, names)
    np.testing.assert_array_equal(names["z"][:, 1:-1, 1:-1], 16 * 9 + 1)
    assert names["y"].shape == (8, 16, 16, 16)


def test_fifth_block(monkeypatch, capsys):
    monkeypatch.setattr(_load, "local_device", lambda: None)
    names = {}
    exec(FIRST + SECOND + FOURTH + FIFTH, names)
    assert names["y"].shape == (8, 16, 32, 32)
    assert names["dx"].shape == names["x"].shape
    assert names["dw"].shape == names["w"].shape
    assert "1 convolution, 1 by cuDNN" in capsys.readouterr().out


def test_what_a_reader_needs_comes_first():
    head = README.splitlines()[:40]
    for text in ("pip install", "pytest", "lax.conv_general_dilated", "| dtypes |", "Limits:"):
        assert any(text in line for line in head), text
