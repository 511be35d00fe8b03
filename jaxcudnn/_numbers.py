# SPDX-License-Identifier: Apache-2.0
"""Convolutions of numbers that are not real: complex ones, and truth values.

With x = a + ib and w = c + id, and * for any of the three operations, which are bilinear, three
real convolutions give a complex one (the trick is Gauss's for products):

    k1 = (a + b) * c      k2 = a * (d - c)      k3 = b * (c + d)

    x * w = (k1 - k3) + i (k1 + k2)

Truth values are counted as integers, and their sum is true unless it is 0.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import _primitives
from ._dtypes import Dtypes, is_complex
from ._spec import ConvSpec, Layout, Role


def compute(arrays: Mapping[Role, jax.Array], *, spec: ConvSpec, layout: Layout) -> jax.Array:
    """Compute the one role of x, w and y that `arrays` leaves out, of whatever dtypes."""
    (result,) = {"x", "w", "y"} - set(arrays)
    if any(spec.dtype(role) == "bool" for role in arrays):
        return _bool(arrays, result, spec, layout)
    if is_complex(spec.dtype(result)):
        return _complex(arrays, result, spec, layout)
    return _primitives.compute(arrays, spec=spec, layout=layout)


def _complex(
    arrays: Mapping[Role, jax.Array], result: Role, spec: ConvSpec, layout: Layout
) -> jax.Array:
    dtype = spec.dtype(result)
    part = jnp.finfo(max(spec.dtypes, key=lambda name: jnp.dtype(name).itemsize)).dtype
    real_spec = replace(spec, dtypes=Dtypes(part.name, part.name, part.name))
    (first, x), (second, w) = arrays.items()

    def convolve(u: jax.Array, v: jax.Array) -> jax.Array:
        return _primitives.compute({first: u, second: v}, spec=real_spec, layout=layout)

    a, b, c, d = (
        _converted(component, part)
        for operand in (x, w)
        for component in (lax.real(operand), lax.imag(operand))
    )
    k1, k2, k3 = convolve(a + b, c), convolve(a, d - c), convolve(b, c + d)
    return _converted(lax.complex(k1 - k3, k1 + k2), dtype)


def _converted(array: jax.Array, dtype: Any) -> jax.Array:
    """Convert an array; one that has the dtype keeps its weak type, if it has one."""
    return array if array.dtype == dtype else lax.convert_element_type(array, dtype)


def _bool(
    arrays: Mapping[Role, jax.Array], result: Role, spec: ConvSpec, layout: Layout
) -> jax.Array:
    dtype = spec.dtype(result)
    if dtype == "bool":
        counted = "int32"
    elif is_complex(dtype):
        counted = jnp.finfo(dtype).dtype.name
    else:
        counted = dtype
    dtypes = Dtypes("int8", "int8", "int8")._replace(**{result: counted})
    count = _primitives.compute(
        {role: lax.convert_element_type(array, "int8") for role, array in arrays.items()},
        spec=replace(spec, dtypes=dtypes),
        layout=layout,
    )
    return count != 0 if dtype == "bool" else lax.convert_element_type(count, dtype)
