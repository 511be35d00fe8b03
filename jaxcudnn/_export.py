# SPDX-License-Identifier: Apache-2.0
"""What `jax.export` has to be told to save programs with convolutions for CUDA."""

from jax import export

from . import _load


def export_checks() -> list[export.DisabledSafetyCheck]:
    """Give the one safety check of `jax.export` that a program for CUDA needs disabled.

    `jax.export` saves only custom calls whose meaning JAX itself promises to keep. That of this
    package's is kept by this package: a program is read by the version that saved it and by all
    newer ones.

    Returns:
        A list for the argument `disabled_checks` of `jax.export.export`, to which others may be
        added. Programs for other platforms need none.

    Example:
        >>> import jax, jaxcudnn
        >>> x, w = jax.ShapeDtypeStruct((8, 3, 32, 32), "float32"), jax.numpy.ones((16, 3, 3, 3))
        >>> conv = jax.jit(lambda x: jaxcudnn.conv(x, w, (1, 1), "SAME"))
        >>> checks = jaxcudnn.export_checks()
        >>> exported = jax.export.export(conv, platforms=("cpu",), disabled_checks=checks)(x)
        >>> len(exported.serialize()) > 0
        True
    """
    return [export.DisabledSafetyCheck.custom_call(_load.TARGET)]
