# SPDX-License-Identifier: Apache-2.0
"""What `lax.conv_transpose` means by its padding.

It convolves an input that is spread out by the strides, and a padding is of that input, as in
`conv_general_dilated`. With a window that spans k positions, a padding (lo, hi) of the forward
convolution whose gradient this could be is one of (k - 1 - lo, k - 1 - hi). Pairs mean the one or
the other, as the user says; the names SAME and VALID always mean the forward convolution's.
"""

from typing import Any

from ._arguments import Caller, parse_padding
from ._spec import Pads, Shape, extent


def parse_transposed_padding(
    caller: Caller,
    padding: Any,
    lhs_shape: Shape,
    rhs_shape: Shape,
    strides: Shape,
    dilation: Shape,
    *,
    consistent: bool,
) -> Pads:
    """Read the padding of `lax.conv_transpose` into that of the input, spread out by `strides`."""
    windows = tuple(map(extent, rhs_shape[2:], dilation))
    if isinstance(padding, str) and padding in ("SAME", "VALID"):
        return tuple(map(_same if padding == "SAME" else _valid, windows, strides))
    if isinstance(padding, str) and (consistent or any(stride > 1 for stride in strides)):
        raise ValueError(
            f"{caller}: padding must be 'SAME', 'VALID' or a sequence of (low, high) pairs, got "
            f"{padding!r}; write one of these"
        )
    # Other spellings reach conv_general_dilated, which reads them for an input that is not spread.
    ones = (1,) * len(strides)
    pairs = parse_padding(caller, padding, lhs_shape, rhs_shape, ones, dilation)
    if not consistent:
        return pairs
    sizes = map(extent, lhs_shape[2:], strides)
    largest = tuple(size + 2 * (k - 1) for size, k in zip(sizes, windows, strict=True))
    if any(low + high > size for (low, high), size in zip(pairs, largest, strict=True)):
        raise ValueError(
            f"{caller}: padding must not crop more than there is, got padding {pairs} for sizes "
            f"{largest}, which the spread input has with a padding of 0; crop less"
        )
    return tuple((k - 1 - low, k - 1 - high) for k, (low, high) in zip(windows, pairs, strict=True))


def _same(window: int, stride: int) -> tuple[int, int]:
    """Make the output as large as the strides times the input."""
    total = window + stride - 2
    low = min(window - 1, total - total // 2)
    return low, total - low


def _valid(window: int, stride: int) -> tuple[int, int]:
    """Make the output as large as the strides times the input, and larger by what a window adds."""
    return window - 1, max(window, stride) - 1
