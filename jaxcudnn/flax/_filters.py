# SPDX-License-Identifier: Apache-2.0
"""The orders in which a kernel may be stored, and what Flax's modules need to have it in one."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

CONV = ("HWIO", "OHWI")
CONV_TRANSPOSE = (*CONV, "IHWO")


def check_layout(module: str, layout: Any, known: tuple[str, ...]) -> str:
    """Check a `filter_layout` argument.

    Raises:
        ValueError: if it is not one of the known ones.
    """
    if layout not in known:
        raise ValueError(
            f"jaxcudnn.{module}: filter_layout must be one of {', '.join(known)}, got {layout!r}; "
            f"leave it out for Flax's own, HWIO"
        )
    return layout


def convert_filters(tree: Any, source: str, target: str) -> Any:
    """Reorder stored kernels, so that a checkpoint of one `filter_layout` is one of another.

    Args:
        tree: an array, or a tree of parameters of convolutions. Every array of three or more
            dimensions is taken for a kernel, whatever its name; others, such as biases and the
            kernels of dense layers, are left alone. Leave out what has other arrays of as many.
        source: the `filter_layout` of the tree: 'HWIO' for parameters of Flax's own modules.
        target: the `filter_layout` wanted.

    Returns:
        The tree with its kernels reordered.

    Raises:
        ValueError: for an unknown layout.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxcudnn.flax import convert_filters
        >>> params = {"kernel": jnp.ones((3, 5, 8, 16)), "bias": jnp.ones(16)}
        >>> ours = convert_filters(params, "HWIO", "OHWI")
        >>> ours["kernel"].shape, convert_filters(ours, "OHWI", "HWIO")["kernel"].shape
        ((16, 3, 5, 8), (3, 5, 8, 16))
    """
    for layout in (source, target):
        check_layout("flax.convert_filters", layout, CONV_TRANSPOSE)

    def convert(array: Any) -> Any:
        ndim = jnp.ndim(array)
        if ndim < 3:
            return array
        found, wanted = axes(source, ndim), axes(target, ndim)
        order = dict(zip(wanted, found, strict=True))
        return jnp.transpose(array, [order[axis] for axis in range(ndim)])

    return jax.tree.map(convert, tree)


def axes(layout: str, ndim: int) -> tuple[int, ...]:
    """Say which axes of a kernel are O, I and spatial."""
    outputs, inputs = (
        0 if layout[0] == letter else ndim - 1 if layout[-1] == letter else ndim - 2
        for letter in "OI"
    )
    return (outputs, inputs, *(a for a in range(ndim) if a not in (outputs, inputs)))


def dimension_numbers(layout: str, num_spatial: int) -> lax.ConvDimensionNumbers | None:
    """Give those of channels last and the layout; None for Flax's own."""
    if layout == "HWIO":
        return None
    ndim = num_spatial + 2
    images = (0, ndim - 1, *range(1, ndim - 1))
    return lax.ConvDimensionNumbers(images, axes(layout, ndim), images)


def initializer(stock: Callable[..., Any], layout: str) -> Callable[..., Any]:
    """Draw what `stock` draws for Flax's own layout, and reorder it, below whatever it is in."""
    if layout == "HWIO":
        return stock

    def reordered(*arguments: Any, **keywords: Any) -> Any:
        drawn = stock(*arguments, **keywords)
        if isinstance(drawn, nnx.VariableMetadata):
            value = convert_filters(drawn.raw_value, "HWIO", layout)
            return dataclasses.replace(drawn, raw_value=value)
        return convert_filters(drawn, "HWIO", layout)

    return reordered
