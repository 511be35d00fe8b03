# SPDX-License-Identifier: Apache-2.0
"""One call of `conv_general_dilated`: it runs, knows what comes out, and prints as Python."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

import definition
import jaxcudnn
from definition import ROLES, Geometry, Shape
from tolerance import assert_close

PREAMBLE = """\
from functools import partial
import jax, jaxcudnn
from jax.lax import ConvDimensionNumbers
from calls import integers, normal
jax.config.update("jax_enable_x64", {x64})
"""

DEFAULTS = {"feature_group_count": 1, "batch_group_count": 1}


def integers(seed: int, shape: Sequence[int], dtype: str, largest: int = 3) -> np.ndarray:
    """Integers of up to that size, from 0 if there is no sign; complex ones have two of them."""
    least = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -largest
    return _complete(lambda rng: rng.integers(least, largest, shape, endpoint=True), seed, dtype)


def normal(seed: int, shape: Sequence[int], dtype: str) -> np.ndarray:
    return _complete(lambda rng: rng.standard_normal(shape), seed, dtype)


def _complete(draw, seed: int, dtype: str) -> np.ndarray:
    rng = np.random.default_rng(seed)
    drawn = draw(rng) + (1j * draw(rng) if is_complex(dtype) else 0)
    return drawn.astype(jnp.dtype(dtype))


def is_complex(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call that `lax` takes, with its gradients or without. Shapes are those of the arrays."""

    lhs_shape: Shape
    rhs_shape: Shape
    dtype: str
    window_strides: Shape
    padding: str | tuple[tuple[int, int], ...]
    lhs_dilation: Shape | None = None
    rhs_dilation: Shape | None = None
    dimension_numbers: lax.ConvGeneralDilatedDimensionNumbers = None
    feature_group_count: int = 1
    batch_group_count: int = 1
    precision: str | None = None
    preferred_element_type: str | None = None
    seed: int = 0
    largest: int | None = 3
    """Of the integers in the arrays; None for normally distributed numbers."""
    gradient: bool = False
    x64: bool = False

    def __repr__(self) -> str:
        """The call as Python, which PREAMBLE lets run."""
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        lhs, rhs, *out = map(self._text, self.roles)
        if not out:
            return f"jaxcudnn.conv_general_dilated({lhs}, {rhs}, {arguments})"
        convolve = f"partial(jaxcudnn.conv_general_dilated, {arguments})"
        return f"jax.vjp({convolve}, {lhs}, {rhs})[1]({out[0]})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The same for hypothesis, which prints dataclasses in its own way."""
        printer.text(repr(self))

    @property
    def script(self) -> str:
        """All that it takes to repeat the call."""
        return f"{PREAMBLE.format(x64=self.x64)}print({self!r})\n"

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments that are not the default."""
        names = (
            "window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers",
            "feature_group_count", "batch_group_count", "precision", "preferred_element_type",
        )  # fmt: skip
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value != DEFAULTS.get(name)}

    @property
    def roles(self) -> tuple[str, ...]:
        """The arrays that are drawn: the operands, and for gradients the output's cotangent."""
        return ROLES if self.gradient else ROLES[:2]

    @cached_property
    def geometry(self) -> Geometry:
        numbers = lax.conv_dimension_numbers(self.lhs_shape, self.rhs_shape, self.dimension_numbers)
        axes = dict(zip(ROLES, (tuple(map(int, order)) for order in numbers), strict=True))
        lhs_shape = tuple(self.lhs_shape[axis] for axis in axes["lhs"])
        rhs_shape = tuple(self.rhs_shape[axis] for axis in axes["rhs"])
        ones = (1,) * len(self.window_strides)
        dilation, padding = self.rhs_dilation or ones, self.padding
        if isinstance(padding, str):
            extents = [*map(definition.spread, rhs_shape[2:], dilation)]
            pairs = lax.padtype_to_pads(lhs_shape[2:], extents, self.window_strides, padding)
            padding = tuple((int(low), int(high)) for low, high in pairs)
        return Geometry(
            lhs_shape=lhs_shape,
            rhs_shape=rhs_shape,
            strides=self.window_strides,
            padding=padding,
            lhs_dilation=self.lhs_dilation or ones,
            rhs_dilation=dilation,
            feature_groups=self.feature_group_count,
            batch_groups=self.batch_group_count,
            axes=axes,
        )

    def result_dtype(self, role: str) -> str:
        return self.preferred_element_type or self.dtype if role == "out" else self.dtype

    def arrays(self) -> list[np.ndarray]:
        return [self._draw(*self._drawing(role)) for role in self.roles]

    def run(self, *arrays: ArrayLike) -> dict[str, jax.Array]:
        """Give the output, and for gradients those of the operands."""
        convolve = partial(jaxcudnn.conv_general_dilated, **self.arguments)
        if not self.gradient:
            return {"out": convolve(*arrays)}
        lhs, rhs, cotangent = arrays
        out, pullback = jax.vjp(convolve, lhs, rhs)
        return dict(zip(ROLES, (*pullback(cotangent), out), strict=True))

    def check(self, results: Mapping[str, Any]) -> None:
        """Compare shapes, dtypes and values with the definition.

        Integers are compared with ==, after the exact result has been rounded once or, if the
        result has integers, been reduced to them. Only sums of results that are rounded one by one
        are held to the bound of other numbers, where they may exceed what the dtype counts to.
        """
        for role, computed in results.items():
            dtype, exact = self.result_dtype(role), self._compute(role, _widened)
            assert computed.dtype == dtype, f"{role} has dtype {computed.dtype}, not {dtype}"
            assert computed.shape == exact.shape, f"{role} has shape {computed.shape}"
            magnitude, parts = self._compute(role, _magnitude), self._parts(role)
            rounds = parts > 1 and np.max(magnitude, initial=0) > 2 / jnp.finfo(dtype).eps
            if self.largest is None or rounds:
                self._check_bound(role, np.asarray(computed), exact, magnitude, parts)
            else:
                rounded = exact.astype(jnp.dtype(dtype))
                np.testing.assert_array_equal(computed, rounded, err_msg=role)

    def _parts(self, role: str) -> int:
        """Of how many results, each of them rounded, a result may be the sum.

        A call that dilates lhs and has strides is computed by phases of the output, and each of
        those has its own derivative in lhs.
        """
        strides, spread = self.geometry.strides, self.geometry.lhs_dilation
        if role != "lhs" or max(strides, default=1) == 1:
            return 1
        return math.prod(b // math.gcd(b, s) for b, s in zip(spread, strides, strict=True))

    def _check_bound(
        self, role: str, computed: np.ndarray, exact: np.ndarray, magnitude: np.ndarray, parts: int
    ) -> None:
        length = int(np.max(self._compute(role, _ones), initial=0))
        if is_complex(computed.dtype):
            length = 2 * (length + 2)  # see _magnitude
        for part in (np.real, np.imag) if is_complex(computed.dtype) else (np.real,):
            value, dtype = part(computed), str(part(computed).dtype)
            assert_close(value, part(exact), magnitude, dtype=dtype, length=length, parts=parts)

    def _compute(self, role: str, convert) -> np.ndarray:
        arrays = {name: convert(a) for name, a in zip(self.roles, self.arrays(), strict=True)}
        return definition.compute(role, arrays, self.geometry)

    def _drawing(self, role: str) -> tuple:
        arguments = (
            self.seed + ROLES.index(role), self.geometry.shape(role), self.result_dtype(role)
        )  # fmt: skip
        return arguments if self.largest in (None, 3) else (*arguments, self.largest)

    def _draw(self, *arguments) -> np.ndarray:
        return (normal if self.largest is None else integers)(*arguments)

    def _text(self, role: str) -> str:
        name = "normal" if self.largest is None else "integers"
        return f"{name}{self._drawing(role)!r}"


def _widened(array: np.ndarray) -> np.ndarray:
    """Give the same numbers in a dtype in which the definition has them exactly, or modulo 2^64."""
    if is_complex(array.dtype):
        return array.astype(np.complex128)
    return array.astype(np.int64 if jnp.issubdtype(array.dtype, jnp.integer) else np.float64)


def _magnitude(array: np.ndarray) -> np.ndarray:
    """Give what bounds rounding, summed like the array.

    `lax` multiplies (a + bi)(c + di) as k1 = (a + b) c, k2 = a (d - c), k3 = b (c + d), whose
    differences and sums are the parts. With |a| + |b| for a + bi, each of the three sums is at most
    that of the magnitudes, has one rounding more in its factors, and the last sum rounds once more:
    2 (length + 2) roundings in all.
    """
    wide = _widened(array)
    return np.abs(np.real(wide)) + np.abs(np.imag(wide))


def _ones(array: np.ndarray) -> np.ndarray:
    return np.ones(array.shape)
