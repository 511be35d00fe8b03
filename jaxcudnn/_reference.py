# SPDX-License-Identifier: Apache-2.0
"""The three operations written out in `lax`: how they run wherever cuDNN does not.

In one spatial dimension, with input size L, window size R, output size P, stride s, dilation d,
padding (lo, hi) and no groups, the forward convolution is

    y[n, k, p] = sum over c, r of  x[n, c, s p + d r - lo] w[k, c, r]

so x, w and y meet at input position i where  i = s p + d r - lo. Collecting the same products by
position in x, and by position in w, gives the other two operations.

dgrad: dx[n, c, i] = sum over k, r of  u[n, k, i + lo - d r] w[k, c, r], where u is dy spread out so
that u[s p] = dy[p], with zeros between: `lhs_dilation` s, spread size s (P - 1) + 1. Reversing the
window, r = R - 1 - r', makes it a cross-correlation that starts at  lo' = d (R - 1) - lo  before u:

    padding (d (R - 1) - lo,  L + lo - 1 - s (P - 1)),

the second number being the one that gives an output of size L. Either may be negative, and what it
would crop is sliced off the result instead: XLA's CPU compiler computed wrong numbers for negative
padding until jax 0.12.

wgrad: dw[k, c, r] = sum over n, p of  x[n, c, s p + d r - lo] dy[n, k, p] is already a
cross-correlation of x with the window dy, with stride and dilation exchanged. Images play the part
of channels and channels that of images:

    padding (lo,  s (P - 1) + 1 + d (R - 1) - L - lo),

the second again being what gives size R; it is at most hi, and where it is negative x is sliced.

With G groups, fprop is grouped by feature. So is dgrad, for which each group's K / G outputs become
its inputs. In wgrad the groups of x stand where a batch does, and it is grouped by batch.

What XLA has no kernel for on GPUs is convolved by `_taps` there, which takes what
`lax.conv_general_dilated` takes.

These are formulas, and not `jax.vjp` or `jax.linear_transpose` of fprop, because a derivative that
is taken while lowering inside `jax.shard_map` does not know which mesh axes its operands vary over,
and then sums over devices what must not be summed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim

from ._axes import fold, unfold
from ._dtypes import Dtypes, PrecisionPair, accumulator, is_integer, multiplied_in
from ._spec import ROLES, ConvSpec, Layout, Role

Convolve = Callable[..., jax.Array]


def fprop(
    x: jax.Array,
    w: jax.Array,
    *,
    spec: ConvSpec,
    layout: Layout,
    convolve: Convolve = lax.conv_general_dilated,
) -> jax.Array:
    """Compute y from x and w."""
    return _convolve(
        x,
        _oriented(w, spec, layout),
        convolve=convolve,
        shape=layout.to_array("y", spec.y_shape),
        dtype=spec.dtype("y"),
        precision=spec.precision,
        dimension_numbers=(layout.x, layout.w, layout.y),
        window_strides=spec.strides,
        padding=spec.padding,
        rhs_dilation=spec.dilation,
        feature_group_count=spec.groups,
    )


def dgrad(
    dy: jax.Array,
    w: jax.Array,
    *,
    spec: ConvSpec,
    layout: Layout,
    convolve: Convolve = lax.conv_general_dilated,
) -> jax.Array:
    """Compute dx from dy and w."""
    if 0 in spec.x_shape:  # of which what is computed below may be a part
        return jnp.zeros(layout.to_array("x", spec.x_shape), spec.dtype("x"))
    o, i, *window = layout.w
    w = lax.rev(_oriented(w, spec, layout), window)
    w = fold(unfold(w, o, spec.groups), o, i)  # (K, C / groups) to (K / groups, C)
    pads = [
        (d * (r - 1) - lo, n + lo - 1 - s * (p - 1))
        for n, r, p, s, d, (lo, _) in _per_dimension(spec)
    ]
    # XLA's CPU compiler, up to jax 0.12 at least, ends the process over some convolutions with two
    # taps, a dy spread by two and no padding. One row more is computed there, and sliced off.
    more = [
        int((r, s, d) == (2, 2, 1) and max(low, high) <= 0)
        for (low, high), (_, r, _, s, d, _) in zip(pads, _per_dimension(spec), strict=True)
    ]
    ends = [
        (max(0, -low), max(0, -high) + one) for (low, high), one in zip(pads, more, strict=True)
    ]
    # What is empty stays so, and is not computed.
    surplus = [(0, 0)] * (2 + len(ends)) if 0 in spec.x_shape else [(0, 0), (0, 0), *ends]
    larger = [size + sum(ends) for size, ends in zip(spec.x_shape, surplus, strict=True)]
    dx = _convolve(
        dy,
        w,
        convolve=convolve,
        shape=layout.to_array("x", larger),
        dtype=spec.dtype("x"),
        precision=spec.precision,
        dimension_numbers=(layout.y, (i, o, *window), layout.x),
        window_strides=(1,) * spec.num_spatial,
        padding=[(low + a, high + b) for (low, high), (a, b) in zip(pads, ends, strict=True)],
        lhs_dilation=spec.strides,
        rhs_dilation=spec.dilation,
        feature_group_count=spec.groups,
    )
    return _trimmed(dx, [surplus[layout.x.index(axis)] for axis in range(dx.ndim)])


def wgrad(
    x: jax.Array,
    dy: jax.Array,
    *,
    spec: ConvSpec,
    layout: Layout,
    convolve: Convolve = lax.conv_general_dilated,
) -> jax.Array:
    """Compute dw from x and dy."""
    pads = [
        (lo, s * (p - 1) + 1 + d * (r - 1) - n - lo)
        for n, r, p, s, d, (lo, _) in _per_dimension(spec)
    ]
    unused = [(0, 0), (0, 0), *((0, max(0, -high)) for _, high in pads)]
    dw = _convolve(
        _trimmed(x, [unused[layout.x.index(axis)] for axis in range(x.ndim)]),
        dy,
        convolve=convolve,
        shape=layout.to_array("w", spec.w_shape),
        dtype=spec.dtype("w"),
        precision=spec.precision,
        dimension_numbers=tuple(
            (second, first, *spatial) for first, second, *spatial in (layout.x, layout.y, layout.w)
        ),
        window_strides=spec.dilation,
        padding=[(low, max(0, high)) for low, high in pads],
        rhs_dilation=spec.strides,
        batch_group_count=spec.groups,
    )
    return _oriented(dw, spec, layout)


def check_shapes(result: Role, spec: ConvSpec, layout: Layout) -> None:
    """Check that a formula can do with what is known of symbolic sizes.

    Raises:
        InconclusiveDimensionOperation: of `jax.errors`, if it cannot.
    """
    op = next(op for op, roles in ROLES.items() if roles[-1] == result)
    formula = {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad}[op]
    shapes = (layout.to_array(role, spec.shape(role)) for role in ROLES[op][:2])
    operands = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    real = replace(spec, dtypes=Dtypes("float32", "float32", "float32"))
    jax.eval_shape(partial(formula, spec=real, layout=layout), *operands)


def _trimmed(array: jax.Array, ends: Sequence[tuple[int, int]]) -> jax.Array:
    """Cut so many elements off the two ends of each axis; off more than there are, all."""
    if not any(map(any, ends)):
        return array
    starts = [min(low, size) for (low, _), size in zip(ends, array.shape, strict=True)]
    stops = [
        max(start, size - high)
        for start, (_, high), size in zip(starts, ends, array.shape, strict=True)
    ]
    return lax.slice(array, starts, stops)


def _per_dimension(spec: ConvSpec) -> Iterable[tuple]:
    """Give L, R, P, s, d and (lo, hi) for each spatial dimension."""
    sizes = (spec.x_shape[2:], spec.w_shape[2:], spec.y_shape[2:])
    return zip(*sizes, spec.strides, spec.dilation, spec.padding, strict=True)


def _oriented(w: jax.Array, spec: ConvSpec, layout: Layout) -> jax.Array:
    """Turn a filter to or from the order in which `lax` slides it."""
    return lax.rev(w, layout.w[2:]) if spec.flip else w


def _convolve(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    convolve: Convolve,
    shape: Sequence[int],
    dtype: str,
    precision: PrecisionPair,
    dimension_numbers: Sequence[Sequence[int]],
    **params,
) -> jax.Array:
    # An empty sum is zero. XLA refuses some empty windows, and the formulas above presume P > 0.
    if 0 in (*lhs.shape, *rhs.shape, *shape):
        return jnp.zeros(shape, dtype)
    pads = [number for pair in params["padding"] for number in pair]
    if any(map(is_symbolic_dim, pads)):
        raise jax.errors.InconclusiveDimensionOperation(
            f"The padding {pads} of lax's convolution has to be known."
        )
    given = lhs.dtype.name, rhs.dtype.name, dtype
    y = convolve(
        *(lax.convert_element_type(operand, multiplied_in(*given)) for operand in (lhs, rhs)),
        dimension_numbers=lax.ConvDimensionNumbers(*map(tuple, dimension_numbers)),
        precision=lax.Precision.HIGHEST if any(map(is_integer, given[:2])) else precision,
        preferred_element_type=accumulator(*given),
        **params,
    )
    return lax.convert_element_type(y, dtype)
