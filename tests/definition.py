# SPDX-License-Identifier: Apache-2.0
"""What a call of `conv_general_dilated` means, in NumPy and from nothing of the package.

In each spatial dimension lhs position i, rhs position r and output position p meet where

    b i = s p + d r - lo

with lhs dilation b, stride s, rhs dilation d and low padding lo. The products
lhs[n, c, i] rhs[o, c, r] out[n, o, p] of what meets in every dimension are those of the
convolution: the output is the sum of lhs times rhs over them, and the derivatives in lhs and rhs
are those of the other two times each other. `oracle.py` says this of cuDNN's three operations, one
meeting after the other; here are arrays of them, for thousands of calls.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

Shape = tuple[int, ...]

ROLES: tuple[str, ...] = ("lhs", "rhs", "out")

# With groups first, lhs is (g, n, c, i), rhs (g, o, c, r) and out (g, n, o, p). The first of the
# two arrays is spread out, to the positions where the second and the result meet.
SUMS = {
    "out": ("lhs", "rhs", "gncrp,gocr->gnop"),
    "lhs": ("out", "rhs", "gnori,gocr->gnci"),
    "rhs": ("lhs", "out", "gncpr,gnop->gocr"),
}


@dataclass(frozen=True)
class Geometry:
    """A call in numbers. Shapes are logical: (N, C, *spatial), or (O, I, *spatial) of rhs."""

    lhs_shape: Shape
    rhs_shape: Shape
    strides: Shape
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: Shape
    rhs_dilation: Shape
    feature_groups: int
    batch_groups: int
    axes: Mapping[str, Shape]
    """For each array, at which of its axes the logical dimensions are."""

    @property
    def out_shape(self) -> Shape:
        """After https://openxla.org/xla/operation_semantics#conv_convolution."""
        out = (
            max(0, (spread(i, b) + lo + hi - spread(r, d)) // s + 1)
            for i, r, s, (lo, hi), b, d in zip(
                self.lhs_shape[2:], self.rhs_shape[2:], self.strides, self.padding,
                self.lhs_dilation, self.rhs_dilation, strict=True,
            )
        )  # fmt: skip
        return (self.lhs_shape[0] // self.batch_groups, self.rhs_shape[0], *out)

    def shape(self, role: str) -> Shape:
        """The shape of lhs, rhs or out as its user has it."""
        logical = getattr(self, f"{role}_shape")
        return tuple(logical[self.axes[role].index(axis)] for axis in range(len(logical)))

    def divided(self, role: str) -> int:
        """Which logical dimension of an array the groups divide, they outermost."""
        return {"lhs": 0 if self.batch_groups > 1 else 1, "rhs": 0, "out": 1}[role]


def spread(size: int, distance: int) -> int:
    """Give the number of positions over which so many elements are spread."""
    return 0 if size == 0 else distance * (size - 1) + 1


def compute(result: str, arrays: Mapping[str, np.ndarray], geometry: Geometry) -> np.ndarray:
    """Give one of lhs, rhs and out from the other two, in the dtype that those have."""
    first, second, letters = SUMS[result]
    a, b = (to_groups(arrays[role], role, geometry) for role in (first, second))
    order = [ROLES.index(role) for role in (first, second, result)]
    for meeting in meetings(geometry):  # takes the first position left away and adds two at the end
        a = np.tensordot(a, meeting.transpose(order).astype(a.dtype), (3, 0))
    positions = range(3, a.ndim)
    a = a.transpose(0, 1, 2, *positions[::2], *positions[1::2])
    logical = getattr(geometry, f"{result}_shape")
    flat = (math.prod(b.shape[3:]), math.prod(logical[2:]))
    a = a.reshape(*a.shape[:3], *flat)
    summed = np.einsum(letters, a, b.reshape(*b.shape[:3], flat[0]))
    return from_groups(summed, result, geometry)


def meetings(geometry: Geometry) -> list[np.ndarray]:
    """Say for each spatial dimension which i, r and p meet."""
    found = []
    for dimension, (b, s, d, (lo, _)) in enumerate(
        zip(
            geometry.lhs_dilation, geometry.strides, geometry.rhs_dilation, geometry.padding,
            strict=True,
        )
    ):  # fmt: skip
        i, r, p = np.ogrid[
            tuple(slice(getattr(geometry, f"{role}_shape")[2 + dimension]) for role in ROLES)
        ]
        found.append(b * i == s * p + d * r - lo)
    return found


def to_groups(array: np.ndarray, role: str, geometry: Geometry) -> np.ndarray:
    """Put groups first, and then the logical dimensions."""
    logical = array.transpose(geometry.axes[role])
    split, groups = geometry.divided(role), geometry.feature_groups * geometry.batch_groups
    size = logical.shape[split] // groups
    apart = logical.reshape(*logical.shape[:split], groups, size, *logical.shape[split + 1 :])
    return np.moveaxis(apart, split, 0)


def from_groups(grouped: np.ndarray, role: str, geometry: Geometry) -> np.ndarray:
    apart = np.moveaxis(grouped, 0, geometry.divided(role))
    logical = apart.reshape(getattr(geometry, f"{role}_shape"))
    return logical.transpose(np.argsort(geometry.axes[role]))
