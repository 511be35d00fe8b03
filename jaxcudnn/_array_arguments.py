# SPDX-License-Identifier: Apache-2.0
"""Reading what users say of arrays: the operands, and the dtype and sharding of the result."""

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import canonicalize_dtype
from jax.sharding import AxisType, NamedSharding, get_abstract_mesh

from ._arguments import Caller
from ._spec import Role

RESULT_KINDS = (
    (jnp.bool_, (jnp.bool_, jnp.number)),
    (jnp.signedinteger, (jnp.signedinteger, jnp.floating)),
    (jnp.unsignedinteger, (jnp.integer, jnp.floating)),
    (jnp.floating, (jnp.floating,)),
    (jnp.complexfloating, (jnp.complexfloating,)),
)
"""Kinds of operands, each with the kinds that a result of theirs may be asked for in."""


def check_is_array(caller: Caller, name: str, value: object) -> None:
    """Check that `lax` would take the value for an array, which leaves out lists and numbers."""
    if isinstance(value, jax.ShapeDtypeStruct):
        raise TypeError(
            f"{caller}: {name} must be a JAX or NumPy array, got a ShapeDtypeStruct; give that to "
            f"jax.eval_shape"
        )
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError(
            f"{caller}: {name} must have a number everywhere, got a MaskedArray; fill it with "
            f"filled()"
        )
    is_array, dtype = hasattr(value, "shape"), getattr(value, "dtype", None)
    if dtype is not None and not any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, bool)):
        raise TypeError(
            f"{caller}: {name} must hold numbers or truth values, got dtype "
            f"{dtype}; convert it with astype"
        )
    if (is_array and dtype is not None) or hasattr(value, "__jax_array__"):
        return
    raise TypeError(
        f"{caller}: {name} must be a JAX or NumPy array, got {type(value).__name__}; convert it "
        f"with jax.numpy.asarray"
    )


def check_operands(caller: Caller, operands: Mapping[Role, Any]) -> tuple[int, str]:
    """Check two arrays against each other; return the spatial dimensions' number and the dtype."""
    first, second = operands.values()
    both = " and ".join(getattr(caller, role) for role in operands)
    shapes, rank = f"shapes {first.shape} and {second.shape}", first.ndim
    if rank != second.ndim:
        raise ValueError(
            f"{caller}: {both} must have the same rank, got {shapes}; reshape one of them"
        )
    if rank < 2:
        raise ValueError(
            f"{caller}: {both} must have two dimensions beside the spatial ones, got {shapes}; "
            f"give images their batch and channels, filters their output and input channels"
        )
    if first.dtype != second.dtype:
        raise TypeError(
            f"{caller}: {both} must have the same dtype, got {first.dtype} and {second.dtype}; "
            f"cast one of them"
        )
    return rank - 2, str(first.dtype)


def is_explicitly_sharded(array: jax.Array) -> bool:
    """Say whether an array's type names mesh axes over which it is sharded."""
    return any(jax.typeof(array).sharding.spec.partitions)


def check_out_sharding(caller: Caller, out_sharding: Any) -> None:
    """Check a sharding of the result for what `lax` takes."""
    if out_sharding is None or isinstance(out_sharding, NamedSharding):
        return
    if not isinstance(out_sharding, jax.P):
        raise TypeError(
            f"{caller}: out_sharding must be None, a NamedSharding or a PartitionSpec, got "
            f"{out_sharding!r}; leave it out without explicit sharding"
        )
    if get_abstract_mesh().empty:
        raise ValueError(
            f"{caller}: out_sharding must be a NamedSharding where no mesh is set, got "
            f"{out_sharding!r}; use jax.set_mesh or leave it out"
        )


def is_explicit(out_sharding: NamedSharding | jax.P) -> bool:
    """Say whether a sharding of the result is over a mesh whose axes are all explicit."""
    named = isinstance(out_sharding, NamedSharding)
    types = (out_sharding.mesh if named else get_abstract_mesh()).axis_types
    return all(each == AxisType.Explicit for each in types)


def parse_result_dtype(caller: Caller, dtype: str, preferred: Any) -> str:
    """Read `preferred_element_type`, which may widen the dtype of the operands and not change it.

    Integers may also become floating-point numbers, and unsigned ones signed; truth values
    anything.
    """
    if preferred is None:
        return dtype
    try:
        wanted = canonicalize_dtype(preferred)
    except TypeError as error:
        raise TypeError(
            f"{caller}: preferred_element_type must be a dtype, got {preferred!r}; leave it out "
            f"for the operands' own"
        ) from error
    # Python's own types mean whatever JAX has for them.
    by_name = not any(preferred is kind for kind in (bool, int, float, complex))
    if by_name and jnp.dtype(preferred) != wanted:
        warnings.warn(
            f"{caller}: preferred_element_type {jnp.dtype(preferred)} is not available and becomes "
            f"{wanted}; set jax_enable_x64 for it",
            stacklevel=5,
        )
    allowed = next(kinds for kind, kinds in RESULT_KINDS if jnp.issubdtype(dtype, kind))
    narrower = wanted.itemsize < jnp.dtype(dtype).itemsize
    if narrower or not any(jnp.issubdtype(wanted, kind) for kind in allowed):
        raise TypeError(
            f"{caller}: preferred_element_type must be of the kind of the operands' dtype, or "
            f"floating-point for integers, and not narrower, got {wanted} for {dtype}; convert "
            f"the result instead"
        )
    return wanted.name
