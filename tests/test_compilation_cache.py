# SPDX-License-Identifier: Apache-2.0
"""JAX's persistent compilation cache: equal programs have one entry, other convolutions another.

Programs are compiled for an H200 that need not be there, which is enough to write entries; to read
them takes one (test_gpu_processes.py).
"""

import os
from pathlib import Path

import aot
from processes import PACKAGE, run_python

COMPILE = """
    import jax
    jax.config.update("jax_compilation_cache_dir", {folder!r})
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    import aot, jaxcudnn
    from jaxcudnn import _load
    _load.local_device = lambda: None
    x, w = aot.shaped((2, 9, 8, 16)), aot.shaped((8, 3, 3, 16))

    def compile(conv):
        aot.compile(conv, x, w)

    for padding in {paddings}:
        def conv(x, w):
            return jaxcudnn.conv_general_dilated(
                x, w, (1, 1), padding, dimension_numbers=("NHWC", "OHWI", "NHWC")
            )
        compile(conv)
"""


def entries(folder: Path, *paddings) -> set[str]:
    """The names of the cache's entries after a process has compiled convolutions."""
    run_python(
        COMPILE.format(folder=str(folder), paddings=paddings),
        PYTHONPATH=f"{PACKAGE}:{Path(__file__).parent}",
        PYTHONWARNINGS="ignore",  # of an entry that cannot be loaded without a GPU
    )
    return {name for name in os.listdir(folder) if name.endswith("-cache")}


def test_a_single_padding_is_another_entry_and_a_second_process_has_the_same(tmp_path):
    aot.require_plugin()
    # Of equal sizes, and so of programs that differ in nothing but the custom call's attributes.
    paddings = [((1, 0), (1, 1)), ((0, 1), (1, 1)), ((1, 0), (2, 0))]
    first = entries(tmp_path, *paddings)
    assert len(first) == 3
    assert entries(tmp_path, *reversed(paddings)) == first
    assert len(entries(tmp_path, ((1, 0), (0, 2)))) == 4
