# SPDX-License-Identifier: Apache-2.0
"""Products of parameters, cases drawn from them, and what a case is compared with.

A product gives as many cases as it says, or with JAXCUDNN_FULL_MATRIX=1 all of them, up to a
thousand; drawn ones are spread, so that every value of every parameter comes as often as others.
tools/run_lax_matrix.py runs any number, or all of them.

JAXCUDNN_MATRIX_OF=jax.lax puts lax's functions in the place of jaxcudnn's, to test the tests.
"""

import importlib
import itertools
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

FUNCTIONS = importlib.import_module(os.environ.get("JAXCUDNN_MATRIX_OF", "jaxcudnn"))
FULL = os.environ.get("JAXCUDNN_FULL_MATRIX", "0") not in ("", "0")
LARGEST = 1000

Values = dict[str, Any]
Axis = Sequence[Values]


@dataclass(frozen=True)
class MatrixCase:
    """One call of one of lax's functions."""

    name: str
    seed: int
    function: str
    lhs_shape: tuple[int, ...]
    rhs_shape: tuple[int, ...]
    dtype: str
    arguments: Values
    mapped: tuple[int | None, int | None] = (None, None)
    """The axes over which both operands are mapped, if it is a case of `vmap`, and their size."""
    mapped_size: int = 0

    def of(self, functions: Any) -> Callable[..., jax.Array]:
        return partial(getattr(functions, self.function), **self.arguments)

    def operands(self) -> list[jax.Array]:
        """lhs and rhs, with the mapped axes."""
        shapes = [list(self.lhs_shape), list(self.rhs_shape)]
        for shape, axis in zip(shapes, self.mapped, strict=True):
            if axis is not None:
                shape.insert(axis, self.mapped_size)
        return [self.draw(i, shape) for i, shape in enumerate(shapes)]

    def arguments_of_derivatives(self) -> list[jax.Array]:
        """lhs, rhs, a cotangent of the result, and tangents of lhs and of rhs."""
        lhs, rhs = self.operands()
        y = jax.eval_shape(self.of(lax), lhs, rhs)
        return [lhs, rhs, *(self.draw(2 + i, a.shape) for i, a in enumerate((y, lhs, rhs)))]

    def draw(self, number: int, shape: Sequence[int]) -> jax.Array:
        """Integers that are small enough for the sums of a case to be exact in its dtype."""
        dtype = jnp.dtype(self.dtype)
        rng = np.random.default_rng([self.seed, number])
        if jnp.issubdtype(dtype, jnp.complexfloating):
            return jnp.asarray(rng.integers(-3, 4, shape) + 1j * rng.integers(-3, 4, shape), dtype)
        if jnp.issubdtype(dtype, jnp.bool_):
            return jnp.asarray(rng.integers(0, 2, shape), dtype)
        if jnp.issubdtype(dtype, jnp.unsignedinteger):
            return jnp.asarray(rng.integers(0, 4, shape), dtype)
        narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
        return jnp.asarray(rng.integers(*((-1, 2) if narrow else (-3, 4)), shape), dtype)

    def x64(self):
        """The setting of JAX under which the case has the dtypes that it names."""
        preferred = self.arguments.get("preferred_element_type") or self.dtype
        sizes = {
            name: jnp.dtype(name).itemsize // (2 if name.startswith("complex") else 1)
            for name in (self.dtype, preferred)
        }
        return jax.enable_x64(True) if 8 in sizes.values() else nullcontext()


@dataclass(frozen=True)
class Matrix:
    """The product of some axes, each a list of values for some of the parameters.

    Shapes are logical, (N, C, *spatial) and (O, I, *spatial), and turned into the order of
    `letters`, or else of `dimension_numbers`.
    """

    name: str
    cases: int
    """How many are run unless all are asked for."""
    function: str
    axes: tuple[Axis, ...]
    valid: Callable[[Values], bool] = lambda values: True

    def draw(self, wanted: float) -> Iterator[MatrixCase]:
        """At most so many cases, one by one, since all of them are too many to be kept."""
        everything = math.prod(map(len, self.axes)) <= wanted
        products = map(_merged, itertools.product(*self.axes))
        drawn = products if everything else self._spread(int(wanted))
        for seed, values in enumerate(filter(self.valid, drawn)):
            yield self._case(seed, values)

    def _spread(self, wanted: int) -> Iterable[Values]:
        """Go through each axis again and again, in another order each time, independently."""
        draw = random.Random(self.name)
        columns = []
        for axis in self.axes:
            rounds = (draw.sample(axis, len(axis)) for _ in range(-(-wanted // len(axis))))
            columns.append(list(itertools.chain.from_iterable(rounds))[:wanted])
        return map(_merged, zip(*columns, strict=True))

    def _case(self, seed: int, values: Values) -> MatrixCase:
        values = dict(values)
        letters = values.pop("letters", values.get("dimension_numbers"))
        lhs, rhs = values.pop("lhs"), values.pop("rhs")
        if letters is not None:
            positions = [letter for letter in letters[1] if letter not in "OI"]
            lhs = _in_order(letters[0], ["N", "C", *positions], lhs)
            rhs = _in_order(letters[1], ["O", "I", *positions], rhs)
        return MatrixCase(
            name=f"{self.name}-{seed}",
            seed=seed,
            function=self.function,
            lhs_shape=lhs,
            rhs_shape=rhs,
            dtype=values.pop("dtype"),
            mapped=values.pop("mapped", (None, None)),
            mapped_size=values.pop("mapped_size", 0),
            arguments=values,
        )


def _merged(parts: Iterable[Values]) -> Values:
    return {name: value for part in parts for name, value in part.items()}


def _in_order(letters: str, logical: Sequence[str], sizes: Sequence[int]) -> tuple[int, ...]:
    lengths = dict(zip(logical, sizes, strict=True))
    return tuple(lengths[letter] for letter in letters)


def parametrize(matrices: Sequence[Matrix], *, keep: Callable[[MatrixCase], bool] | None = None):
    """Run a test for the cases of some matrices."""
    drawn = [
        case
        for matrix in matrices
        for case in matrix.draw(LARGEST if FULL else matrix.cases)
        if keep is None or keep(case)
    ]
    return pytest.mark.parametrize("case", drawn, ids=lambda case: case.name)


def assert_same(computed: jax.Array, expected: jax.Array) -> None:
    def kind(array: jax.Array):
        return array.dtype, array.shape, array.weak_type

    assert kind(computed) == kind(expected)
    np.testing.assert_array_equal(computed, expected)


def derivatives(conv):
    """Of one argument each in both modes, and all of second order, as the gradient of gradients."""

    def gradients(lhs, rhs, ct):
        return jax.vjp(conv, lhs, rhs)[1](ct)

    def run(lhs, rhs, ct, lhs_tangent, rhs_tangent):
        tangents = [
            jax.jvp(lambda lhs: conv(lhs, rhs), [lhs], [lhs_tangent]),
            jax.jvp(lambda rhs: conv(lhs, rhs), [rhs], [rhs_tangent]),
            jax.jvp(gradients, [lhs, rhs, ct], [lhs_tangent, rhs_tangent, ct]),
        ]
        first, pullback = jax.vjp(gradients, lhs, rhs, ct)
        return tangents, first, pullback((lhs_tangent, rhs_tangent))

    return jax.jit(run)


def stack(case: MatrixCase, operands: Sequence[jax.Array]) -> jax.Array:
    """What `vmap` of lax's function has to give, one after the other."""
    one = jax.jit(case.of(lax))
    if case.mapped_size == 0:
        shapes = case.lhs_shape, case.rhs_shape
        out = jax.eval_shape(one, *(jax.ShapeDtypeStruct(shape, case.dtype) for shape in shapes))
        return jnp.zeros((0, *out.shape), out.dtype)

    def row(i: int) -> jax.Array:
        return one(*(
            a if axis is None else lax.index_in_dim(a, i, axis, keepdims=False)
            for a, axis in zip(operands, case.mapped, strict=True)
        ))  # fmt: skip

    return jnp.stack([row(i) for i in range(case.mapped_size)])
