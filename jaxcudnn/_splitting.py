# SPDX-License-Identifier: Apache-2.0
"""A convolution of arrays too large for cuDNN as several smaller ones.

cuDNN has fast plans only for arrays whose elements 32 bits can count. Images are independent of one
another, so x and y are cut into runs of images; w is their sum, if it is what is asked for.

A single image is cut across one spatial dimension. Output rows [p0, p1) meet, with the names of
`_reference`, input rows from  s p0 - lo  to  s (p1 - 1) + d (R - 1) - lo, the halo included. If x
is asked for it is the input that is cut, at  i = s p - lo  for p = p0 and p1: its rows [i0, i1)
meet the output rows q with  i0 <= s q + d r - lo < i1  for some r, so from  ceil(p0 - d (R - 1) /
s)  to  p1 - 1, and in the smaller convolution of these the low padding is  lo - s q0 + i0 >= 0.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._dtypes import accumulator
from ._spec import ConvSpec, Layout, Role, extent, replaced

Run = tuple[int, int]
"""Where a run of images or rows begins and ends."""


class _Piece(NamedTuple):
    spec: ConvSpec
    cuts: dict[Role, Run]
    """Which part of x and of y it has, along the dimension that is cut."""


def compute_in_pieces(
    arrays: Mapping[Role, jax.Array],
    *,
    spec: ConvSpec,
    layout: Layout,
    limit: int,
    compute: Callable[[dict[Role, jax.Array], ConvSpec], jax.Array],
) -> jax.Array | None:
    """Compute the one role that `arrays` leaves out, in pieces if x or y is too large.

    `limit` is the most elements that an array of a piece may have, and `compute` computes a piece
    from its arrays and its spec. The result is None if nothing is too large, or if what is too
    large cannot be cut.
    """
    (result,) = {"x", "w", "y"} - set(arrays)
    largest = max(math.prod(spec.x_shape), math.prod(spec.y_shape))
    if largest <= limit:
        return None
    images = spec.x_shape[0]
    if images > 1:
        dimension, pieces = 0, _runs_of_images(spec, max(1, limit // (largest // images)))
    else:
        cut = _best_cut(spec, result, limit)
        if cut is None:
            return None
        dimension, pieces = cut[0], _runs_of_rows(spec, result, *cut)
    parts = []
    for piece in pieces:
        piece_arrays = {
            role: lax.slice_in_dim(array, *piece.cuts[role], axis=layout.axis(role, dimension))
            if role in piece.cuts
            else array
            for role, array in arrays.items()
        }
        parts.append(compute(piece_arrays, _with_unrounded_filter(piece.spec, result)))
    if result == "w":
        return lax.convert_element_type(sum(parts[1:], parts[0]), spec.dtype("w"))
    return jnp.concatenate(parts, axis=layout.axis(result, dimension))


def _with_unrounded_filter(spec: ConvSpec, result: Role) -> ConvSpec:
    """Have partial sums of w kept as they are, so that only the whole sum is rounded."""
    if result != "w":
        return spec
    return replace(spec, dtypes=spec.dtypes._replace(w=accumulator(*spec.dtypes)))


def _runs_of_images(spec: ConvSpec, length: int) -> Iterator[_Piece]:
    images, *rest = spec.x_shape
    for start in range(0, images, length):
        stop = min(start + length, images)
        piece = replace(spec, x_shape=(stop - start, *rest))
        yield _Piece(piece, {"x": (start, stop), "y": (start, stop)})


def _best_cut(spec: ConvSpec, result: Role, limit: int) -> tuple[int, int] | None:
    """Give the dimension to cut in the fewest pieces, and how many output rows one may have."""
    cuts = []
    for dimension in range(2, len(spec.x_shape)):
        rows, outs = spec.x_shape[dimension], spec.y_shape[dimension]
        stride, halo = spec.strides[dimension - 2], _halo(spec, dimension)
        most_x = limit // (math.prod(spec.x_shape) // rows)
        most_y = limit // (math.prod(spec.y_shape) // outs)
        if result == "x":  # the halo is in y, and the last piece takes what no output reaches
            length = min((most_x - halo) // stride - 1, most_y - halo // stride - 1)
        else:
            length = min((most_x - 1 - halo) // stride + 1, most_y)
        if length >= 1:
            cuts.append((-(-outs // length), dimension, length))
    return min(cuts)[1:] if cuts else None


def _runs_of_rows(spec: ConvSpec, result: Role, dimension: int, length: int) -> Iterator[_Piece]:
    """Cut a dimension into pieces of `length` output rows, or of the input rows they step over."""
    index = dimension - 2
    stride, low = spec.strides[index], spec.padding[index][0]
    rows, outs = spec.x_shape[dimension], spec.y_shape[dimension]
    halo = _halo(spec, dimension)
    for start in range(0, outs, length):
        stop = min(start + length, outs)
        first = min(rows, max(0, stride * start - low))
        if result != "x":
            end = stride * (stop - 1) - low + halo + 1
            yield _piece(spec, dimension, (first, max(first, min(rows, end))), (start, stop))
            continue
        end = rows if stop == outs else min(rows, stride * stop - low)
        if end > first:
            reached = max(0, -((halo - stride * start) // stride))
            yield _piece(spec, dimension, (first, end), (reached, stop))


def _piece(spec: ConvSpec, dimension: int, rows: Run, outs: Run) -> _Piece:
    """Restrict a spec to some rows of x and y, with the padding that makes them meet as before."""
    index = dimension - 2
    stride, size = spec.strides[index], rows[1] - rows[0]
    # Outputs that meet only padding have no rows, and then either side may have all of it.
    low = spec.padding[index][0] - stride * outs[0] + rows[0] if size else 0
    least = stride * (outs[1] - outs[0] - 1) + _halo(spec, dimension) + 1 - size - low
    piece = replace(
        spec,
        x_shape=replaced(spec.x_shape, dimension, size),
        padding=replaced(spec.padding, index, (low, max(0, least))),
    )
    return _Piece(piece, {"x": rows, "y": outs})


def _halo(spec: ConvSpec, dimension: int) -> int:
    """Give how many more input rows an output row meets than one."""
    return extent(spec.w_shape[dimension], spec.dilation[dimension - 2]) - 1
