# SPDX-License-Identifier: Apache-2.0
"""The function that a command is about, and the arguments that it is traced with."""

import argparse
import importlib
import inspect
import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp

from ._words import short_dtype

_DTYPES = {
    short_dtype(name): name
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64", "complex64",
        "complex128",
    )
}  # fmt: skip
_ARRAY = re.compile(r"\s*(\w+)\[([\d,\s]*)\]\s*")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments from which `load` reads a function."""
    parser.add_argument(
        "target",
        metavar="module:function",
        help="a function to be traced with arrays of --shapes; without --shapes, one that takes "
        "no arguments and returns (function, arguments), the second a tuple",
    )
    parser.add_argument(
        "--shapes",
        help="dtypes and shapes of the arguments, as JAX prints them: 'f32[8,32,32,16],f32[16,3]'",
    )


def load(args: argparse.Namespace) -> tuple[Callable[..., Any], tuple]:
    """Give the function and its arguments.

    Raises:
        ValueError: if there is no such function, or it cannot be traced with such arguments.
    """
    function = _find(args.target)
    if args.shapes is not None:
        return function, parse_shapes(args.shapes)
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(
            f"jaxcudnn: {args.target} must take no arguments where --shapes is not given, got one "
            f"for which {error}; add --shapes 'f32[8,32,32,16],...'"
        ) from error
    made = function()
    if not (
        isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and _is_tuple(made[1])
    ):
        raise ValueError(
            f"jaxcudnn: {args.target} must return (function, arguments) where --shapes is not "
            f"given, got {type(made).__name__}; return the function to trace and a tuple"
        )
    return made[0], tuple(made[1])


def parse_shapes(text: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Read dtypes and shapes as JAX prints them.

    Raises:
        ValueError: if they are written otherwise.
    """
    found, position = [], 0
    while position < len(text) or not found:
        match = _ARRAY.match(text, position)
        dtype = match and _dtype(match[1])
        if not (match and dtype) or text[match.end() : match.end() + 1] not in ("", ","):
            raise ValueError(
                f"jaxcudnn: --shapes must be like 'f32[8,32,32,16],bf16[16]', got "
                f"{text[position:]!r} at character {position + 1}; dtypes are "
                f"{', '.join(_DTYPES)}, or their full names"
            )
        sizes = [int(size) for size in match[2].split(",") if size.strip()]
        found.append(jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype)))
        position = match.end() + 1
    return tuple(found)


def _dtype(name: str) -> str | None:
    return _DTYPES.get(name, name if name in _DTYPES.values() else None)


def _is_tuple(value: Any) -> bool:
    return isinstance(value, (tuple, list))


def _find(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    if not (module and name):
        raise ValueError(
            f"jaxcudnn: what to trace must be module:function, got {target!r}; write "
            f"train:make_step for the function make_step of train.py in this folder"
        )
    try:
        function = attrgetter(name)(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # something that the module itself imports
        raise ValueError(
            f"jaxcudnn: there must be a module {module}, got none; run the command in the folder "
            f"that has {module.replace('.', '/')}.py, or install it"
        ) from error
    except AttributeError as error:
        raise ValueError(
            f"jaxcudnn: {module} must have {name}, got {error}; check the name"
        ) from error
    if not callable(function):
        raise ValueError(
            f"jaxcudnn: {target} must be a function, got {type(function).__name__}; name one that "
            f"can be called"
        )
    return function
