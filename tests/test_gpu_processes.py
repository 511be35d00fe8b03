# SPDX-License-Identifier: Apache-2.0
"""Threads, devices and processes: on as many GPUs as are found, and in new processes."""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxcudnn
from cases import integers
from jaxcudnn import _load
from jaxcudnn._collect import collect
from processes import run_python

pytestmark = pytest.mark.gpu

NHWC = ("NHWC", "OHWI", "NHWC")
THREADS = 8


def devices() -> list[Any]:
    return jax.local_devices(backend="cuda")


def conv(x, w, padding: Any = "SAME"):
    return jaxcudnn.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=NHWC)


def training(x, w):
    y, pullback = jax.vjp(conv, x, w)
    return y, *pullback(y)


def operands(seed: int, size: int = 9) -> tuple[np.ndarray, np.ndarray]:
    """Small integers, so that every plan on every device gives the same."""
    x, w = integers(seed, (4, size, 8, 16)), integers(seed + 1, (8, 3, 3, 16))
    return np.asarray(x), np.asarray(w)


def on_cpu(f, *arrays):
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        return jax.tree.map(np.asarray, jax.jit(f)(*(jax.device_put(a, cpu) for a in arrays)))


def assert_equal(ours, theirs) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, ours), theirs)


def current_device() -> int:
    device = ctypes.c_int(-1)
    assert cudart().cudaGetDevice(ctypes.byref(device)) == 0
    return device.value


def cudart() -> ctypes.CDLL:
    """The CUDA runtime that JAX has loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    (path, *_) = {line.split()[-1] for line in lines if "/libcudart.so" in line}
    return ctypes.CDLL(path)


@pytest.mark.parametrize("warm", [True, False])
def test_eight_threads_on_every_device(warm):
    """One function, and plans that are built at once where it has not run before."""
    size = 9 if warm else 10  # not known from elsewhere
    wanted = {seed: on_cpu(training, *operands(seed, size)) for seed in range(THREADS)}
    step = jax.jit(lambda x, w: training(x, w))
    if warm:
        for device in devices():
            jax.block_until_ready(step(*jax.device_put(operands(0, size), device)))
    start = threading.Barrier(THREADS * len(devices()))

    def work(job):
        device, seed = job
        arrays = jax.device_put(operands(seed, size), device)
        start.wait()
        for _ in range(30):
            result = step(*arrays)
            assert_equal(result, wanted[seed])
        return {each.device for each in result}

    jobs = [(device, seed) for device in devices() for seed in range(THREADS)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        for (device, _), used in zip(jobs, pool.map(work, jobs), strict=True):
            assert used == {device}


def test_threads_that_compile_while_others_run():
    wanted = {size: on_cpu(training, *operands(3, size)) for size in range(11, 11 + THREADS)}

    def work(job):
        device, size = job
        step = jax.jit(lambda x, w: training(x, w))
        for _ in range(5):
            assert_equal(step(*jax.device_put(operands(3, size), device)), wanted[size])

    jobs = [(device, size) for device in devices() for size in wanted]
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(work, jobs))


def test_the_device_is_the_programs_whichever_is_current():
    """And stays the thread's own."""
    numbers = [device.local_hardware_id for device in devices()]
    wanted = on_cpu(training, *operands(5))
    for device in devices():
        for current in numbers:
            assert cudart().cudaSetDevice(current) == 0
            step = jax.jit(lambda x, w: training(x, w))  # anew: every stage runs
            arrays = jax.device_put(operands(5), device)
            for _ in range(2):
                assert_equal(step(*arrays), wanted)


def test_plans_are_asked_for_on_the_device_that_is_named():
    with jaxcudnn.options(algorithm="heuristic"):
        found = collect(training, operands(1), {})
    first = next(iter(found)).lowered()[0].attributes
    assert first
    before = current_device()
    for device in devices():
        assert _load.native().known_plan(device.local_hardware_id, **first) is not None
        assert current_device() == before


def test_only_the_last_device_is_visible():
    """JAX numbers it 0, and CUDA as it always does."""
    last = devices()[-1].local_hardware_id
    script = """
        import jax, jax.numpy as jnp, jaxcudnn
        (device,) = jax.local_devices()
        y = jaxcudnn.conv_fprop(jnp.ones((1, 2, 4, 4)), jnp.ones((3, 2, 3, 3)), padding=0)
        print(device.local_hardware_id, y.device == device, float(y.sum()))
    """
    (said,) = run_python(script, JAX_PLATFORMS="cuda", JAX_CUDA_VISIBLE_DEVICES=str(last))
    number, same, total = said.split()
    assert (same, float(total)) == ("True", 3 * 4 * 18)
    assert int(number) in (0, last)


CACHED = """
    import jax, jax.numpy as jnp, numpy as np
    from jax import monitoring
    events = []
    monitoring.register_event_listener(lambda name, **_: events.append(name.rpartition("/")[2]))
    import jaxcudnn

    x = jnp.asarray(np.arange(4 * 9 * 8 * 16).reshape(4, 9, 8, 16) % 5, jnp.float32)
    w = jnp.asarray(np.arange(8 * 3 * 3 * 16).reshape(8, 3, 3, 16) % 7, jnp.float32)
    events.clear()
    for padding in (((1, 0), (1, 1)), ((0, 1), (1, 1))):
        def conv(x, w):
            return jaxcudnn.conv_general_dilated(
                x, w, (1, 1), padding, dimension_numbers=("NHWC", "OHWI", "NHWC")
            )
        y = jax.jit(conv)(x, w)
        print(*np.asarray(y).astype(int).ravel())
        counts = events.count("cache_hits"), events.count("cache_misses")
        print(*counts, jaxcudnn.explain(conv)(x, w)[0].chosen)
        events.clear()
"""


def test_a_second_process_finds_its_programs_and_plans(tmp_path):
    """Two convolutions of which one padding differs: the same sizes, other numbers."""

    def run():
        lines = run_python(
            CACHED,
            JAX_PLATFORMS="cuda",
            JAXCUDNN_ALGORITHM="measure",
            JAXCUDNN_STORE=str(tmp_path / "store"),
            JAX_COMPILATION_CACHE_DIR=str(tmp_path / "cache"),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
            JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
        )
        return [np.array(line.split(), int) for line in lines[::2]], lines[1::2]

    first, said = run()
    assert said == 2 * ["0 1 measured"]
    x = (np.arange(4 * 9 * 8 * 16).reshape(4, 9, 8, 16) % 5).astype(np.float32)
    w = (np.arange(8 * 3 * 3 * 16).reshape(8, 3, 3, 16) % 7).astype(np.float32)
    for y, padding in zip(first, (((1, 0), (1, 1)), ((0, 1), (1, 1))), strict=True):
        wanted = on_cpu(lambda x, w, padding=padding: conv(x, w, padding), x, w)
        np.testing.assert_array_equal(y.reshape(wanted.shape), wanted)
    assert (first[0] != first[1]).any()
    second, said = run()
    assert said == 2 * ["1 0 stored"]
    for ours, before in zip(second, first, strict=True):
        np.testing.assert_array_equal(ours, before)


class TestFork:
    SCRIPT = """
        import os, sys, warnings
        warnings.simplefilter("ignore")  # JAX's own, of forks
        import jax, jax.numpy as jnp, jaxcudnn
        x, w = jnp.ones((1, 2, 4, 4)), jnp.ones((3, 2, 3, 3))
        conv = lambda x, w: jaxcudnn.conv_fprop(x, w, padding=0)
        print(conv(x, w).sum())
        shapes = jax.ShapeDtypeStruct(x.shape, "float32"), jax.ShapeDtypeStruct(w.shape, "float32")
        sys.stdout.flush()
        child = os.fork()
        if not child:
            try:
                jax.jit(lambda x, w: conv(x, w) + 1).lower(*shapes)
                print("not refused")
            except RuntimeError as error:
                print(error)
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
        print(conv(x, w + 1).sum())
    """

    def test_after_cuda_is_refused(self):
        before, child, after = run_python(self.SCRIPT, JAX_PLATFORMS="cuda")
        assert child.startswith("jaxcudnn: this process was forked from one that had started CUDA")
        assert (float(before), float(after)) == (3 * 4 * 18, 2 * 3 * 4 * 18)

    def test_after_the_import_is_safe(self):
        """The child is the first to use CUDA, and then the parent."""
        script = """
            import os, sys, warnings
            warnings.simplefilter("ignore")
            import jax, jaxcudnn
            child = os.fork()
            import jax.numpy as jnp
            y = jaxcudnn.conv_fprop(jnp.ones((1, 2, 4, 4)), jnp.ones((3, 2, 3, 3)), padding=0)
            total = float(y.sum())
            if not child:
                os._exit(0 if total == 3 * 4 * 18 else 1)
            print(os.waitpid(child, 0)[1], total)
        """
        (said,) = run_python(script, JAX_PLATFORMS="cuda")
        assert said.split() == ["0", str(3.0 * 4 * 18)]


@pytest.mark.parametrize("algorithm", ["heuristic", "measure"])
def test_exit_while_work_is_in_flight(tmp_path, algorithm):
    script = """
        import jax, jax.numpy as jnp, jaxcudnn
        x, w = jnp.ones((64, 128, 64, 64)), jnp.ones((128, 128, 3, 3))
        step = jax.jit(lambda x, w: jaxcudnn.conv_fprop(x, w, padding=1))
        for device in jax.local_devices():
            y, filters = jax.device_put((x, w), device)
            for _ in range(50):
                y = step(y, filters)
        print("leaving")
    """
    said = run_python(
        script,
        JAX_PLATFORMS="cuda",
        JAXCUDNN_ALGORITHM=algorithm,
        JAXCUDNN_STORE=str(tmp_path / "store"),
    )
    assert said == ["leaving"]
