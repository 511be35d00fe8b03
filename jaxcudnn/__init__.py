# SPDX-License-Identifier: Apache-2.0
"""Convolutions for JAX, computed by cuDNN."""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

from . import store as store
from ._api import conv_general_dilated as conv_general_dilated
from ._bias_act import conv_bias_act as conv_bias_act
from ._bias_act import conv_transpose_bias_act as conv_transpose_bias_act
from ._cache import CacheInfo as CacheInfo
from ._cache import cache_info as cache_info
from ._cache import clear_cache as clear_cache
from ._convolution import convolution as convolution
from ._cudnn_api import conv_dgrad as conv_dgrad
from ._cudnn_api import conv_fprop as conv_fprop
from ._cudnn_api import conv_wgrad as conv_wgrad
from ._explain import explain as explain
from ._export import export_checks as export_checks
from ._install import install as install
from ._install import installed as installed
from ._install import uninstall as uninstall
from ._installation import LaxConvolution as LaxConvolution
from ._options import Options as Options
from ._options import TuningBudget as TuningBudget
from ._options import options as options
from ._plan_table import plans as plans
from ._spec import ConvSpec as ConvSpec
from ._tune import tune as tune
from ._variants import conv as conv
from ._variants import conv_transpose as conv_transpose
from ._variants import conv_with_general_padding as conv_with_general_padding

try:
    __version__ = _version("jaxcudnn")
except _PackageNotFoundError:  # imported from a source tree that is not installed
    __version__ = "0+unknown"
