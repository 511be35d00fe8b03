# SPDX-License-Identifier: Apache-2.0
"""The modules of `flax.linen`."""

import inspect
from typing import Any

import jax
from flax import linen as nn

from .. import _modules
from .._modules import Activation, Convolution, View, with_names
from . import _filters


class Conv(nn.Conv):
    """`flax.linen.Conv` by cuDNN, and an activation.

    Attributes:
        activation: see `jaxcudnn.flax`.
        filter_layout: see `jaxcudnn.flax`.

    The others are those of `flax.linen.Conv`. With a `conv_general_dilated_cls` the activation is
    applied to what its functions give.

    Raises:
        ValueError: for an unknown activation or layout, and as `flax.linen.Conv`.
        TypeError: for an activation that is neither a name nor callable.

    Example:
        >>> import jax
        >>> from jaxcudnn.flax.linen import Conv
        >>> conv = Conv(16, (3, 3), activation="relu", filter_layout="OHWI")
        >>> x = jax.numpy.ones((8, 32, 32, 3))
        >>> y, variables = conv.init_with_output(jax.random.key(0), x)
        >>> y.shape, variables["params"]["kernel"].shape
        ((8, 32, 32, 16), (16, 3, 3, 3))
    """

    activation: Activation = None
    filter_layout: str = "HWIO"

    def __post_init__(self) -> None:
        """Check the attributes that are ours."""
        _modules.check_activation("flax.linen.Conv", self.activation)
        _filters.check_layout("flax.linen.Conv", self.filter_layout, _filters.CONV)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Compute what `flax.linen.Conv` does, and the activation."""
        make, function = self.conv_general_dilated_cls, self.conv_general_dilated
        convolution = Convolution(
            self.activation,
            biased=self.use_bias,
            numbers=_filters.dimension_numbers(self.filter_layout, _num_spatial(self)),
            function=function if make is None else make(),
        )
        stock = inspect.unwrap(nn.Conv.__call__)
        view = _view(self, conv_general_dilated_cls=lambda: convolution.conv_general_dilated)
        return convolution.finish(stock(view, inputs))


class ConvTranspose(nn.ConvTranspose):
    """`flax.linen.ConvTranspose` by cuDNN, and an activation.

    Attributes:
        activation: see `jaxcudnn.flax`.
        filter_layout: see `jaxcudnn.flax`.

    The others are those of `flax.linen.ConvTranspose`.

    Raises:
        ValueError: for an unknown activation or layout, and as `flax.linen.ConvTranspose`.
        TypeError: for an activation that is neither a name nor callable.
    """

    activation: Activation = None
    filter_layout: str = "HWIO"

    def __post_init__(self) -> None:
        """Check the attributes that are ours."""
        _modules.check_activation("flax.linen.ConvTranspose", self.activation)
        _filters.check_layout(
            "flax.linen.ConvTranspose", self.filter_layout, _filters.CONV_TRANSPOSE
        )
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Compute what `flax.linen.ConvTranspose` does, and the activation."""
        convolution = Convolution(
            self.activation,
            biased=self.use_bias,
            joins=self.padding != "CIRCULAR",  # which wraps the output before the bias comes
            numbers=_filters.dimension_numbers(self.filter_layout, _num_spatial(self)),
        )
        stock = with_names(nn.ConvTranspose.__call__, lax=convolution.lax())
        return convolution.finish(stock(_view(self), inputs))


def _num_spatial(module: Conv | ConvTranspose) -> int:
    size = module.kernel_size
    return 1 if isinstance(size, int) else len(size)


def _view(module: Conv | ConvTranspose, **replaced: Any) -> View:
    """Give the module as stock code is to see it, which knows of no other order of the kernel.

    It compares the mask with a kernel of Flax's order, so that here the mask is applied later.
    """
    mask, promote_dtype = module.mask, module.promote_dtype

    def masked(inputs: Any, kernel: Any, bias: Any, **keywords: Any) -> Any:
        if mask is None:
            return promote_dtype(inputs, kernel, bias, **keywords)
        if mask.shape != kernel.shape:
            raise ValueError(
                "Mask needs to have the same shape as weights. "
                f"Shapes are: {mask.shape}, {kernel.shape}"
            )
        return promote_dtype(inputs, kernel * mask, bias, **keywords)

    if module.filter_layout == "HWIO":
        return View(module, **replaced)
    kernel_init = _filters.initializer(module.kernel_init, module.filter_layout)
    return View(module, kernel_init=kernel_init, promote_dtype=masked, mask=None, **replaced)
