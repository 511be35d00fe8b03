# SPDX-License-Identifier: Apache-2.0
"""The products of parameters that JAX's own tests of its convolutions run over.

They are those of jax-ml/jax's tests/lax_test.py, lax_autodiff_test.py, lax_vmap_test.py and of the
harnesses that its export tests share, as of jax 0.12: the parameters and not the code, since no
wheel carries the tests. There are more than a million cases, of which JAX itself draws ten of a
product.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from jax import lax

from lax_case import Axis, Matrix, Values

FLOATS = ["bfloat16", "float16", "float32", "float64"]
WIDE_INEXACT = ["float32", "float64", "complex64", "complex128"]
INEXACT = [*FLOATS, "complex64", "complex128"]
SIGNED = ["int8", "int16", "int32", "int64"]
NUMBERS = [*INEXACT, *SIGNED, "uint8", "uint16", "uint32", "uint64"]
ALL_DTYPES = [*NUMBERS, "bool"]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]

NCHW = ("NCHW", "OIHW", "NCHW")
NHWC = ("NHWC", "HWIO", "NHWC")


def over(name: str, values: Iterable[Any]) -> Axis:
    return [{name: value} for value in values]


def sizes(choices: Sequence[int], image: Sequence[int], window: Sequence[int]) -> Axis:
    return [
        {"lhs": (b, i, *image), "rhs": (j, i, *window)}
        for b, i, j in itertools.product(choices, repeat=3)
    ]


def grouped(choices: Sequence[int], images: Sequence[Sequence[int]], window: Sequence[int]) -> Axis:
    return [
        {
            "lhs": (b * batch, i * feature, *image),
            "rhs": (j * batch * feature, i, *window),
            "batch_group_count": batch,
            "feature_group_count": feature,
        }
        for batch, feature in [(1, 1), (2, 1), (1, 2)]
        for image in images
        for b, i, j in itertools.product(choices, repeat=3)
    ]


def layouts(*dimension_numbers: tuple[str, str, str]) -> Axis:
    return over("dimension_numbers", dimension_numbers)


PREFERRED = [  # (dtype of the operands, preferred_element_type)
    *itertools.product(["float16", "bfloat16"], ["float32", "float64"]),
    ("float16", "float16"), ("bfloat16", "bfloat16"),
    ("float32", "float32"), ("float32", "float64"), ("float64", "float64"),
    *((a, b) for i, a in enumerate(SIGNED) for b in SIGNED[i:]),
    ("complex64", "complex64"), ("complex64", "complex128"), ("complex128", "complex128"),
    *itertools.product(["int8", "int16"], FLOATS),
    ("int32", "float32"), ("int32", "float64"), ("int64", "float64"),
]  # fmt: skip

_TRANSPOSED_PADDING = [
    "VALID", "SAME", *itertools.product(itertools.product([0, 1, 2], repeat=2), repeat=2),
]  # fmt: skip
_TRANSPOSED_LAYOUTS = [
    {"dimension_numbers": NHWC},
    {"dimension_numbers": None, "letters": NHWC},
    {"dimension_numbers": ("NCHW", "OIHW", "NHWC")},
]


def _transposed(image: Sequence[int], windows: Iterable[Sequence[int]], swapped: bool) -> Axis:
    """Sizes for conv_transpose: with transpose_kernel, O and I of the kernel change places."""
    return [
        {"lhs": (b, i, *image), "rhs": ((i, j) if swapped else (j, i)) + tuple(window)}
        for window in windows
        for b, i, j in itertools.product([2, 3], repeat=3)
    ]


_SQUARES = [(3, 3), (4, 4), (5, 5)]


def _transposed_2d(swapped: bool, cases: int) -> Matrix:
    return Matrix(
        f"conv_transpose_2d{'_swapped' if swapped else ''}", cases, "conv_transpose", (
            _transposed((9, 10), _SQUARES, swapped),
            over("dtype", FLOATS),
            over("strides", [(1, 1), (1, 2), (2, 1), (2, 2), (3, 3)]),
            over("padding", _TRANSPOSED_PADDING),
            over("rhs_dilation", [None, (2, 2)]),
            over("transpose_kernel", [swapped]),
            over("use_consistent_padding", [True, False]),
            _TRANSPOSED_LAYOUTS,
        ),
    )  # fmt: skip


_TAPS = {"window_strides": (1, 1), "padding": ((0, 0), (0, 0))}
_LINE = {"window_strides": (1,), "padding": ((0,) * 2,)}


def _harness(**changes: Any) -> Values:
    return {"lhs": (2, 3, 9, 10), "rhs": (3, 3, 4, 5), "dtype": "float32"} | _TAPS | changes


HARNESSES = [
    *(_harness(dtype=dtype, precision=precision)
      for dtype in INEXACT for precision in [None, *lax.Precision]),
    _harness(lhs=(2, 6, 9, 10), rhs=(6, 3, 4, 5), feature_group_count=2),
    _harness(lhs=(4, 3, 9, 10), rhs=(6, 3, 4, 5), batch_group_count=2),
    _harness(lhs=(2, 3, 10), rhs=(3, 3, 5), **_LINE),
    *(_harness(lhs=(2, 3, 9, 9), rhs=(12, 1, 3, 3), feature_group_count=3, rhs_dilation=dilation)
      for dilation in [(1, 1), (2, 1)]),
    *(_harness(lhs=(2, 3, 9), rhs=(12, 1, 3), feature_group_count=3, rhs_dilation=dilation, **_LINE)
      for dilation in [(1,), (2,)]),
    _harness(window_strides=(2, 3)),
    _harness(padding=((1, 2), (0, 0))),
    _harness(padding=((1, 2), (2, 1))),
    _harness(rhs_dilation=(2, 2)),
    _harness(lhs_dilation=(2, 2)),
    _harness(lhs_dilation=(2, 3), rhs_dilation=(3, 2)),
    *(_harness(lhs=(1, 2, 16, 16), rhs=(2, 2, 2, 3), lhs_dilation=(2, 2), padding=padding,
               dimension_numbers=NHWC)
      for padding in [((1, 1), (2, 2)), ((1, 1), (2, 1))]),
    *(_harness(lhs=(1, 2, 16), rhs=(2, 2, 3), lhs_dilation=(2,), padding=padding,
               window_strides=(1,), dimension_numbers=("NHC", "HIO", "NHC"))
      for padding in [((2, 2),), ((2, 1),)]),
    _harness(rhs=(3, 3, 10, 5)),
    _harness(rhs_dilation=(2, 3)),
    _harness(lhs=(1, 3, 2, 2), rhs=(64, 3, 7, 7), window_strides=(2, 2), padding=((3, 3), (3, 3))),
    _harness(lhs=(1, 1, 1, 16), rhs=(2, 1, 4, 1), padding="SAME", dimension_numbers=NHWC),
    _harness(dimension_numbers=NHWC),
    _harness(dimension_numbers=("NCHW", "HWIO", "NHWC")),
    *(_harness(lhs=(1, 1, 28, 28), rhs=(16, 1, 3, 3), padding=padding, rhs_dilation=dilation,
               dimension_numbers=dimension_numbers)
      for padding, dilation in [
          *itertools.product(["VALID", "SAME"], [(1, 1), (1, 2)]), ([(1, 2), (0, 1)], (1, 2))]
      for dimension_numbers in [NHWC, ("NCHW", "HWIO", "NCHW")]),
    *(_harness(lhs=(1, 1, 28), rhs=(16, 1, 3), padding=padding, rhs_dilation=dilation,
               window_strides=(1,), dimension_numbers=("NWC", "WIO", "NWC"))
      for padding in ["VALID", "SAME"] for dilation in [(1,), (2,)]),
    *(_harness(lhs=(1, 1, 4, 28, 28), rhs=(16, 1, 2, 3, 3), padding=padding, rhs_dilation=dilation,
               window_strides=(1, 1, 1), dimension_numbers=("NDHWC", "DHWIO", "NDHWC"))
      for padding in ["VALID", "SAME"] for dilation in [(1, 1, 1), (1, 1, 2)]),
]  # fmt: skip

VALUES = [
    Matrix("conv", 16, "conv", (
        sizes([2, 3], (9, 10), (4, 5)),
        over("dtype", FLOATS),
        over("window_strides", [(1, 1), (1, 2), (2, 1)]),
        over("padding", ["VALID", "SAME", "SAME_LOWER"]),
    )),
    Matrix("conv_preferred", len(PREFERRED), "conv", (
        sizes([2, 3], (9, 10), (4, 5)),
        [{"dtype": dtype, "preferred_element_type": to} for dtype, to in PREFERRED],
        [{"window_strides": (1, 1), "padding": "VALID"}],
    )),
    Matrix("conv_preferred_float8", 6, "conv", (  # not in JAX's tests; sums of at most 8
        [{"lhs": (2, 2, 4, 5), "rhs": (3, 2, 2, 2), "window_strides": (1, 1), "padding": "VALID"}],
        over("dtype", FLOAT8),
        over("preferred_element_type", [None, *FLOAT8, "bfloat16", "float16", "float32"]),
    )),
    Matrix("conv_with_general_padding", 24, "conv_with_general_padding", (
        sizes([1, 2, 3], (9, 10), (4, 5)),
        over("dtype", FLOATS),
        over("window_strides", [(1, 1), (1, 2), (2, 1)]),
        over("padding", [((0, 0), (0, 0)), ((1, 2), (2, 0))]),
        over("lhs_dilation", [(1, 1), (1, 2), (2, 2)]),
        over("rhs_dilation", [(1, 1), (1, 2), (2, 2)]),
    )),
    Matrix("conv_general_dilated_0d", 30, "conv_general_dilated", (
        grouped([2, 3], [()], ()),
        over("dtype", ALL_DTYPES),
        [{"window_strides": (), "padding": (), "dimension_numbers": ("NC", "OI", "NC")}],
    )),
    Matrix("conv_general_dilated", 60, "conv_general_dilated", (
        grouped([2, 3], [(9, 0), (9, 10)], (4, 5)),
        layouts(NCHW, NHWC, ("NCHW", "HWIO", "NHWC")),
        over("dtype", ALL_DTYPES),
        over("window_strides", [(1, 1), (2, 1)]),
        over("padding", [((1, 2), (2, 0)), ((10, 8), (7, 13))]),
        over("lhs_dilation", [(1, 1), (1, 2), (1, 4)]),
        over("rhs_dilation", [(1, 1), (1, 2), (1, 4)]),
    )),
    _transposed_2d(swapped=True, cases=16),
    _transposed_2d(swapped=False, cases=16),
    Matrix("conv_transpose_1d", 12, "conv_transpose", (
        _transposed((10,), [(3,), (4,), (5,)], swapped=False),
        over("dtype", FLOATS),
        over("strides", [(1,), (2,), (3,)]),
        over("padding", ["VALID", "SAME"]),
        over("rhs_dilation", [None, (2,)]),
        [{"dimension_numbers": ("NHC", "HIO", "NHC"), "transpose_kernel": False}],
    )),
    Matrix("conv_transpose_0d", 8, "conv_transpose", (
        _transposed((), [()], swapped=False),
        over("dtype", FLOATS),
        over("padding", ["VALID", "SAME"]),
        over("rhs_dilation", [None, ()]),
        [{"dimension_numbers": ("NC", "IO", "NC"), "transpose_kernel": False, "strides": ()}],
    )),
    Matrix("harness", 24, "conv_general_dilated", (HARNESSES,)),
]  # fmt: skip

GRADIENTS = [
    Matrix("conv", 6, "conv", (
        [
            {"lhs": lhs, "rhs": rhs, "window_strides": strides}
            for lhs, rhs, all_strides in [
                *(((b, i, 3, 4), (j, i, 1, 2), [(1, 1), (1, 2), (2, 1)])
                  for b, i, j in itertools.product([2, 3], repeat=3)),
                ((4, 2, 1), (3, 2, 1), [(1,)]),
            ]
            for strides in all_strides
        ],
        over("dtype", FLOATS),
        over("padding", ["VALID", "SAME"]),
    )),
    Matrix("conv_with_general_padding", 6, "conv_with_general_padding", (
        sizes([2, 3], (3, 4), (1, 2)),
        over("dtype", FLOATS),
        over("window_strides", [(1, 1), (1, 2), (2, 1)]),
        over("padding", [((0, 0), (0, 0)), ((-1, 0), (0, -1)), ((1, 0), (0, 1))]),
        over("lhs_dilation", [(1, 1), (2, 1)]),
        [{"rhs_dilation": (1, 1)}],
    )),
    Matrix("conv_with_general_padding_1d", 3, "conv_with_general_padding", (
        [{"lhs": (4, 2, 1), "rhs": (3, 2, 1), "window_strides": (1,)}],
        over("dtype", FLOATS),
        over("padding", [((1, 1),), ((0, 0),)]),
        over("lhs_dilation", [(1,), (2,)]),
        over("rhs_dilation", [(1,), (2,)]),
    )),
    Matrix("conv_general_dilated", 12, "conv_general_dilated", (
        grouped([1, 2], [(6, 7), (0, 4)], (1, 2)),
        layouts(NCHW, NHWC, ("NHWC", "OIHW", "NCHW")),
        over("dtype", WIDE_INEXACT),
        over("window_strides", [(1, 1), (1, 2), (2, 1)]),
        over("padding", [((0, 0), (0, 0)), ((1, 0), (0, 1)), ((0, -1), (0, 0))]),
        over("lhs_dilation", [(1, 1), (2, 1)]),
        over("rhs_dilation", [(1, 1), (2, 2)]),
    ), valid=lambda values: values["lhs"][2] > 0 or values["padding"] != ((0, -1), (0, 0))),
]  # fmt: skip

VMAP = [
    Matrix("conv_general_dilated", 24, "conv_general_dilated", (
        grouped([1, 2], [(6, 7)], (1, 2)),
        over("mapped", [
            pair for pair in itertools.product([None, *range(5)], repeat=2) if pair != (None, None)
        ]),
        over("mapped_size", range(5)),
        layouts(NCHW, NHWC, ("NHWC", "OIHW", "NCHW"), ("HWCN", "HWIO", "HWCN")),
        over("dtype", ["float32"]),
        over("window_strides", [(1, 1), (1, 2), (2, 1)]),
        over("padding", [((0, 0), (0, 0)), ((1, 0), (0, 1)), ((0, -1), (0, 0))]),
        over("lhs_dilation", [(1, 1), (2, 1)]),
        over("rhs_dilation", [(1, 1), (2, 2)]),
    )),
]  # fmt: skip
