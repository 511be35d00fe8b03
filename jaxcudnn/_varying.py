# SPDX-License-Identifier: Apache-2.0
"""Over which mesh axes arrays vary inside `jax.shard_map`: operands of a primitive must agree."""

import jax
from jax import lax


def vary_as(array: jax.Array, *operands: jax.Array) -> jax.Array:
    """Make an array vary over the mesh axes over which a function of the operands would."""
    return cast_varying(array, frozenset().union(*map(varying, operands)))


def varying(array: jax.Array) -> frozenset[str]:
    """Give the mesh axes over which an array varies."""
    return jax.typeof(array).manual_axis_type.varying


def equally_varying(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Make arrays inside `jax.shard_map` vary over the same mesh axes.

    The cast's transpose is the sum over devices that the gradient of a replicated operand needs.
    """
    union = frozenset().union(*map(varying, arrays))
    return tuple(cast_varying(array, union) for array in arrays)


def cast_varying(array: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Make an array vary over these mesh axes, too."""
    missing = tuple(sorted(axes - varying(array)))
    return lax.pcast(array, missing, to="varying") if missing else array
