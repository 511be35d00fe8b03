# SPDX-License-Identifier: Apache-2.0
"""Convolutions too large for cuDNN, in pieces: with a stand-in for the limit."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aot import shaped
from cases import CUDNN_CASES, OPERANDS, Case, case, integers, parametrize
from jaxcudnn import _lowering, _primitives
from jaxcudnn._splitting import compute_in_pieces
from test_lowering import NWC, calls, conv
from test_spec import equation

FULL = [c for c in CUDNN_CASES if 0 not in (*c.x_shape, *c.w_shape, *c.y_shape)]
SINGLE = [replace(c, name=f"{c.name}-single", n=1) for c in FULL[::2]]


def compute_counting(arrays, spec, layout, limit: int) -> tuple[jax.Array, list[int]]:
    """The result in pieces of pieces, as lowering makes them, and the largest array of each."""
    largest = []

    def compute(arrays, spec):
        for role, array in arrays.items():
            assert array.shape == layout.to_array(role, spec.shape(role))
        assert min(min(pads) for pads in spec.padding) >= 0
        part = compute_in_pieces(arrays, spec=spec, layout=layout, limit=limit, compute=compute)
        if part is None:
            largest.append(max(math.prod(spec.x_shape), math.prod(spec.y_shape)))
            part = _primitives.compute(arrays, spec=spec, layout=layout)
        return part

    return compute(arrays, spec), largest


@parametrize(FULL[1::4] + SINGLE)
def test_pieces_make_the_whole(case: Case):
    arrays = {role: integers(i, case.shape(role)) for i, role in enumerate("xwy")}
    for role, names in OPERANDS.items():
        operands = {name: arrays[name] for name in names}
        params = equation(case.cudnn(role), *operands.values()).params
        spec, layout = params["spec"], params["layout"]
        whole = _primitives.compute(operands, spec=spec, layout=layout)
        limit = max(math.prod(spec.x_shape), math.prod(spec.y_shape)) // 2
        computed, _ = compute_counting(operands, spec, layout, limit)
        np.testing.assert_array_equal(computed, whole, err_msg=role)


LONG = case("long", (40,), (3,), ((1, 1),), n=1, c=2, k=3)
LONG_STRIDED = case("strided", (61, 2), (3, 1), ((2, 0), (0, 0)), n=1, strides=(3, 1), c=2, k=2)


@pytest.mark.parametrize("case", [LONG, LONG_STRIDED], ids=lambda case: case.name)
@pytest.mark.parametrize("computed", OPERANDS)
@pytest.mark.parametrize("parts", [2, 3, 5])
def test_no_piece_is_too_large(case: Case, computed: str, parts: int):
    operands = dict(zip(OPERANDS[computed], case.operands(computed, integers), strict=True))
    params = equation(case.cudnn(computed), *operands.values()).params
    spec, layout = params["spec"], params["layout"]
    limit = max(math.prod(spec.x_shape), math.prod(spec.y_shape)) // parts
    _, largest = compute_counting(operands, spec, layout, limit)
    assert parts <= len(largest) <= 2 * parts + 1
    assert max(largest) <= limit


def test_the_filter_gradient_is_rounded_once():
    """A sum of 771 ones is 772 in bfloat16, and three sums of 257 would be 3 times 256."""
    c = case("ones", (1,), (1,), n=771, c=1, k=1)
    x, dy = (jnp.ones((771, 1, 1), "bfloat16") for _ in range(2))
    params = equation(c.cudnn("w"), x, dy).params
    dw, largest = compute_counting({"x": x, "y": dy}, **params, limit=257)
    assert len(largest) == 3
    assert float(dw[0, 0, 0]) == 772 and dw.dtype == "bfloat16"


@pytest.mark.parametrize(
    "images, length, parts", [(4, 8, 4), (1, 64, 3), (2, 2, 1), (2, 16, 2 * 3)]
)
def test_lowering_splits(monkeypatch, images: int, length: int, parts: int):
    monkeypatch.setattr(_lowering, "MOST_ELEMENTS", 8 * (8 if images > 1 else 32))
    shapes = (images, length, 8), (8, 3, 8)
    f = lambda x, w: conv(x, w, (1,), [(1, 1)], NWC)  # noqa: E731
    assert len(calls(f, *map(shaped, shapes))) == parts
