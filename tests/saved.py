# SPDX-License-Identifier: Apache-2.0
"""Programs that earlier versions saved, and how: `python tests/saved.py FILE` saves one more.

Use the oldest JAX that is supported, since a newer one reads what an older one wrote.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from jax import export

import jaxcudnn
from jaxcudnn import _load

NHWC = ("NHWC", "OHWI", "NHWC")
SAVED = sorted((Path(__file__).parent / "data").glob("saved_by_schema_*.bin"))
"""One for each schema of the custom call's attributes."""


def program(x, w, bias):
    """Every operation, and one fused with an epilogue."""

    def conv(x, w):
        return jaxcudnn.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)

    z = jaxcudnn.conv_bias_act(
        x, w, bias, activation="relu", padding="SAME", dimension_numbers=NHWC
    )
    y, pullback = jax.vjp(conv, x, w)
    return z, y, *pullback(y)


def operands() -> tuple[np.ndarray, ...]:
    """Small integers, so that every order of summation gives the same."""
    rng = np.random.default_rng(0)
    shapes = (2, 8, 8, 16), (16, 3, 3, 16), (16,)
    return tuple(rng.integers(-2, 3, shape).astype(np.float32) for shape in shapes)


def save() -> bytearray:
    """The program for any number of images, which the first schema did not know."""
    checks = [export.DisabledSafetyCheck.custom_call(_load.TARGET)]
    exported = export.export(jax.jit(program), platforms=("cpu", "cuda"), disabled_checks=checks)
    x, *others = operands()
    images = jax.ShapeDtypeStruct(export.symbolic_shape("b, 8, 8, 16"), x.dtype)
    return exported(images, *others).serialize()


if __name__ == "__main__":
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")  # no folders of ours
    Path(sys.argv[1]).write_bytes(save())
