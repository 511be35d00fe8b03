# SPDX-License-Identifier: Apache-2.0
"""The table of convolutions that the tests draw from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcudnn

CHANNELS_FIRST = {
    1: ("NCW", "OIW", "NCW"),
    2: ("NCHW", "OIHW", "NCHW"),
    3: ("NCDHW", "OIDHW", "NCDHW"),
}
CHANNELS_LAST = {
    1: ("NWC", "OWI", "NWC"),
    2: ("NHWC", "OHWI", "NHWC"),
    3: ("NDHWC", "ODHWI", "NDHWC"),
}

OPERANDS = {"y": ("x", "w"), "x": ("y", "w"), "w": ("x", "y")}

Padding = str | Sequence[tuple[int, int]]


def normal(seed: int, shape: Sequence[int], dtype: str) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def integers(seed: int, shape: Sequence[int], dtype: str = "float32") -> jax.Array:
    """Small integers, whose products and sums are exact in float32."""
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), dtype)


@dataclass(frozen=True)
class Case:
    """One convolution in the words of `lax`, its spatial sizes in the order of the filter's."""

    name: str
    n: int
    c: int
    k: int
    size: tuple[int, ...]
    window: tuple[int, ...]
    padding: Padding
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    dimension_numbers: tuple[str, str, str]

    @property
    def x_shape(self) -> tuple[int, ...]:
        return self._shape(0, N=self.n, C=self.c, spatial=self.size)

    @property
    def w_shape(self) -> tuple[int, ...]:
        return self._shape(1, O=self.k, I=self.c // self.groups, spatial=self.window)

    @cached_property
    def y_shape(self) -> tuple[int, ...]:
        """By `lax`."""
        operands = (
            jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (self.x_shape, self.w_shape)
        )
        return jax.eval_shape(self.lax_conv, *operands).shape

    @property
    def pads(self) -> tuple[tuple[int, int], ...]:
        """The padding as numbers, by `lax`."""
        if not isinstance(self.padding, str):
            return tuple(self.padding)
        extents = [d * (r - 1) + 1 for d, r in zip(self.dilation, self.window, strict=True)]
        pads = lax.padtype_to_pads(self.size, extents, self.strides, self.padding)
        return tuple((int(low), int(high)) for low, high in pads)

    @property
    def arguments(self) -> dict[str, Any]:
        """What `conv_general_dilated` takes beside the operands."""
        return {
            "window_strides": self.strides,
            "padding": self.padding,
            "rhs_dilation": self.dilation,
            "dimension_numbers": self.dimension_numbers,
            "feature_group_count": self.groups,
        }

    @property
    def cudnn_arguments(self) -> dict[str, Any]:
        """What `conv_fprop`, `conv_dgrad` and `conv_wgrad` all take."""
        return {
            "pre_padding": [low for low, _ in self.pads],
            "post_padding": [high for _, high in self.pads],
            "stride": self.strides,
            "dilation": self.dilation,
            "dimension_numbers": self.dimension_numbers,
        }

    @property
    def crops(self) -> bool:
        """Whether the padding is negative somewhere, which cuDNN's own functions do not take."""
        return any(min(pair) < 0 for pair in self.pads)

    @property
    def lengths(self) -> dict[str, int]:
        """How many products at most are summed in an element of y, of dx and of dw."""
        window, out = math.prod(self.window), math.prod(self.y_shape[a] for a in self.axes("y")[2:])
        return {
            "y": self.c // self.groups * window,
            "x": self.k // self.groups * window,
            "w": self.n * out,
        }

    def axes(self, role: str) -> tuple[int, ...]:
        """The axes of x, w or y that are N, C and spatial, or O, I and spatial."""
        index = "xwy".index(role)
        letters, spatial = self.dimension_numbers[index], self._spatial_letters()
        return tuple(map(letters.index, [*("OI" if role == "w" else "NC"), *spatial]))

    def shape(self, role: str) -> tuple[int, ...]:
        """The shape of x, w or y."""
        return getattr(self, f"{role}_shape")

    def operands(
        self, computed: str, draw=normal, dtype: str = "float32"
    ) -> tuple[jax.Array, jax.Array]:
        """Random arrays for the two of x, w and y that are given, in the primitives' order."""
        first, second = OPERANDS[computed]
        return draw(1, self.shape(first), dtype), draw(2, self.shape(second), dtype)

    def cudnn(self, computed: str, **changes: Any):
        """The function of cuDNN's name that computes a role from the two others."""
        arguments = self.cudnn_arguments | changes
        if computed == "y":
            return lambda x, w: jaxcudnn.conv_fprop(x, w, **arguments)
        if computed == "x":
            return lambda dy, w: jaxcudnn.conv_dgrad(
                dy, w, self.size, groups=self.groups, **arguments
            )
        return lambda x, dy: jaxcudnn.conv_wgrad(
            x, dy, self.window, groups=self.groups, **arguments
        )

    def conv(self, x, w) -> jax.Array:
        """Ours, by lax's name."""
        return jaxcudnn.conv_general_dilated(x, w, **self.arguments)

    def lax_conv(self, x, w) -> jax.Array:
        return lax.conv_general_dilated(x, w, **self.arguments)

    def _spatial_letters(self) -> list[str]:
        return [letter for letter in self.dimension_numbers[1] if letter not in "OI"]

    def _shape(self, index: int, spatial: tuple[int, ...], **sizes: int) -> tuple[int, ...]:
        sizes |= dict(zip(self._spatial_letters(), spatial, strict=True))
        return tuple(sizes[letter] for letter in self.dimension_numbers[index])


def case(
    name: str,
    size: tuple[int, ...],
    window: tuple[int, ...],
    padding: Padding = "VALID",
    *,
    n: int = 2,
    c: int = 3,
    k: int = 4,
    strides: tuple[int, ...] | None = None,
    dilation: tuple[int, ...] | None = None,
    groups: int = 1,
    dimension_numbers: tuple[str, str, str] | None = None,
) -> Case:
    ones = (1,) * len(size)
    return Case(
        name, n, c, k, size, window, padding, strides or ones, dilation or ones, groups,
        dimension_numbers or CHANNELS_FIRST[len(size)],
    )  # fmt: skip


CASES = [
    case("1d", (7,), (3,), ((1, 1),)),
    case("1d-strided-dilated", (11,), (3,), ((2, 0),), strides=(2,), dilation=(2,)),
    case("1d-last", (9,), (4,), "SAME", dimension_numbers=CHANNELS_LAST[1]),
    case("1d-causal-depthwise", (8,), (4,), ((3, 0),), c=6, k=6, groups=6,
         dimension_numbers=CHANNELS_LAST[1]),
    case("2d", (6, 7), (3, 2), ((1, 1), (1, 1))),
    case("2d-last", (6, 7), (3, 2), ((1, 1), (1, 1)), dimension_numbers=CHANNELS_LAST[2]),
    case("2d-hwio", (6, 5), (3, 3), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
    case("2d-oihw-last", (6, 5), (2, 3), "SAME", dimension_numbers=("NHWC", "OIHW", "NHWC")),
    case("2d-first-to-last", (5, 6), (3, 2), "VALID", strides=(2, 1),
         dimension_numbers=("NCHW", "OHWI", "NHWC")),
    case("2d-scrambled", (5, 6), (3, 2), ((1, 0), (2, 1)),
         dimension_numbers=("HNCW", "WIHO", "CWNH")),
    case("2d-pointwise", (4, 5), (1, 1), dimension_numbers=CHANNELS_LAST[2]),
    case("2d-same-strided", (7, 6), (3, 4), "SAME", strides=(2, 3)),
    case("2d-same-lower", (7, 6), (3, 4), "SAME_LOWER", strides=(2, 3),
         dimension_numbers=CHANNELS_LAST[2]),
    case("2d-name-in-lower-case", (5, 5), (2, 2), "same_lower"),
    case("2d-asymmetric", (6, 5), (3, 3), ((2, 0), (0, 1)), strides=(2, 2)),
    case("2d-wider-than-window", (4, 5), (2, 1), ((4, 3), (2, 5)), strides=(1, 2)),
    case("2d-padded-past-the-window", (2, 5), (2, 2), ((5, 1), (5, 0)), n=5, c=1, k=2),
    case("2d-padded-past-a-strided-window", (3, 4), (3, 2), ((6, 0), (4, 1)), n=3, strides=(2, 1)),
    case("2d-negative", (8, 9), (3, 2), ((-2, -1), (-3, 2)), strides=(2, 1)),
    case("2d-negative-last", (8, 7), (3, 2), ((1, -2), (0, -3)), dilation=(2, 1),
         dimension_numbers=CHANNELS_LAST[2]),
    case("2d-crop-of-everything", (4, 3), (2, 1), ((-6, 7), (5, -4))),
    case("2d-crop-to-nothing", (4, 3), (2, 1), ((-2, -2), (0, 0))),
    case("2d-stride-over-window", (9, 10), (2, 1), ((1, 0), (0, 2)), strides=(4, 3)),
    case("2d-unreached-rows", (8, 8), (3, 3), "VALID", strides=(4, 3)),
    case("2d-dilated", (9, 8), (3, 2), ((2, 2), (1, 0)), dilation=(2, 3)),
    case("2d-dilated-strided", (10, 9), (2, 3), ((1, 2), (3, 1)), strides=(3, 2), dilation=(2, 3)),
    case("2d-patches", (8, 8), (4, 4), strides=(4, 4), dimension_numbers=CHANNELS_LAST[2]),
    case("2d-whole-image", (5, 4), (5, 4)),
    case("2d-grouped", (5, 6), (3, 2), "SAME", c=6, k=4, groups=2),
    case("2d-grouped-strided", (7, 6), (3, 2), ((1, 2), (0, 1)), c=4, k=6, groups=2,
         strides=(2, 3), dilation=(1, 2), dimension_numbers=CHANNELS_LAST[2]),
    case("2d-grouped-scrambled", (5, 4), (2, 3), "SAME", c=4, k=6, groups=2,
         dimension_numbers=("CHWN", "IHOW", "HCNW")),
    case("2d-depthwise", (6, 6), (3, 3), "SAME", c=4, k=4, groups=4,
         dimension_numbers=("NHWC", "HWIO", "NHWC")),
    case("2d-depth-multiplier", (5, 5), (3, 3), ((1, 1), (1, 1)), c=3, k=6, groups=3,
         strides=(2, 2)),
    case("3d", (4, 3, 5), (2, 3, 2), ((1, 0), (1, 1), (0, 1))),
    case("3d-last-strided", (5, 4, 4), (2, 2, 3), "SAME", strides=(2, 1, 2),
         dimension_numbers=CHANNELS_LAST[3]),
    case("3d-grouped-dilated", (5, 4, 4), (2, 2, 1), ((0, 1), (2, 0), (0, 0)), c=4, k=4, groups=2,
         dilation=(2, 3, 1)),
    case("size-1", (1, 1), (1, 1), n=1, c=1, k=1),
    case("size-1-same", (1, 1), (3, 3), "SAME", strides=(2, 2)),
    case("no-images", (5, 5), (3, 3), "SAME", n=0),
    case("no-input-channels", (5, 5), (3, 3), "SAME", c=0),
    case("no-output-channels", (5, 5), (3, 3), "SAME", k=0),
    case("no-channels-grouped", (5, 5), (3, 3), "SAME", c=0, k=4, groups=2),
    case("empty-image", (0, 5), (3, 3), "SAME"),
    case("empty-image-padded-to-output", (0, 5), (2, 3), ((2, 2), (1, 1)),
         dimension_numbers=CHANNELS_LAST[2]),
    case("window-larger-than-image", (2, 5), (4, 3)),
    case("window-larger-than-padded-image", (2, 5), (6, 3), ((1, 1), (0, 0)), strides=(2, 1)),
]  # fmt: skip

CUDNN_CASES = [case for case in CASES if not case.crops]

DTYPES = ["float32", "bfloat16", "float16"]


def named(*names: str) -> list[Case]:
    """Pick cases by name."""
    table = {case.name: case for case in CASES}
    return [table[name] for name in names]


def parametrize(cases: Sequence[Case] = CASES, *, dtypes: Sequence[str] = ()):
    """Run a test for each case, and for each dtype if there are any."""
    over_cases = pytest.mark.parametrize("case", cases, ids=lambda case: case.name)
    if not dtypes:
        return over_cases
    return lambda test: over_cases(pytest.mark.parametrize("dtype", dtypes)(test))
