# SPDX-License-Identifier: Apache-2.0
"""Flax's convolutions, computed by cuDNN on CUDA devices, with an activation if one is asked for.

`jaxcudnn.flax.Conv` and `ConvTranspose` are those of `flax.nnx`; `jaxcudnn.flax.linen` has those of
`flax.linen`. Each takes the arguments of its namesake, has the same parameters, and takes two
arguments more:

    activation: what is applied to the output, bias included: None; 'relu', 'relu6', 'leaky_relu',
        'gelu' (exact), 'gelu_tanh', 'silu', 'elu', 'softplus', 'tanh' or 'sigmoid', computed
        together with convolution and bias by `jaxcudnn.conv_bias_act`; or any function or module.
    filter_layout: the order in which the kernel is stored. 'HWIO', the default, is Flax's own:
        (*window, in_features / feature_group_count, out_features). 'OHWI' has the last dimension
        first, which is how cuDNN reads the filter of a convolution, and of a transposed one with
        `transpose_kernel=True`; 'IHWO', of ConvTranspose alone, how it reads the filter of one
        without: so nothing has to be transposed. Initial values are the same but for their order.
        A mask has the shape of the stored kernel, and axes in metadata are its axes.
"""

from .. import _modules

_modules.require("flax", "flax", "flax")

from . import linen as linen  # noqa: E402
from ._filters import convert_filters as convert_filters  # noqa: E402
from ._nnx import Conv as Conv  # noqa: E402
from ._nnx import ConvTranspose as ConvTranspose  # noqa: E402
