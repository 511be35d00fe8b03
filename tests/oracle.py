# SPDX-License-Identifier: Apache-2.0
"""The three operations in NumPy and float64, from the definition and from nothing of the package.

With input position i, output position p, window position r, stride s, dilation d and low padding
lo for each spatial dimension, the products x[n, c, i] w[k, c, r] dy[n, k, p] that belong to a
convolution are those where

    i = s p + d r - lo.

All three results are sums over them.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from cases import Case

Index = tuple[int, ...]


def compute(role: str, a, b, case: Case, *, flip: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The result, and the same sums over absolute values, which bound what rounding can do."""
    operation = {"y": fprop, "x": dgrad, "w": wgrad}[role]
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return operation(a, b, case, flip=flip), operation(np.abs(a), np.abs(b), case, flip=flip)


def fprop(x, w, case: Case, *, flip: bool) -> np.ndarray:
    x, w, y = _grouped(x, case, "x"), _grouped(w, case, "w"), _zeros(case, "y")
    for i, r, p in _meetings(case, flip):
        y[:, :, :, *p] += np.einsum("ngc,gkc->ngk", x[:, :, :, *i], w[:, :, :, *r])
    return _in_users_order(y, case, "y")


def dgrad(dy, w, case: Case, *, flip: bool) -> np.ndarray:
    dy, w, dx = _grouped(dy, case, "y"), _grouped(w, case, "w"), _zeros(case, "x")
    for i, r, p in _meetings(case, flip):
        dx[:, :, :, *i] += np.einsum("ngk,gkc->ngc", dy[:, :, :, *p], w[:, :, :, *r])
    return _in_users_order(dx, case, "x")


def wgrad(x, dy, case: Case, *, flip: bool) -> np.ndarray:
    x, dy, dw = _grouped(x, case, "x"), _grouped(dy, case, "y"), _zeros(case, "w")
    for i, r, p in _meetings(case, flip):
        dw[:, :, :, *r] += np.einsum("ngk,ngc->gkc", dy[:, :, :, *p], x[:, :, :, *i])
    return _in_users_order(dw, case, "w")


def _meetings(case: Case, flip: bool) -> Iterator[tuple[Index, Index, Index]]:
    """Every (i, r, p) that meet; r counts from the window's other end if it is flipped."""
    out = [case.y_shape[axis] for axis in case.axes("y")[2:]]
    in_each_dimension = [
        [
            (i, window - 1 - r if flip else r, p)
            for p in range(positions)
            for r in range(window)
            if 0 <= (i := s * p + d * r - low) < size
        ]
        for size, window, positions, s, d, (low, _) in zip(
            case.size, case.window, out, case.strides, case.dilation, case.pads, strict=True
        )
    ]
    for meetings in itertools.product(*in_each_dimension):
        i, r, p = (tuple(place[part] for place in meetings) for part in range(3))
        yield i, r, p


def _grouped(array, case: Case, role: str) -> np.ndarray:
    """N, group, channels, *spatial of x and y; group, outputs, inputs, *window of w."""
    array = array.transpose(case.axes(role))
    axis = 0 if role == "w" else 1
    size = array.shape[axis] // case.groups
    return array.reshape(*array.shape[:axis], case.groups, size, *array.shape[axis + 1 :])


def _zeros(case: Case, role: str) -> np.ndarray:
    return _grouped(np.zeros(case.shape(role)), case, role).copy()


def _in_users_order(grouped, case: Case, role: str) -> np.ndarray:
    logical = grouped.reshape([case.shape(role)[axis] for axis in case.axes(role)])
    return logical.transpose(np.argsort(case.axes(role)))
