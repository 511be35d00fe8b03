# SPDX-License-Identifier: Apache-2.0
"""A convolution of arrays too large for cuDNN as several smaller ones.

cuDNN has fast plans only for arrays whose elements 32 bits can count. Images are independent of one
another, so x and y are cut into runs of images; w is their sum, if it is what is asked for.

A single image is cut across one spatial dimension. Output rows [p0, p1) meet, with the names of
`_reference`, input rows from  s p0 - lo  to  s (p1 - 1) + d (R - 1) - lo, the halo included. If x
is asked for it is the input that is cut, at  i = s p - lo  for p = p0 and p1: its rows [i0, i1)
meet the output rows q with  i0 <= s q + d r - lo < i1  for some r, so from  ceil(p0 - d (R - 1) /
s)  to  p1 - 1, and in the smaller convolution of these the low padding is  lo - s q0 + i0 >= 0.

A filter is cut by groups, with the channels of x and y that are theirs; the filter of one group by
its outputs, which are channels of y, or by its inputs, which are channels of x. Where the result
has not the dimension that is cut, it is a sum. One image that
cannot be cut across space is cut in the same ways.
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
"""Where a run of images, rows or channels begins and ends."""


class _Piece(NamedTuple):
    spec: ConvSpec
    cuts: dict[Role, tuple[int, Run]]
    """The logical dimension along which an array is cut, and which part of it the piece has."""


def compute_in_pieces(
    arrays: Mapping[Role, jax.Array],
    *,
    spec: ConvSpec,
    layout: Layout,
    limit: int,
    compute: Callable[[dict[Role, jax.Array], ConvSpec], jax.Array],
) -> jax.Array | None:
    """Compute the one role that `arrays` leaves out, in pieces if x, w or y is too large.

    `limit` is the most elements that an array of a piece may have, and `compute` computes a piece
    from its arrays and its spec. The result is None if nothing is too large, or if what is too
    large cannot be cut.
    """
    (result,) = {"x", "w", "y"} - set(arrays)
    large = [role for role in "xwy" if math.prod(spec.shape(role)) > limit]
    pieces = _cut(spec, result, large, limit)
    if pieces is None:
        return None
    cut, parts = None, []
    for piece in pieces:
        piece_arrays = dict(arrays)
        for role, (dimension, run) in piece.cuts.items():
            axis = layout.axis(role, dimension)
            if role == result:
                cut = axis
            else:
                piece_arrays[role] = lax.slice_in_dim(arrays[role], *run, axis=axis)
        summed = result not in piece.cuts
        parts.append(
            compute(piece_arrays, _unrounded(piece.spec, result) if summed else piece.spec)
        )
    if cut is None:
        return lax.convert_element_type(sum(parts[1:], parts[0]), spec.dtype(result))
    return jnp.concatenate(parts, axis=cut)


def _cut(spec: ConvSpec, result: Role, large: list[Role], limit: int) -> Iterator[_Piece] | None:
    """Cut what is too large, if anything is and can be: one dimension, and pieces may be cut on."""
    if {"x", "y"}.intersection(large):
        images = spec.x_shape[0]
        if images > 1:
            largest = max(math.prod(spec.x_shape), math.prod(spec.y_shape))
            return _runs_of_images(spec, max(1, limit // (largest // images)))
        rows = _best_cut(spec, result, limit)
        if rows is not None:
            return _runs_of_rows(spec, result, *rows)
    for dimensions in _channels(spec, result):
        role, dimension = next(iter(dimensions.items()))
        number = spec.groups if spec.groups > 1 else spec.shape(role)[dimension]
        if number > 1 and not dimensions.keys().isdisjoint(large):
            return _runs_of_channels(spec, dimensions, number, limit)
    return None


def _unrounded(spec: ConvSpec, result: Role) -> ConvSpec:
    """Have a partial sum kept as it is, so that only the whole sum is rounded."""
    return replace(spec, dtypes=spec.dtypes._replace(**{result: accumulator(*spec.dtypes)}))


def _channels(spec: ConvSpec, result: Role) -> list[dict[Role, int]]:
    """Give the dimensions that groups, or outputs and inputs, are cut along, sums last."""
    if spec.groups > 1:
        return [{"x": 1, "w": 0, "y": 1}]
    outputs, inputs = {"w": 0, "y": 1}, {"w": 1, "x": 1}
    return [inputs, outputs] if result == "x" else [outputs, inputs]


def _runs_of_channels(
    spec: ConvSpec, dimensions: dict[Role, int], number: int, limit: int
) -> Iterator[_Piece]:
    """Cut `number` groups, outputs or inputs into runs."""
    length = min(limit // (math.prod(spec.shape(role)) // number) for role in dimensions)
    for start in range(0, number, max(1, length)):
        stop = min(start + max(1, length), number)
        cuts, shapes = {}, {"x": spec.x_shape, "w": spec.w_shape, "y": spec.y_shape}
        for role, dimension in dimensions.items():
            each = shapes[role][dimension] // number
            cuts[role] = dimension, (start * each, stop * each)
            shapes[role] = replaced(shapes[role], dimension, (stop - start) * each)
        groups = stop - start if spec.groups > 1 else 1
        piece = replace(spec, x_shape=shapes["x"], w_shape=shapes["w"], groups=groups)
        yield _Piece(piece, cuts)


def _runs_of_images(spec: ConvSpec, length: int) -> Iterator[_Piece]:
    images, *rest = spec.x_shape
    for start in range(0, images, length):
        stop = min(start + length, images)
        piece = replace(spec, x_shape=(stop - start, *rest))
        yield _Piece(piece, {role: (0, (start, stop)) for role in "xy"})


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
    return _Piece(piece, {"x": (dimension, rows), "y": (dimension, outs)})


def _halo(spec: ConvSpec, dimension: int) -> int:
    """Give how many more input rows an output row meets than one."""
    return extent(spec.w_shape[dimension], spec.dilation[dimension - 2]) - 1
