# SPDX-License-Identifier: Apache-2.0
"""Problems, configurations and launches of the depthwise kernels in csrc/kernels."""

import ctypes
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

KERNELS = Path(__file__).resolve().parents[1] / "csrc" / "kernels"
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
OPERANDS = {"fprop": "xwy", "dgrad": "ywx", "wgrad": "xyw"}
"""By pass, the roles of both operands and of the result."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class Problem:
    """A forward depthwise convolution of images, or with a height of 1 of lines."""

    name: str
    images: int
    channels: int
    size: Pair
    window: Pair
    stride: Pair = (1, 1)
    dilation: Pair = (1, 1)
    padding: tuple[Pair, Pair] = ((0, 0), (0, 0))
    flip: bool = False
    dtype: str = "float32"
    channels_first: bool = False
    hwio: bool = False
    """Whether the filter's channels are its last dimension in memory, else its first."""

    @property
    def out(self) -> Pair:
        """Height and width of y."""
        dimensions = zip(
            self.size, self.padding, self.dilation, self.window, self.stride, strict=True
        )
        height, width = (
            (size + sum(padding) - dilation * (window - 1) - 1) // stride + 1
            for size, padding, dilation, window, stride in dimensions
        )
        return height, width

    def shape(self, role: str) -> tuple[int, ...]:
        """Give the shape as images, channels, height, width; of a filter without the images."""
        if role == "w":
            return (self.channels, *self.window)
        return (self.images, self.channels, *(self.size if role == "x" else self.out))

    def order(self, role: str) -> tuple[int, ...]:
        """Give which of those dimensions comes where in memory."""
        if role == "w":
            return (1, 2, 0) if self.hwio else (0, 1, 2)
        return (0, 1, 2, 3) if self.channels_first else (0, 2, 3, 1)

    def strides(self, role: str) -> dict[int, int]:
        """Give the stride in elements of each of those dimensions."""
        shape, strides, step = self.shape(role), {}, 1
        for axis in reversed(self.order(role)):
            strides[axis] = step
            step *= shape[axis]
        return strides

    def flops(self) -> int:
        """Count operations, with those that meet padding."""
        return 2 * self.images * self.channels * math.prod(self.out) * math.prod(self.window)

    def bytes(self) -> int:
        """Count the bytes of all three arrays."""
        return BYTES[self.dtype] * sum(math.prod(self.shape(role)) for role in "xwy")

    def largest_vector(self) -> int:
        """Give how many elements of at most 16 bytes divide the channels."""
        return math.gcd(16 // BYTES[self.dtype], self.channels)


@dataclass(frozen=True)
class Correlate:
    """Macros of depthwise_correlate.cu; the sources say what they mean."""

    columns: bool
    lanes: int
    rows: int
    cols: int
    groups_h: int
    groups_w: int
    chunk: int
    rolling: bool
    prefetch: int
    vector: int
    blocks: int = 1


@dataclass(frozen=True)
class Accumulate:
    """Macros of depthwise_accumulate.cu; the sources say what they mean."""

    columns: bool
    lanes: int
    rows: int
    taps: int
    groups_w: int
    cols: int
    repeats: int
    pad: int
    prefetch: int
    vector: int
    blocks: int = 1
    per_multiprocessor: int = 1
    """Blocks of the grid for each multiprocessor."""
    out_rows: int = 1 << 20
    """Rows of dy, at most, before others are turned to."""


Configuration = Correlate | Accumulate


class Geometry(ctypes.Structure):
    """The struct of this name in depthwise.cuh."""

    _fields_ = [
        *(
            (name, ctypes.c_int)
            for name in "images channels in_h in_w out_h out_w pad_h pad_w "
            "tiles_h tiles_w tiles_c chunks rows".split()
        ),
        *(
            (name, ctypes.c_longlong)
            for name in "in_n in_row in_col in_c out_n out_row out_col out_c "
            "filter_c filter_row filter_col".split()
        ),
    ]


class Launch(NamedTuple):
    source: str
    macros: dict[str, int]
    name: str
    blocks: int
    threads: int
    shared: int
    geometry: Geometry


class Axis(NamedTuple):
    """Of the struct of this name in depthwise.cuh: kPhases, kStride and kTaps."""

    phases: int
    stride: int
    taps: int


def axes(problem: Problem, op: str) -> tuple[Axis, Axis]:
    """Give what the kernels make of height and width."""

    def axis(window: int, stride: int, dilation: int) -> Axis:
        common = math.gcd(stride, dilation)
        if op == "dgrad":
            return Axis(stride * dilation // common, 1, _ceil(window, stride // common))
        return Axis(dilation // common, stride // common, window)

    p = problem
    height, width = map(axis, p.window, p.stride, p.dilation)
    return height, width


def launches(
    problem: Problem, op: str, configuration: Configuration, multiprocessors: int
) -> tuple[list[Launch], int]:
    """Give the kernels of a pass, and the elements of the float32 workspace between them."""
    if isinstance(configuration, Correlate):
        return [_correlate(problem, op, configuration)], 0
    first = _accumulate(problem, configuration, multiprocessors)
    results = math.prod(problem.shape("w"))
    finish = first._replace(
        name="DepthwiseFinish", blocks=_ceil(results, 32), threads=256, shared=1024
    )
    return [first, finish], first.geometry.chunks * results


def definitions(macros: dict[str, int]) -> list[str]:
    """Give options of a compiler."""
    return [f"-D{name}={value}" for name, value in macros.items()]


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _align(number: int, to: int) -> int:
    return _ceil(number, to) * to


def _transposed(columns: int, period: int) -> int:
    return period * (_ceil(columns, period) | 1)


def _channels(configuration: Configuration) -> int:
    return 1 if configuration.columns else 2 * configuration.lanes


def _macros(problem: Problem, op: str, configuration: Configuration, shared: int) -> dict[str, int]:
    own = {
        name.upper(): int(value)
        for name, value in vars(configuration).items()
        if name not in ("blocks", "per_multiprocessor", "out_rows")
    }
    pairs = {"WINDOW": problem.window, "STRIDE": problem.stride, "DILATION": problem.dilation}
    sizes = {
        f"{k}_{axis}": n for k, pair in pairs.items() for axis, n in zip("HW", pair, strict=True)
    }
    return own | sizes | {
        "DTYPE": list(BYTES).index(problem.dtype),
        "OPERATION": list(OPERANDS).index(op),
        "FLIP": int(problem.flip),
        "SHARED_BYTES": shared,
        "MIN_BLOCKS": configuration.blocks,
    }  # fmt: skip


def _geometry(problem: Problem, op: str, configuration: Configuration) -> Geometry:
    roles = ("y", "x") if op == "dgrad" else ("x", "y")
    values = {}
    for prefix, role in zip(("in", "out"), roles, strict=True):
        strides = problem.strides(role)
        for axis, name in enumerate(("n", "c", "row", "col")):
            values[f"{prefix}_{name}"] = strides[axis]
        values[f"{prefix}_h"], values[f"{prefix}_w"] = problem.shape(role)[2:]
    for axis, name in enumerate(("c", "row", "col")):
        values[f"filter_{name}"] = problem.strides("w")[axis]
    (pad_h, _), (pad_w, _) = problem.padding
    tiles_c = _ceil(problem.channels, _channels(configuration))
    return Geometry(
        images=problem.images, channels=problem.channels, pad_h=pad_h, pad_w=pad_w,
        tiles_c=tiles_c, **values,
    )  # fmt: skip


def _correlate(problem: Problem, op: str, c: Correlate) -> Launch:
    h, w = axes(problem, op)
    groups = c.lanes * c.groups_w
    tile_h, tile_w = c.groups_h * c.rows, (groups if c.columns else c.groups_w) * c.cols
    in_rows, in_cols = (tile_h - 1) * h.stride + h.taps, (tile_w - 1) * w.stride + w.taps
    reach = (c.groups_h - 1) * c.rows * h.stride
    ring = reach + 1 + c.prefetch if c.prefetch else in_rows
    row = _transposed(in_cols, c.cols * w.stride) if c.columns else in_cols * _channels(c)
    weight_row = _align(w.taps * (1 if c.columns else _channels(c) + 2), 4)
    weight_rows = (c.rows - 1) * h.stride + 2 if c.rolling else h.taps
    weights = _align(weight_rows * weight_row * 4, 16)
    out = c.groups_h * c.cols * (tile_w // c.cols + 1) * 4 if c.columns else 0
    shared = max(weights + ring * row * BYTES[problem.dtype], out)
    g = _geometry(problem, op, c)
    g.tiles_h = _ceil(_ceil(g.out_h, h.phases), tile_h) * h.phases
    g.tiles_w = _ceil(_ceil(g.out_w, w.phases), tile_w) * w.phases
    blocks = g.tiles_c * g.tiles_h * g.tiles_w * g.images
    macros = _macros(problem, op, c, shared)
    source, name = "depthwise_correlate.cu", "DepthwiseCorrelate"
    return Launch(source, macros, name, blocks, groups * c.groups_h, shared, g)


def _accumulate(problem: Problem, c: Accumulate, multiprocessors: int) -> Launch:
    h, w = axes(problem, "wgrad")
    size = BYTES[problem.dtype]
    groups_h, groups_w = _ceil(problem.window[0], c.rows), _ceil(problem.window[1], c.taps)
    groups = c.lanes * c.groups_w
    threads = groups * groups_h
    tile_w = (groups if c.columns else c.groups_w) * c.cols * c.repeats
    in_cols = (tile_w - 1) * w.stride + c.taps
    in_row = _transposed(in_cols, c.cols * w.stride) if c.columns else in_cols * _channels(c)
    out_row = (_transposed(tile_w, c.cols) if c.columns else tile_w * _channels(c)) + c.pad
    out_ring = (problem.window[0] - 1 + c.prefetch) // h.stride + 1
    rings = _align((1 + c.prefetch) * in_row * size, 16) + out_ring * out_row * size
    shared = max(rings, threads * c.taps * (1 if c.columns else 2) * 4)
    g = _geometry(problem, "wgrad", c)
    per_phase = _ceil(g.out_h, h.phases)
    g.rows = min(c.out_rows, per_phase)
    g.tiles_h = _ceil(per_phase, g.rows) * h.phases
    g.tiles_w = _ceil(_ceil(g.out_w, w.phases), tile_w) * w.phases
    parts = g.images * g.tiles_h * g.tiles_w
    chunks = max(1, min(parts, c.per_multiprocessor * multiprocessors // (g.tiles_c * groups_w)))
    g.chunks = _ceil(parts, _ceil(parts, chunks))
    macros = _macros(problem, "wgrad", c, shared)
    blocks = groups_w * g.tiles_c * g.chunks
    return Launch(
        "depthwise_accumulate.cu", macros, "DepthwiseAccumulate", blocks, threads, shared, g
    )
