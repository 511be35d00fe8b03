# SPDX-License-Identifier: Apache-2.0
"""Whether a result promotes as a Python number does, which it does where `lax`'s does."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcudnn

# Shapes of lhs and rhs, and arguments: one call at least for each way in which one is computed.
CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "forward": ((2, 4, 7), (4, 4, 3), {"window_strides": (2,)}),
    "grouped": ((2, 4, 7), (4, 2, 3), {"feature_group_count": 2}),
    "grouped by batch": ((2, 4, 7), (4, 4, 3), {"batch_group_count": 2}),
    "cropped": ((2, 4, 7), (4, 4, 3), {"padding": [(-1, -2)]}),
    "transposed": ((2, 4, 7), (4, 4, 3), {"lhs_dilation": (2,)}),
    "transposed, with more rows": (
        (2, 4, 7), (4, 4, 3), {"lhs_dilation": (2,), "padding": [(3, 4)]}
    ),
    "gradient in lhs": ((4, 2, 1999), (4, 2, 1998), {"padding": [(0, 0)]}),
    "gradient in rhs": ((4, 2, 1000), (4, 2, 1997), {"lhs_dilation": (2,), "padding": [(0, 0)]}),
    "by phases": (
        (2, 4, 7), (4, 4, 3), {"window_strides": (2,), "lhs_dilation": (3,), "rhs_dilation": (2,)}
    ),
    "by phases, one without taps": (
        (2, 4, 5), (4, 4, 2), {"window_strides": (2,), "lhs_dilation": (2,), "rhs_dilation": (2,)}
    ),
    "empty": ((0, 4, 7), (4, 4, 3), {}),
    "no channels": ((2, 0, 7), (4, 0, 3), {}),
    "no spatial dimension": ((2, 4), (4, 4), {"window_strides": (), "padding": ()}),
    "four spatial dimensions": (
        (2, 4, 2, 2, 2, 2), (4, 4, 1, 1, 1, 1), {"window_strides": (1,) * 4, "padding": "VALID"}
    ),
}  # fmt: skip
VALUES = {"float": 1.0, "integer": 1, "complex": 1j}
every_call = pytest.mark.parametrize("name", CALLS)


def operands(name: str, value: Any, weak: tuple[bool, ...]) -> list[jax.Array]:
    arrays = [jnp.full(shape, value) for shape in CALLS[name][:2]]
    return [
        a if w else lax.convert_element_type(a, a.dtype) for a, w in zip(arrays, weak, strict=True)
    ]


def conv(functions: Any, name: str, **changes: Any):
    arguments = {"window_strides": (1,), "padding": [(1, 1)]} | CALLS[name][2] | changes
    return partial(functions.conv_general_dilated, **arguments)


def kinds(function, *arrays: jax.Array):
    return [(a.dtype, a.weak_type) for a in jax.tree.leaves(jax.eval_shape(function, *arrays))]


def of_both(transform, name: str, *arrays: jax.Array, **changes: Any):
    ours, theirs = (
        kinds(transform(conv(functions, name, **changes)), *arrays) for functions in (jaxcudnn, lax)
    )
    return ours, theirs


@every_call
@pytest.mark.parametrize("value", VALUES)
def test_results(name: str, value: str):
    preferred = [None, "float32"] if value == "integer" else [None]
    for weak, to in itertools.product(itertools.product([True, False], repeat=2), preferred):
        arrays = operands(name, VALUES[value], weak)
        ours, theirs = of_both(lambda f: f, name, *arrays, preferred_element_type=to)
        assert ours == theirs
        assert ours[0][1] == all(weak)


def derivatives(conv, ct: Any):
    def run(lhs, rhs):
        y, pullback = jax.vjp(conv, lhs, rhs)
        return pullback(lax.full(y.shape, ct)), jax.jvp(conv, (lhs, rhs), (lhs, rhs))

    return run


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("by phases")])
def test_derivatives(name: str):
    """Where JAX's own transposes allow it.

    Those of `lax.real` and of a slice with a stride, by which phases get their taps, give what is
    not weakly typed.
    """
    arrays = operands(name, 1.0, (True, True))
    ours, theirs = of_both(partial(derivatives, ct=1.0), name, *arrays)
    assert ours == theirs


@pytest.mark.parametrize("name", ["forward", "cropped", "transposed, with more rows"])
def test_derivatives_where_the_cotangent_is_not_weakly_typed(name: str):
    arrays = operands(name, 1.0, (True, True))
    ours, theirs = of_both(partial(derivatives, ct=np.float32(1)), name, *arrays)
    assert ours == theirs
    assert [weak for _, weak in ours] == [False, False, True, True]


@every_call
def test_vmap(name: str):
    lhs, rhs = operands(name, 1.0, (True, True))
    lhs = jnp.full((3, *lhs.shape), 1.0)
    ours, theirs = of_both(lambda conv: jax.vmap(conv, (0, None)), name, lhs, rhs)
    assert ours == theirs
