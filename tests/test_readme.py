# SPDX-License-Identifier: Apache-2.0
"""The README's own code runs as it stands there."""

import re
from pathlib import Path

import jax.numpy as jnp

README = (Path(__file__).parents[1] / "README.md").read_text()
FIRST, SECOND = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_first_block():
    names = {}
    exec(FIRST, names)
    assert names["y"].shape == (8, 16, 16, 32)
    assert names["dx"].shape == (8, 3, 32, 32)
    assert names["dw"].shape == (16, 3, 3, 3)


def test_second_block():
    x, w, dy = jnp.ones((2, 4, 9, 9)), jnp.ones((6, 4, 3, 3)), jnp.ones((2, 6, 5, 5))
    names = {"x": x, "w": w, "dy": dy}
    exec("import jaxcudnn\n" + SECOND, names)
    assert names["y"].shape == dy.shape
    assert names["dx"].shape == x.shape
    assert names["dw"].shape == w.shape


def test_what_a_reader_needs_comes_first():
    head = README.splitlines()[:40]
    for text in ("pip install", "pytest", "lax.conv_general_dilated", "| dtypes |", "Limits:"):
        assert any(text in line for line in head), text
