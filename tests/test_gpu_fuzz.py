# SPDX-License-Identifier: Apache-2.0
"""Random convolutions on the GPU with small integers, compared with == to the definition.

JAXCUDNN_FUZZ=START:STOP runs others than the first hundred. A failure prints the case as one that
can be pasted into cases.py.
"""

import os

import jax
import numpy as np
import pytest
from jax import lax

import cases
import jaxcudnn
import oracle
from cases import OPERANDS, Case, case, integers
from test_readings import draw_call

pytestmark = pytest.mark.gpu

SEEDS = range(*map(int, os.environ.get("JAXCUDNN_FUZZ", "0:100").split(":")))


def draw_case(seed: int) -> tuple[Case, str]:
    rng = np.random.default_rng(seed)

    def numbers(low: int, high: int) -> tuple[int, ...]:
        return tuple(int(number) for number in rng.integers(low, high + 1, rank))

    rank = int(rng.integers(1, 4))
    groups = int(rng.choice([1, 1, 2, 4, 8]))
    inputs, outputs = (int(size) for size in rng.choice([1, 2, 3, 4, 8, 16, 17, 32], 2))
    layouts = [cases.CHANNELS_LAST[rank], cases.CHANNELS_LAST[rank], cases.CHANNELS_FIRST[rank]]
    window, dilation = numbers(1, 4), numbers(1, 3)
    low, high = numbers(0, 4), numbers(0, 4)
    extents = [(r - 1) * d + 1 for r, d in zip(window, dilation, strict=True)]
    drawn = case(
        f"fuzz-{seed}",
        tuple(max(size, extent) for size, extent in zip(numbers(3, 9), extents, strict=True)),
        window,
        tuple(zip(low, high, strict=True)),
        n=int(rng.integers(1, 5)),
        c=inputs * groups,
        k=outputs * groups,
        strides=numbers(1, 3),
        dilation=dilation,
        groups=groups,
        dimension_numbers=layouts[int(rng.integers(3))],
    )
    return drawn, str(rng.choice(cases.DTYPES))


@pytest.mark.parametrize("seed", SEEDS)
def test_every_role(seed: int):
    drawn, dtype = draw_case(seed)
    arrays = {role: integers(i, drawn.shape(role), dtype) for i, role in enumerate("xwy")}

    @jax.jit
    def run(arrays):
        return {
            role: drawn.cudnn(role)(*(arrays[name] for name in OPERANDS[role])) for role in OPERANDS
        }

    for role, computed in run(arrays).items():
        exact, _ = oracle.compute(role, *(arrays[name] for name in OPERANDS[role]), case=drawn)
        np.testing.assert_array_equal(
            computed, exact.astype(dtype), err_msg=f"{role} in {dtype} of {drawn}"
        )


@pytest.mark.parametrize("seed", range(2000, 2060))
def test_calls_of_lax(seed: int):
    """Both dilations, both kinds of groups, any padding: against `lax` on the CPU, in float32."""
    lhs, rhs, arguments = draw_call(seed)
    on_cpu = jax.device_put((lhs, rhs), jax.devices("cpu")[0])
    expected = lax.conv_general_dilated(*on_cpu, **arguments)
    computed = jax.jit(lambda x, w: jaxcudnn.conv_general_dilated(x, w, **arguments))(lhs, rhs)
    np.testing.assert_array_equal(computed, expected)
