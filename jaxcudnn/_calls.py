# SPDX-License-Identifier: Apache-2.0
"""From a user's arrays and numbers to one checked call of `_readings`, whoever's words they are."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim
from jax.typing import ArrayLike, DTypeLike

from . import _arguments, _array_arguments, _epilogue, _options, _taps
from ._arguments import Caller
from ._dtypes import accumulator, is_complex, resolve_precision
from ._epilogue_arguments import Asked, parse_extras
from ._options import Options, OptionsLike
from ._readings import Call
from ._spec import Layout, Pads, Role, Shape, extent

_NOTHING = Asked()


class Operands(NamedTuple):
    """What a convolution slides over, and the filter that slides."""

    lhs: jax.Array
    rhs: jax.Array
    layout: Layout
    """Of lhs as x, rhs as w and the result as y."""
    dtype: str
    """Of both."""
    result_dtype: str
    options: Options

    @property
    def num_spatial(self) -> int:
        """How many spatial dimensions there are."""
        return self.lhs.ndim - 2

    @property
    def lhs_shape(self) -> Shape:
        """(N, C, *spatial)."""
        return self.layout.to_logical("x", self.lhs.shape)

    @property
    def rhs_shape(self) -> Shape:
        """(O, I, *spatial)."""
        return self.layout.to_logical("w", self.rhs.shape)

    @property
    def is_explicitly_sharded(self) -> bool:
        """Whether an operand is sharded over explicit mesh axes."""
        return any(map(_array_arguments.is_explicitly_sharded, (self.lhs, self.rhs)))

    @property
    def has_known_filter(self) -> bool:
        """Whether no size of the filter is symbolic."""
        return not any(map(is_symbolic_dim, self.rhs_shape))

    @property
    def has_kernel(self) -> bool:
        """Whether XLA has a convolution of these for GPUs."""
        return _taps.is_needless(self.num_spatial, self.result_dtype)

    @property
    def is_for_lax(self) -> bool:
        """Whether only `lax` takes these: of symbolic sizes, or empty and of explicit sharding.

        That the number of images is symbolic is no matter.
        """
        sizes = (*self.lhs_shape[1:], *self.rhs_shape)
        symbolic = not all(isinstance(size, int) for size in sizes)
        return symbolic or (self.is_explicitly_sharded and 0 in (*self.lhs_shape, *sizes))

    def read(self, caller: Caller, name: str, value: Any, default: int | None = None) -> Shape:
        """Read strides or a dilation as `lax` takes them."""
        if value is None and default is not None:
            value = (default,) * self.num_spatial
        return _arguments.parse_ints(caller, name, value, self.num_spatial, minimum=1)


def as_arrays(caller: Caller, operands: Mapping[Role, ArrayLike]) -> dict[Role, jax.Array]:
    """Turn what `lax` would take for arrays into arrays."""
    for role, value in operands.items():
        _array_arguments.check_is_array(caller, getattr(caller, role), value)
    return {role: jnp.asarray(value) for role, value in operands.items()}


def read_operands(
    caller: Caller,
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: lax.ConvGeneralDilatedDimensionNumbers = None,
    *,
    preferred_element_type: Any = None,
    options: OptionsLike = None,
) -> Operands:
    """Check the arrays and what is said about arrays."""
    operands = as_arrays(caller, {"x": lhs, "w": rhs})
    num_spatial, dtype = _array_arguments.check_operands(caller, operands)
    return Operands(
        operands["x"],
        operands["w"],
        _arguments.parse_layout(caller, dimension_numbers, num_spatial),
        dtype,
        _array_arguments.parse_result_dtype(caller, dtype, preferred_element_type),
        _options.resolve(caller, options),
    )


def general(
    caller: Caller,
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Sequence[int] | None,
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: lax.ConvGeneralDilatedDimensionNumbers = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
    options: OptionsLike = None,
    asked: Asked = _NOTHING,
    default_stride: int | None = None,
) -> jax.Array:
    """Compute what `conv_general_dilated` does, in the name of a caller that has these words.

    It may also have an epilogue, `asked`, and a default for the strides.
    """
    operands = read_operands(
        caller,
        lhs,
        rhs,
        dimension_numbers,
        preferred_element_type=preferred_element_type,
        options=options,
    )
    _array_arguments.check_out_sharding(caller, out_sharding)
    if window_strides is None and default_stride is not None:
        window_strides = (default_stride,) * operands.num_spatial
    is_of_lax = out_sharding is not None and not _array_arguments.is_explicit(out_sharding)
    if operands.is_for_lax or is_of_lax:
        y = _by_lax(
            operands, window_strides, padding, lhs_dilation, rhs_dilation, feature_group_count,
            batch_group_count, precision, out_sharding,
        )  # fmt: skip
        return finish(caller, operands, y, asked)
    strides = operands.read(caller, caller.strides, window_strides)
    spread = operands.read(caller, "lhs_dilation", lhs_dilation, default=1)
    dilation = operands.read(caller, caller.dilation, rhs_dilation, default=1)
    _arguments.check_named_padding(caller, padding, spread)
    y = convolve(
        caller,
        operands,
        strides=strides,
        padding=_arguments.parse_padding(
            caller, padding, operands.lhs_shape, operands.rhs_shape, strides, dilation
        ),
        lhs_dilation=spread,
        rhs_dilation=dilation,
        feature_groups=_arguments.parse_int(caller, "feature_group_count", feature_group_count),
        batch_groups=_arguments.parse_int(caller, "batch_group_count", batch_group_count),
        precision=precision,
        asked=asked,
    )
    return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)


def convolve(
    caller: Caller,
    operands: Operands,
    *,
    strides: Shape,
    padding: Pads,
    lhs_dilation: Shape,
    rhs_dilation: Shape,
    feature_groups: int = 1,
    batch_groups: int = 1,
    precision: lax.PrecisionLike,
    flip: bool = False,
    asked: Asked = _NOTHING,
) -> jax.Array:
    """Check whether numbers and arrays fit together, and compute."""
    if operands.is_for_lax:
        assert not flip, "lax reverses no filter; conv_transpose calls its own there"
        y = _by_lax(
            operands, strides, padding, lhs_dilation, rhs_dilation, feature_groups, batch_groups,
            precision,
        )  # fmt: skip
        return finish(caller, operands, y, asked)
    call = Call(
        lhs_shape=operands.lhs_shape,
        rhs_shape=operands.rhs_shape,
        strides=strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        feature_groups=feature_groups,
        batch_groups=batch_groups,
        layout=operands.layout,
        dtype=operands.dtype,
        result_dtype=operands.result_dtype,
        precision=resolve_precision(caller, precision),
        options=operands.options,
        flip=flip,
    )
    _arguments.check_call(caller, call)
    shape = call.layout.to_array("y", call.out_shape)
    extras = parse_extras(caller, asked, call.layout, shape, call.result_dtype)
    return _epilogue.convolve(operands.lhs, operands.rhs, call, extras)


def finish(caller: Caller, operands: Operands, y: jax.Array, asked: Asked) -> jax.Array:
    """Check an epilogue for what `lax` convolved, and compute it."""
    extras = parse_extras(caller, asked, operands.layout, y.shape, y.dtype.name)
    return _epilogue.finish(y, operands.layout, extras)


def _by_lax(
    operands: Operands,
    strides: Any,
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None,
    rhs_dilation: Sequence[int] | None,
    feature_groups: int,
    batch_groups: int,
    precision: lax.PrecisionLike,
    out_sharding: Any = None,
) -> jax.Array:
    """Leave a call to `lax`, which also checks what is left to check.

    On CUDA, those of symbolic sizes for which XLA has no kernel there are left to `_taps`.
    """
    numbers = lax.ConvDimensionNumbers(*operands.layout)

    def by_lax(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            lhs,
            rhs,
            strides,
            padding,
            lhs_dilation,
            rhs_dilation,
            numbers,
            feature_groups,
            batch_groups,
            precision,
            operands.result_dtype,
            out_sharding,
        )

    def by_taps(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        dilation = rhs_dilation or (1,) * operands.num_spatial
        extents = tuple(map(extent, operands.rhs_shape[2:], dilation))
        pads = padding
        if isinstance(pads, str):
            pads = lax.padtype_to_pads(operands.lhs_shape[2:], extents, strides, pads)
        given = "int8" if operands.dtype == "bool" else operands.dtype
        wanted = "int32" if operands.result_dtype == "bool" else operands.result_dtype
        sums = wanted if is_complex(wanted) else accumulator(given, given, wanted)
        total = _taps.convolve(
            lax.convert_element_type(lhs, sums),
            lax.convert_element_type(rhs, sums),
            strides,
            pads,
            lhs_dilation,
            rhs_dilation,
            dimension_numbers=numbers,
            feature_group_count=feature_groups,
            batch_group_count=batch_groups,
            precision=precision,
            preferred_element_type=sums,
        )
        is_truth = operands.result_dtype == "bool"
        return total != 0 if is_truth else lax.convert_element_type(total, wanted)

    arrays = operands.lhs, operands.rhs
    if operands.has_kernel or not operands.has_known_filter or operands.is_explicitly_sharded:
        return by_lax(*arrays)
    jax.eval_shape(by_lax, *arrays)  # or `by_taps` would meet what `lax` refuses
    return lax.platform_dependent(*arrays, cuda=by_taps, default=by_lax)
