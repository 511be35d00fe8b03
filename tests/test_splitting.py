# SPDX-License-Identifier: Apache-2.0
"""Convolutions too large for cuDNN, in pieces: with a stand-in for the limit."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcudnn
from aot import parse_attributes, shaped
from cases import CHANNELS_LAST, CUDNN_CASES, OPERANDS, Case, case, integers, parametrize
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
            largest.append(max(math.prod(spec.shape(role)) for role in "xwy"))
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


# Of each, the filter is the largest array.
FILTERS = [
    case("outputs", (4,), (3,), ((1, 1),), c=6, k=8),
    case("inputs", (4, 3), (2, 3), ((1, 0), (1, 1)), c=20, k=3, dimension_numbers=CHANNELS_LAST[2]),
    case("groups", (3,), (3,), ((1, 1),), n=1, c=8, k=12, groups=4, strides=(2,)),
    case("groups-scrambled", (2, 3), (2, 3), "SAME", n=1, c=6, k=6, groups=3,
         dimension_numbers=("CHWN", "IHOW", "HCNW")),
]  # fmt: skip


@pytest.mark.parametrize("case", FILTERS, ids=lambda case: case.name)
@pytest.mark.parametrize("computed", OPERANDS)
@pytest.mark.parametrize("limit", [60, 10])
def test_filters_are_cut(case: Case, computed: str, limit: int):
    """Into groups, outputs and inputs, as far as single taps of them; then arrays are small too."""
    operands = dict(zip(OPERANDS[computed], case.operands(computed, integers), strict=True))
    params = equation(case.cudnn(computed), *operands.values()).params
    spec, layout = params["spec"], params["layout"]
    assert math.prod(spec.w_shape) > limit
    whole = _primitives.compute(operands, spec=spec, layout=layout)
    result, largest = compute_counting(operands, spec, layout, limit)
    np.testing.assert_array_equal(result, whole)
    assert result.dtype == whole.dtype
    assert len(largest) >= math.prod(spec.w_shape) / limit
    assert max(largest) <= limit


def test_one_image_of_many_channels_is_cut():
    c = case("channels", (3,), (3,), ((1, 1),), n=1, c=50, k=40)
    x, w = c.operands("y", integers)
    params = equation(c.conv, x, w).params
    y, largest = compute_counting({"x": x, "w": w}, **params, limit=60)
    np.testing.assert_array_equal(y, c.conv(x, w))
    assert max(largest) <= 60


def test_what_cannot_be_cut_is_left_whole():
    """A filter of one output and one input."""
    c = case("taps", (5,), (5,), n=1, c=1, k=1)
    x, w = c.operands("y", integers)
    _, largest = compute_counting({"x": x, "w": w}, **equation(c.cudnn("y"), x, w).params, limit=4)
    assert largest == [5]


@pytest.mark.parametrize("computed", ["y", "x"])
def test_sums_of_pieces_are_rounded_once(computed: str):
    """771 ones again: of three pieces of as many inputs, or outputs, for y and for dx."""
    c = case(
        "ones", (1,), (1,), n=1, c=771 if computed == "y" else 1, k=1 if computed == "y" else 771
    )
    operands = c.operands(computed, lambda seed, shape, dtype: jnp.ones(shape, "bfloat16"))
    params = equation(c.cudnn(computed), *operands).params
    arrays = dict(zip(OPERANDS[computed], operands, strict=True))
    result, largest = compute_counting(arrays, **params, limit=257)
    assert len(largest) == 3
    assert result.size == 1 and float(result.sum()) == 772 and result.dtype == "bfloat16"


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
    shapes = (images, length, 8), (2, 3, 8)
    f = lambda x, w: conv(x, w, (1,), [(1, 1)], NWC)  # noqa: E731
    assert len(calls(f, *map(shaped, shapes))) == parts


def test_lowering_splits_a_filter(monkeypatch):
    monkeypatch.setattr(_lowering, "MOST_ELEMENTS", 8 * 3 * 8)
    f = lambda x, w: conv(x, w, (1,), [(1, 1)], NWC)  # noqa: E731
    found = calls(f, shaped((1, 4, 8)), shaped((32, 3, 8)))
    assert [parse_attributes(line)["w"] for line in found] == [[8, 8, 1, 3]] * 4


def test_more_images_than_32_bits_count_are_split():
    """Of 4 elements each, so that what cuDNN is given is runs of 2^29 - 1 images."""
    f = lambda x, w: jaxcudnn.conv_fprop(x, w, padding=0)  # noqa: E731
    found = calls(f, shaped((2**32, 1, 2, 2)), shaped((1, 1, 1, 1)))
    images = [parse_attributes(line)["x"][0] for line in found]
    assert sum(images) == 2**32 and max(images) == 2**29 - 1
