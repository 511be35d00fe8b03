# SPDX-License-Identifier: Apache-2.0
"""`os.fork`: safe after the import, and refused in words after CUDA has started.

A library of the test stands for CUDA's driver, which says whether it has started.
"""

import pytest

from processes import run_python
from test_load import library

FORK = """
    import os, sys, warnings
    warnings.simplefilter("ignore")  # JAX's own, of forks
    import jax.numpy as jnp, jaxcudnn
    from jaxcudnn import _load

    def in_child(work):
        sys.stdout.flush()
        child = os.fork()
        if not child:
            try:
                work()
            finally:
                sys.stdout.flush()
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

"""
SENTENCE = (
    "jaxcudnn: this process was forked from one that had started CUDA, which does not work in a "
    "forked process; start it by multiprocessing.get_context('spawn') or 'forkserver', or fork "
    "before JAX has used a GPU"
)


def test_after_the_import():
    (total,) = run_python(
        FORK
        + """
    def work():
        _load.native().check_not_forked()
        print(jaxcudnn.conv_fprop(jnp.ones((1, 2, 4, 4)), jnp.ones((3, 2, 3, 3)), padding=0).sum())
    in_child(work)
    """
    )
    assert float(total) == 3 * 4 * 18


@pytest.mark.parametrize("started", [False, True])
def test_after_the_driver_is_loaded(tmp_path, started):
    """To load it is not to start it."""
    driver = tmp_path / "libcuda.so.1"
    status = 0 if started else 3
    library(driver, f"int cuDeviceGetCount(int* count) {{ *count = 1; return {status}; }}")
    said = run_python(
        FORK
        + f"""
    import ctypes
    ctypes.CDLL({str(driver)!r})
    extension = _load.native()
    extension.check_not_forked()
    def check():
        try:
            extension.check_not_forked()
            print("not refused")
        except extension.NativeError as error:
            print(f"jaxcudnn: {{error}}")
    in_child(check)
    in_child(lambda: in_child(check))  # nor is it mended by another fork
    extension.check_not_forked()  # here it works as before
    """
    )
    assert said == 2 * [SENTENCE if started else "not refused"]


def test_lowering_is_refused(tmp_path):
    driver = tmp_path / "libcuda.so.1"
    library(driver, "int cuDeviceGetCount(int* count) { *count = 1; return 0; }")
    said = run_python(
        FORK
        + f"""
    import ctypes, jax
    ctypes.CDLL({str(driver)!r})
    _load.local_device = lambda: 0
    def lower():
        try:
            x, w = jnp.ones((1, 2, 4, 4)), jnp.ones((3, 2, 3, 3))
            conv = jax.jit(lambda x, w: jaxcudnn.conv_fprop(x, w, padding=0))
            conv.trace(x, w).lower(lowering_platforms=("cuda",))
        except RuntimeError as error:
            print(error)
    in_child(lower)
    """
    )
    assert said == [SENTENCE]
