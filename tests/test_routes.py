# SPDX-License-Identifier: Apache-2.0
"""Routes: that each computes what the definition says, when it is taken, and what options say."""

from functools import partial

import jax
import numpy as np
import pytest

import definition
import oracle
from cases import CASES, CHANNELS_LAST, OPERANDS, Case, case, integers, normal
from jaxcudnn import Options, _options, _reference, _route_blocks, _routes
from jaxcudnn._dtypes import Dtypes
from jaxcudnn._spec import ROLES, ConvSpec, Layout
from tolerance import assert_close

OPS = {"y": "fprop", "x": "dgrad", "w": "wgrad"}
INEXACT = _options.INEXACT_ROUTES
NAMES = (*_options.ROUTES, *INEXACT)
NWC, NHWC, NDHWC = CHANNELS_LAST.values()

MORE = [
    case("1d-patches-padded", (10,), (3,), ((1, 2),), strides=(3,), dimension_numbers=NWC),
    case("1d-patches-cropped", (11,), (3,), strides=(3,)),
    case("2d-patches-padded", (7, 9), (2, 4), ((1, 0), (1, 2)), strides=(2, 4),
         dimension_numbers=("NHWC", "HWIO", "NHWC")),
    case("2d-patches-grouped", (6, 8), (3, 2), c=4, k=6, groups=2, strides=(3, 2)),
    case("2d-pixels", (7, 6), (1, 1), ((0, 1), (1, 1)), strides=(2, 3), dimension_numbers=NHWC),
    case("2d-half-of-the-blocks", (9, 8), (2, 3), ((1, 0), (0, 0)), strides=(4, 3)),
    case("3d-patches", (5, 4, 6), (2, 2, 3), ((1, 0), (0, 0), (0, 0)), strides=(2, 2, 3),
         dimension_numbers=NDHWC),
    case("3d-doubling", (4, 4, 4), (2, 2, 2), c=3, k=5, strides=(2, 2, 2)),
    case("1d-audio", (40,), (10,), strides=(5,), c=1, k=8, dimension_numbers=NWC),
    case("2d-stem", (14, 13), (7, 7), ((3, 3), (3, 3)), strides=(2, 2), dimension_numbers=NHWC),
    case("2d-stem-first", (15, 12), (3, 3), "SAME", strides=(2, 2)),
    case("2d-stem-by-4", (15, 16), (7, 11), ((2, 2), (5, 2)), strides=(4, 4)),
    case("2d-one-stride", (9, 8), (3, 3), ((1, 1), (2, 2)), strides=(1, 2), dilation=(2, 1),
         dimension_numbers=NHWC),
    case("2d-strided-past-the-end", (9, 5), (3, 2), ((0, 4), (1, 6)), strides=(3, 2)),
    case("3d-stem", (5, 8, 7), (3, 7, 5), ((1, 1), (3, 3), (2, 2)), strides=(1, 2, 2),
         dimension_numbers=NDHWC),
    case("1d-blocks", (24,), (7,), ((3, 3),), c=3, k=5, dimension_numbers=NWC),
    case("1d-blocks-one-sided", (21,), (6,), c=9, k=8, dimension_numbers=("NWC", "WIO", "NWC")),
    case("1d-blocks-wide-padding", (8,), (3,), ((9, 1),), c=2, k=4),
    case("2d-blocks", (5, 16), (3, 3), "SAME", c=3, k=9, dimension_numbers=NHWC),
    case("2d-blocks-of-two", (6, 10), (2, 5), ((1, 0), (4, 2)), c=20, k=12,
         dimension_numbers=("NHWC", "HWIO", "NHWC")),
    case("2d-blocks-of-four", (6, 12), (3, 1), ((2, 2), (0, 0)), c=16, k=16, dilation=(2, 3)),
    case("2d-blocks-strided", (7, 8), (3, 4), ((1, 1), (2, 1)), c=3, k=8, strides=(2, 1),
         dimension_numbers=NHWC),
    case("3d-blocks", (4, 3, 8), (3, 2, 3), "SAME", c=4, k=6, dimension_numbers=NDHWC),
    case("1d-depthwise", (12,), (4,), ((1, 2),), c=5, k=5, groups=5, dimension_numbers=NWC),
    case("1d-depthwise-strided", (12,), (3,), ((2, 1),), c=5, k=5, groups=5, strides=(2,),
         dilation=(2,), dimension_numbers=("NCW", "WIO", "NCW")),
    case("2d-depthwise-last", (7, 6), (3, 2), ((1, 1), (1, 0)), c=4, k=4, groups=4,
         strides=(1, 2), dimension_numbers=NHWC),
    case("2d-depthwise-large", (9, 11), (7, 9), "SAME", c=3, k=3, groups=3, dimension_numbers=NHWC),
    case("2d-depthwise-wide", (5, 37), (3, 5), ((1, 1), (2, 3)), c=3, k=3, groups=3,
         dilation=(2, 1)),
    case("2d-depthwise-wide-strided", (6, 40), (3, 8), ((1, 1), (3, 5)), c=2, k=2, groups=2,
         strides=(2, 1), dimension_numbers=("NHWC", "HWIO", "NHWC")),
    case("2d-one-channel", (20, 13), (6, 5), c=1, k=1),
    case("3d-depthwise", (4, 5, 6), (3, 2, 4), "SAME", c=3, k=3, groups=3,
         dimension_numbers=NDHWC),
]  # fmt: skip
TABLE = [each for each in (*CASES, *MORE) if not each.crops and 0 not in each.y_shape]


def described(case: Case, role: str, dtype: str = "float32", **changes) -> tuple[ConvSpec, Layout]:
    """The spec of a case as cuDNN's functions describe it, whatever they would make of it."""
    axes = [case.axes(name) for name in "xwy"]
    spec = ConvSpec(
        x_shape=(case.n, case.c, *case.size),
        w_shape=(case.k, case.c // case.groups, *case.window),
        strides=case.strides,
        padding=case.pads,
        dilation=case.dilation,
        groups=case.groups,
        dtypes=Dtypes(dtype, dtype, dtype),
        **{
            "flip": False,
            "precision": (jax.lax.Precision.DEFAULT,) * 2,
            "options": Options(),
        }
        | changes,
    )
    return spec, Layout(*axes)


def refer(a, b, *, op: str, spec: ConvSpec, layout: Layout) -> jax.Array:
    """Computes other convolutions, where there is no cuDNN."""
    for array, role in zip((a, b), ROLES[op], strict=False):
        assert array.shape == layout.to_array(role, spec.shape(role))
    return getattr(_reference, op)(a, b, spec=spec, layout=layout)


def compute(name: str, role: str, spec: ConvSpec, layout: Layout):
    kind = _routes.KINDS[name]
    return jax.jit(partial(kind.compute, op=OPS[role], spec=spec, layout=layout, convolve=refer))


def possible(name: str, case: Case, role: str, **changes) -> bool:
    spec, _ = described(case, role, **changes)
    return 0 not in (*spec.x_shape, *spec.w_shape) and _routes.KINDS[name].is_possible(
        OPS[role], spec
    )


def possibilities(cases, names=NAMES) -> list:
    return [
        pytest.param(name, each, role, id=f"{name}-{each.name}-{role}")
        for name in names
        for each in cases
        for role in OPERANDS
        if possible(name, each, role)
    ]


class TestValue:
    @pytest.mark.parametrize(("name", "case", "role"), possibilities(TABLE))
    def test_integers(self, name, case, role):
        a, b = case.operands(role, integers)
        flip = len(case.name) % 2 == 1
        exact, _ = oracle.compute(role, a, b, case, flip=flip)
        computed = compute(name, role, *described(case, role, flip=flip))(a, b)
        assert computed.shape == exact.shape and computed.dtype == "float32"
        if name in INEXACT:
            computed = np.round(computed)
        np.testing.assert_array_equal(computed, exact)

    @pytest.mark.parametrize(("name", "case", "role"), possibilities(MORE, _options.ROUTES))
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_normal_numbers(self, name, case, role, dtype):
        a, b = case.operands(role, normal, dtype)
        exact, magnitude = oracle.compute(role, a, b, case)
        computed = compute(name, role, *described(case, role, dtype))(a, b)
        assert_close(computed, exact, magnitude, dtype=dtype, length=case.lengths[role])

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("role", OPERANDS)
    def test_every_route_has_cases(self, name, role):
        found = [each.values for each in possibilities(TABLE, [name])]
        count = sum(values[2] == role for values in found)
        assert count == 0 if (name, role) == ("blocks", "w") else count >= 4

    @pytest.mark.parametrize("size", [2, 4, 8])
    def test_blocks_of_every_size(self, size):
        sizes = {
            _route_blocks.positions("fprop", described(each, "y")[0])
            for each in MORE
            if possible("blocks", each, "y")
        }
        assert size in sizes


class TestFft:
    """Errors are within the bound where all numbers of a channel are of one size."""

    LAYER = case("2d-31x31", (32, 30), (31, 31), "SAME", n=3, c=2, k=2, groups=2,
                 dimension_numbers=NHWC)  # fmt: skip

    def exact(self, role: str, a, b) -> np.ndarray:
        """By `definition`, since `oracle` goes through the meetings one by one."""
        layer, names = self.LAYER, dict(zip("xwy", definition.ROLES, strict=True))
        geometry = definition.Geometry(
            lhs_shape=(layer.n, layer.c, *layer.size),
            rhs_shape=(layer.k, 1, *layer.window),
            strides=layer.strides,
            padding=layer.pads,
            lhs_dilation=(1, 1),
            rhs_dilation=layer.dilation,
            feature_groups=layer.groups,
            batch_groups=1,
            axes={name: layer.axes(role) for role, name in names.items()},
        )
        operands = zip(OPERANDS[role], (a, b), strict=True)
        arrays = {names[name]: np.asarray(array, np.float64) for name, array in operands}
        return definition.compute(names[role], arrays, geometry)

    @pytest.mark.parametrize("role", OPERANDS)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_normal_numbers(self, role, dtype):
        a, b = self.LAYER.operands(role, normal, dtype)
        exact, magnitude = self.exact(role, a, b), self.exact(role, abs(a), abs(b))
        computed = compute("fft", role, *described(self.LAYER, role, dtype))(a, b)
        assert_close(computed, exact, magnitude, dtype=dtype, length=self.LAYER.lengths[role])

    def test_is_relative_to_the_largest_number_of_a_channel(self):
        """Why it is not among the routes that are taken unasked."""
        x, w = self.LAYER.operands("y", normal)
        x = x.at[:, 0, 0, 0].set(1e6)
        computed = compute("fft", "y", *described(self.LAYER, "y"))(x, w)
        apart = np.abs(computed - self.exact("y", x, w))
        apart = apart[:, 20:, 20:]  # in no window of which the large number is
        assert 1e-3 < apart[..., 0].max() < 10 and apart[..., 1].max() < 1e-3
