# SPDX-License-Identifier: Apache-2.0
"""What a convolution is: its sizes and geometry, and how the users' arrays are laid out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ._dtypes import Dtypes, PrecisionPair
from ._options import Options, current

Role = str  # "x", "w" or "y"
ROLES: dict[str, tuple[Role, Role, Role]] = {
    "fprop": ("x", "w", "y"),
    "dgrad": ("y", "w", "x"),
    "wgrad": ("x", "y", "w"),
}
"""The roles of each operation's operands and, last, of its result."""
Shape = tuple[int, ...]
Pads = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ConvSpec:
    """A forward convolution y = conv(x, w), whichever of the three arrays is to be computed.

    Shapes are logical, whatever the order of dimensions in the users' arrays:

        x  (N, C, *spatial)    w  (K, C // groups, *window)    y  (N, K, *out)

    An array's gradient has the array's own shape. `padding` holds (low, high) pairs, none negative.
    """

    x_shape: Shape
    w_shape: Shape
    strides: Shape
    padding: Pads
    dilation: Shape
    groups: int
    flip: bool
    """Whether the window is reversed before it slides, which cuDNN calls CONVOLUTION."""
    dtypes: Dtypes
    precision: PrecisionPair
    options: Options = field(default_factory=current)
    """How its plan is chosen: as is said where the convolution is written."""

    @property
    def y_shape(self) -> Shape:
        """The output's shape, after https://openxla.org/xla/operation_semantics#conv_convolution."""
        out = (
            max(0, (size + low + high - extent(window, dilation)) // stride + 1)
            for size, window, stride, (low, high), dilation in zip(
                self.x_shape[2:],
                self.w_shape[2:],
                self.strides,
                self.padding,
                self.dilation,
                strict=True,
            )
        )
        return (self.x_shape[0], self.w_shape[0], *out)

    @property
    def num_spatial(self) -> int:
        """How many spatial dimensions there are."""
        return len(self.strides)

    @property
    def is_depthwise(self) -> bool:
        """Whether each output channel has an input channel of its own."""
        return self.w_shape[1] == 1 and self.x_shape[1] == self.w_shape[0]

    def shape(self, role: Role) -> Shape:
        """Give the logical shape of x, w or y, and so of its gradient."""
        return getattr(self, f"{role}_shape")

    def dtype(self, role: Role) -> str:
        """Give the dtype of x, w or y, and so of its gradient."""
        return getattr(self.dtypes, role)


@dataclass(frozen=True)
class Epilogue:
    """What is done to a convolution's sums before they are rounded: act(sums + residual + bias)."""

    activation: str = ""
    """Its name in `_activations`; empty for none."""
    bias: bool = False
    """Whether there is one, of a number for each channel of the result."""
    residual: bool = False
    """Whether there is one, an array like the result."""

    def __str__(self) -> str:
        parts = ("residual" * self.residual, "bias" * self.bias, self.activation)
        return " + ".join(part for part in parts if part)


class Layout(NamedTuple):
    """The axis of the user's array at which each logical dimension sits, for x, w and y.

    The order is `ConvSpec`'s, and `lax.ConvDimensionNumbers`'s: NHWC is (0, 3, 1, 2).
    """

    x: Shape
    w: Shape
    y: Shape

    def axis(self, role: Role, dimension: int) -> int:
        """Give the axis of one logical dimension."""
        return getattr(self, role)[dimension]

    def memory_order(self, role: Role, *, channels_first: bool = False) -> Shape:
        """Give the axes of an array from slowest to fastest in the memory that cuDNN wants.

        That is images or output channels, positions, then the channels that are summed over, or the
        latter two the other way round.
        """
        images, channels, *spatial = getattr(self, role)
        return (images, channels, *spatial) if channels_first else (images, *spatial, channels)

    @property
    def is_channels_first(self) -> bool:
        """Whether the channels of both images come before the positions, as in NCHW."""
        return all(channels < min(spatial) for _, channels, *spatial in (self.x, self.y))

    @property
    def is_channels_last(self) -> bool:
        """Whether both images are in the order of images, positions and channels, as in NHWC."""
        return all(self.memory_order(role) == tuple(range(len(self.x))) for role in ("x", "y"))

    def to_array(self, role: Role, logical: Sequence[int]) -> Shape:
        """Reorder one number per logical dimension into one per axis."""
        axes = getattr(self, role)
        return tuple(logical[axes.index(axis)] for axis in range(len(axes)))

    def to_logical(self, role: Role, array: Sequence[int]) -> Shape:
        """Reorder one number per axis into one per logical dimension."""
        return tuple(array[axis] for axis in getattr(self, role))


def extent(window: int, dilation: int) -> int:
    """Give the number of input positions that a dilated window spans."""
    return 0 if window == 0 else dilation * (window - 1) + 1


def replaced(numbers: tuple, index: int, number: Any) -> tuple:
    """Give the same numbers, or pairs of them, with another at one index."""
    return (*numbers[:index], number, *numbers[index + 1 :])
