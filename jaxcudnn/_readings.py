# SPDX-License-Identifier: Apache-2.0
"""From a call of `conv_general_dilated` to the primitive that computes it.

In one spatial dimension, lhs position i, rhs position r and output position p meet where

    b i = s p + d r - lo                                                                    (1)

with lhs dilation b, stride s, rhs dilation d and low padding lo. A `ConvSpec` describes arrays x, w
and y that meet where  i = s p + d r - lo: one array, x, has the factor 1, and the other two have a
stride and a dilation. So each of the three arrays of a call can be x if its factor in (1) is 1, and
the equation then says what the other two are. With I, R and P the sizes of lhs, rhs and output:

                x       w                 y       needs   stride  dilation  low padding
    forward     lhs     rhs               output  b = 1   s       d         lo
    transposed  output  rhs, reversed     lhs     s = 1   b       d         d (R - 1) - lo
    gradient    lhs     output            rhs     b = 1   d       s         lo
    gradient    rhs     output, reversed  lhs     d = 1   b       s         s (P - 1) - lo

The column w holds the window: the readings are equal in value, and far from equal in speed where
the window is the large operand. The high padding is whatever gives y its size: for y of size
Y and stride t, window of size W and dilation e, x of size X, it is  t (Y - 1) + e (W - 1) + 1 - X -
low. Negative padding crops x; where x is the output, the rows that it would crop are zeros.

In all four, channels of lhs are summed with inputs of rhs. In the first two both are channels of
the forward convolution. In the gradients they are its images, and what is images in the call is
channels there. Groups of a call divide its outputs and either the channels (by feature) or the
images (by batch) of lhs, and each reading has them where the other two arrays can share them: in
the channels for the first two, and in the images for the gradients. Moving them transposes lhs.

A call may also have rhs reversed before it slides. Where rhs is w, the `ConvSpec` then reverses it
if it otherwise would not, and the other way round, which costs nothing. In the gradients, where rhs
is x or y, it would have to be copied, so they are not offered.

Where some b is not 1 and some s neither, (1) is solved by phases, in each dimension with b > 1. Let
b' = b / gcd(b, s) and m = b / gcd(b, d). For outputs p = b' q + a with a fixed, s b' is a multiple
of b, so b divides s a + d r - lo for every m-th r or for none. Those r = m t + e meet

    i = (s b' / b) q + (d m / b) t - (lo - s a - d e) / b

which is (1) with b = 1. So each of the b' phases of the output is a convolution with some of the
taps, and none multiplies by a zero that dilation put there.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import _numbers
from ._axes import fold, lengthened, shortened, unfold
from ._dtypes import Dtypes, PrecisionPair
from ._options import Options, current
from ._spec import ROLES, ConvSpec, Layout, Pads, Role, Shape, extent, replaced

LARGE_WINDOW = 32 * 32
"""Positions of x; a reading whose window spans more is the last choice, whatever others copy."""


@dataclass(frozen=True)
class Call:
    """A call of `conv_general_dilated`. Shapes are logical: (N, C, *spatial), (O, I, *spatial)."""

    lhs_shape: Shape
    rhs_shape: Shape
    strides: Shape
    padding: Pads
    """May be negative."""
    lhs_dilation: Shape
    rhs_dilation: Shape
    feature_groups: int
    batch_groups: int
    layout: Layout
    """Of lhs as x, rhs as w and the output as y."""
    dtype: str
    """Of lhs and rhs."""
    result_dtype: str
    precision: PrecisionPair
    flip: bool = False
    """Whether rhs is reversed before it slides."""
    options: Options = field(default_factory=current)

    @property
    def out_shape(self) -> Shape:
        """The output's logical shape, (N, O, *spatial)."""
        out = (
            max(0, (extent(size, b) + low + high - extent(window, d)) // s + 1)
            for size, b, window, d, s, (low, high) in zip(
                self.lhs_shape[2:],
                self.lhs_dilation,
                self.rhs_shape[2:],
                self.rhs_dilation,
                self.strides,
                self.padding,
                strict=True,
            )
        )
        return (self.lhs_shape[0] // self.batch_groups, self.rhs_shape[0], *out)

    @property
    def groups(self) -> int:
        """How many groups there are, of whichever kind."""
        return self.feature_groups * self.batch_groups

    @property
    def low(self) -> Shape:
        """The low padding."""
        return tuple(low for low, _ in self.padding)


def convolve(lhs: jax.Array, rhs: jax.Array, call: Call) -> jax.Array:
    """Compute a call through the reading that suits it best."""
    if 0 in (*call.lhs_shape, *call.rhs_shape, *call.out_shape):
        # An empty sum is zero, also where the window is empty, which no reading describes.
        return _zeros(call.layout.to_array("y", call.out_shape), lhs, rhs, call)
    best = _best(call)
    if best is None:
        return _by_phases(lhs, rhs, call)
    return best.compute(lhs, rhs)


class OnePrimitive(NamedTuple):
    """A call as the one primitive whose result is the call's, and that primitive's operands."""

    op: str
    a: jax.Array
    b: jax.Array
    spec: ConvSpec
    layout: Layout


def as_one_primitive(lhs: jax.Array, rhs: jax.Array, call: Call) -> OnePrimitive | None:
    """Give the fprop or dgrad whose result is a call's, images as images and channels as channels.

    None for calls that crop, that have phases, that are gradients of filters, or of which some
    array is empty.
    """
    if 0 in (*call.lhs_shape, *call.rhs_shape, *call.out_shape):
        return None
    best = _best(call)
    if not isinstance(best, (_Forward, _Transposed)):
        return None
    if any(low < 0 or high < 0 for low, high in best.spec.padding):
        return None
    (op,) = (op for op, roles in ROLES.items() if roles[2] == best.result and roles[1] == "w")
    return OnePrimitive(op, best.prepare_lhs(lhs), best.prepare_rhs(rhs), best.spec, best.layout)


def _best(call: Call) -> "_Reading | None":
    """Choose a reading; None for a call that is computed by phases."""
    readings = [kind(call) for kind in _possible(call)]
    smallest = min((reading.window for reading in readings), default=0)
    best = min(readings, key=lambda reading: reading.cost(smallest), default=None)
    mixed = any(b > 1 for b in call.lhs_dilation) and any(s > 1 for s in call.strides)
    if mixed and (best is None or best.window > LARGE_WINDOW):
        return None
    assert best is not None  # the table covers what has no dilated dimension
    return best


def _possible(call: Call) -> Iterator[type["_Reading"]]:
    ones = (1,) * len(call.strides)
    if call.lhs_dilation == ones:
        yield _Forward
    if call.strides == ones:
        yield _Transposed
    if call.lhs_dilation == ones and not call.flip:
        yield _GradientInLhs
    if call.rhs_dilation == ones and not call.flip:
        yield _GradientInRhs


class _Reading:
    """One row of the table: a spec whose padding may be negative, and what its arrays are."""

    lhs: Role
    rhs: Role
    result: Role
    spec: ConvSpec
    layout: Layout

    def __init__(self, call: Call) -> None:
        self.call = call

    @property
    def window(self) -> int:
        """How many positions of x the window spans."""
        return math.prod(map(extent, self.spec.w_shape[2:], self.spec.dilation))

    def cost(self, smallest: int) -> tuple[bool, int, bool]:
        """What decides between readings, the first in the table among equals.

        A large window comes first, then the elements to be brought into the memory order that
        cuDNN wants, then a window some times larger than another reading's.
        """
        orders = {role: self.layout.memory_order(role) for role in "xwy"}
        copied = sum(
            math.prod(self.spec.shape(role))
            for role, order in orders.items()
            if order != tuple(sorted(order))
        )
        return self.window > LARGE_WINDOW, copied, self.window > 4 * smallest

    def compute(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """Compute the call."""
        arrays = {self.lhs: self.prepare_lhs(lhs), self.rhs: self.prepare_rhs(rhs)}
        return self.finish(compute_cropped(arrays, self.spec, self.layout))

    def prepare_lhs(self, lhs: jax.Array) -> jax.Array:
        return lhs

    def prepare_rhs(self, rhs: jax.Array) -> jax.Array:
        return rhs

    def finish(self, result: jax.Array) -> jax.Array:
        return result

    def _spec(self, x: Shape, w: Shape, y: Shape, **geometry) -> ConvSpec:
        """Give the spec, with a high padding that gives y its size."""
        dtypes = dict.fromkeys((self.lhs, self.rhs), self.call.dtype)
        dtypes[self.result] = self.call.result_dtype
        strides, dilation, low = (geometry.pop(name) for name in ("strides", "dilation", "low"))
        pads = tuple(
            (lo, high_padding(t * (out - 1) + extent(window, e) - size - lo, t, lo))
            for size, window, out, t, e, lo in zip(
                x[2:], w[2:], y, strides, dilation, low, strict=True
            )
        )
        return ConvSpec(
            x_shape=x,
            w_shape=w,
            strides=strides,
            dilation=dilation,
            padding=pads,
            groups=self.call.groups,
            dtypes=Dtypes(**dtypes),
            precision=self.call.precision,
            options=self.call.options,
            **geometry,
        )


class _BatchGroupsInChannels(_Reading):
    """A reading whose groups are in the channels of lhs."""

    def prepare_lhs(self, lhs: jax.Array) -> jax.Array:
        n, c, *_ = self.call.layout.x
        return _moved(lhs, self.call.batch_groups, n, c)

    def lhs_shape(self) -> Shape:
        n, c, *spatial = self.call.lhs_shape
        return (n // self.call.batch_groups, c * self.call.batch_groups, *spatial)


class _Forward(_BatchGroupsInChannels):
    lhs, rhs, result = "x", "w", "y"

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.layout = call.layout
        spec = self._spec(
            self.lhs_shape(), call.rhs_shape, call.out_shape[2:],
            strides=call.strides, dilation=call.rhs_dilation, low=call.low, flip=call.flip,
        )  # fmt: skip
        self.spec = replace(spec, padding=call.padding)  # as it was said


class _Transposed(_BatchGroupsInChannels):
    lhs, rhs, result = "y", "w", "x"

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        o, i, *window = call.layout.w
        self.layout = Layout(x=call.layout.y, w=(i, o, *window), y=call.layout.x)
        outputs, inputs, *sizes = call.rhs_shape
        y = self.lhs_shape()
        self.spec = self._spec(
            call.out_shape, (inputs * call.groups, outputs // call.groups, *sizes), y[2:],
            strides=call.lhs_dilation, dilation=call.rhs_dilation,
            low=_reversed_low(sizes, call.rhs_dilation, call.low), flip=not call.flip,
        )  # fmt: skip

    def prepare_rhs(self, rhs: jax.Array) -> jax.Array:
        o, i, *_ = self.call.layout.w
        return _moved(rhs, self.call.groups, o, i)  # (O, I) to (O / groups, groups I)


class _FeatureGroupsInImages(_Reading):
    """A reading whose groups are in the images of lhs."""

    def prepare_lhs(self, lhs: jax.Array) -> jax.Array:
        n, c, *_ = self.call.layout.x
        return _moved(lhs, self.call.feature_groups, c, n)

    def lhs_shape(self) -> Shape:
        """Channels, which are images here, first."""
        n, c, *spatial = self.call.lhs_shape
        return (c // self.call.feature_groups, n * self.call.feature_groups, *spatial)


class _GradientInLhs(_FeatureGroupsInImages):
    lhs, rhs, result = "x", "y", "w"

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.layout = Layout(
            x=_swapped(call.layout.x), w=_swapped(call.layout.y), y=_swapped(call.layout.w)
        )
        x = self.lhs_shape()
        _, o, *out = call.out_shape
        self.spec = self._spec(
            x, (o, x[1] // call.groups, *out), call.rhs_shape[2:],
            strides=call.rhs_dilation, dilation=call.strides, low=call.low, flip=False,
        )  # fmt: skip


class _GradientInRhs(_FeatureGroupsInImages):
    lhs, rhs, result = "y", "x", "w"

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.layout = Layout(x=_swapped(call.layout.w), w=call.layout.y, y=_swapped(call.layout.x))
        outputs, inputs, *sizes = call.rhs_shape
        _, _, *out = call.out_shape
        y = self.lhs_shape()
        self.spec = self._spec(
            (inputs, outputs, *sizes), (y[1], outputs // call.groups, *out), y[2:],
            strides=call.lhs_dilation, dilation=call.strides,
            low=_reversed_low(out, call.strides, call.low), flip=True,
        )  # fmt: skip

    def finish(self, result: jax.Array) -> jax.Array:
        n, c, *_ = self.call.layout.y
        return _moved(result, self.call.groups, n, c)  # (groups N, O / groups) to (N, O)


def _moved(array: jax.Array, groups: int, source: int, target: int) -> jax.Array:
    """Move groups from the outside of one axis to the outside of another."""
    return array if groups == 1 else fold(unfold(array, source, groups), source, target)


def _reversed_low(window: Sequence[int], dilation: Shape, low: Shape) -> Shape:
    return tuple(extent(r, d) - 1 - lo for r, d, lo in zip(window, dilation, low, strict=True))


def _swapped(axes: Shape) -> Shape:
    first, second, *spatial = axes
    return (second, first, *spatial)


def high_padding(least: int, stride: int, low: int) -> int:
    """Give a high padding of at least `least`, and less than what would make y larger.

    That is the low one if possible, since cuDNN has more plans for equal ones; else the smallest.
    """
    most = least + stride - 1
    if least <= low <= most and low >= 0:
        return low
    return least if least >= 0 else min(0, most)


def compute_cropped(arrays: dict[Role, jax.Array], spec: ConvSpec, layout: Layout) -> jax.Array:
    """Compute a primitive whose padding may be negative, on the part of x that is not cropped."""
    cropping = [_crop(*dimension) for dimension in zip(spec.x_shape[2:], spec.padding, strict=True)]
    starts = tuple(start for start, _, _ in cropping)
    stops = tuple(stop for _, stop, _ in cropping)
    pads = tuple(pad for _, _, pad in cropping)
    shape = (*spec.x_shape[:2], *(stop - start for start, stop in zip(starts, stops, strict=True)))
    cropped = replace(spec, x_shape=shape, padding=pads)
    first = layout.to_array("x", (0, 0, *starts))
    last = layout.to_array("x", (*spec.x_shape[:2], *stops))
    whole = layout.to_array("x", spec.x_shape)
    ends = [(a, size - b) for a, b, size in zip(first, last, whole, strict=True)]
    if "x" in arrays:
        arrays = arrays | {"x": shortened(arrays["x"], ends)}
        return _numbers.compute(arrays, spec=cropped, layout=layout)
    return lengthened(_numbers.compute(arrays, spec=cropped, layout=layout), ends)


def _crop(size: int, padding: tuple[int, int]) -> tuple[int, int, tuple[int, int]]:
    """Give start, stop and what remains of the padding.

    As in `lax.pad`, a crop of more than the whole dimension goes on into the other side's padding.
    """
    low, high = padding
    start, cut = min(max(-low, 0), size), min(max(-high, 0), size)
    beyond_low, beyond_high = max(-low, 0) - start, max(-high, 0) - cut
    return start, size - cut, (max(low, 0) - beyond_high, max(high, 0) - beyond_low)


def _by_phases(lhs: jax.Array, rhs: jax.Array, call: Call) -> jax.Array:
    """Compute a call by the phases of one spatial dimension, of which no other is left there."""
    dimension = next(i for i, b in enumerate(call.lhs_dilation) if b > 1)
    b, s, d = (
        numbers[dimension] for numbers in (call.lhs_dilation, call.strides, call.rhs_dilation)
    )
    phases, step = b // math.gcd(b, s), b // math.gcd(b, d)
    size, window = call.lhs_shape[2 + dimension], call.rhs_shape[2 + dimension]
    total = call.out_shape[2 + dimension]
    longest = -(-total // phases)
    axis, rhs_axis = call.layout.y[2 + dimension], call.layout.w[2 + dimension]
    parts = []
    for a in range(phases):
        offset = s * a - call.low[dimension]
        out = -(-(total - a) // phases)
        taps = range(
            next((r for r in range(step) if (offset + d * r) % b == 0), window), window, step
        )
        low = -(offset + d * taps.start) // b
        stride, dilation = s * phases // b, d * step // b
        high = stride * (out - 1) + extent(len(taps), dilation) - size - low
        one = replace(
            call,
            rhs_shape=replaced(call.rhs_shape, 2 + dimension, len(taps)),
            strides=replaced(call.strides, dimension, stride),
            rhs_dilation=replaced(call.rhs_dilation, dimension, dilation),
            lhs_dilation=replaced(call.lhs_dilation, dimension, 1),
            padding=replaced(call.padding, dimension, (low, high)),
        )
        if len(taps) == 0 or out <= 0:
            parts.append(None)
            continue
        first, last = taps[0], taps[-1]
        if call.flip:  # the taps are counted in the order in which rhs slides
            first, last = window - 1 - last, window - 1 - first
        selected = lax.slice_in_dim(rhs, first, last + 1, step, rhs_axis)
        parts.append(convolve(lhs, selected, one))
    shape = list(call.layout.to_array("y", call.out_shape))
    shape[axis] = longest
    zeros = _zeros(shape, lhs, rhs, call)
    whole = [
        zeros
        if part is None
        else lengthened(part, [(0, size - n) for size, n in zip(shape, part.shape, strict=True)])
        for part in parts
    ]
    shape[axis] = longest * phases
    interleaved = jnp.stack(whole, axis + 1).reshape(shape)
    ends = [(0, size - total if i == axis else 0) for i, size in enumerate(interleaved.shape)]
    return shortened(interleaved, ends)


def _zeros(shape: Sequence[int], lhs: jax.Array, rhs: jax.Array, call: Call) -> jax.Array:
    """Give a result of zeros, as a sum over nothing of both operands.

    So it is weakly typed, varies over mesh axes and is differentiated as one that is computed is.
    """
    nothing = (lax.split(operand.reshape(-1), (0, operand.size))[0] for operand in (lhs, rhs))
    return lax.broadcast(lax.dot(*nothing, preferred_element_type=call.result_dtype), shape)
