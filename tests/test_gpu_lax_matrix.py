# SPDX-License-Identifier: Apache-2.0
"""JAX's own tests of its convolutions on the GPU, against what `lax` computes on the CPU.

As JAX's, without integers: XLA has no convolutions of them for GPUs.
"""

from collections.abc import Callable, Sequence

import jax
import pytest
from jax import lax

from lax_case import FUNCTIONS, MatrixCase, assert_same, derivatives, parametrize, stack
from lax_matrix import GRADIENTS, INEXACT, VALUES, VMAP

pytestmark = pytest.mark.gpu


def on_cpu(function: Callable, arrays: Sequence[jax.Array]):
    return function(*jax.device_put(arrays, jax.devices("cpu")[0]))


@parametrize(VALUES, keep=lambda case: case.dtype in INEXACT)
def test_values(case: MatrixCase):
    with case.x64():
        operands = case.operands()
        expected = on_cpu(jax.jit(case.of(lax)), operands)
        assert_same(jax.jit(case.of(FUNCTIONS))(*operands), expected)


@parametrize(GRADIENTS, keep=lambda case: case.seed % 3 == 0)
def test_derivatives(case: MatrixCase):
    with case.x64():
        arguments = case.arguments_of_derivatives()
        expected = on_cpu(derivatives(case.of(lax)), arguments)
        jax.tree.map(assert_same, derivatives(case.of(FUNCTIONS))(*arguments), expected)


@parametrize(VMAP)
def test_vmap(case: MatrixCase):
    operands = case.operands()
    mapped = jax.jit(jax.vmap(case.of(FUNCTIONS), case.mapped))
    assert_same(mapped(*operands), on_cpu(lambda *rows: stack(case, rows), operands))
