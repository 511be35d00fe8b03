# SPDX-License-Identifier: Apache-2.0
"""What the custom call does inside a running program: replays, threads, errors, and which cuDNN.

What fails silently here is a wrong number, so every test compares bits with a run that avoids the
mechanism under test.
"""

import ctypes
import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcudnn
from jaxcudnn import Options, _load, _lowering
from processes import run_python

pytestmark = pytest.mark.gpu

NHWC = ("NHWC", "OHWI", "NHWC")
STEPS = 1000
LAYERS = 6
# Below this many operations XLA records no command buffer.
STREAMED = {"xla_gpu_graph_min_graph_size": 1_000_000}


def conv(x, w):
    return jaxcudnn.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)


def network(x, filters):
    for w in filters:
        x = jnp.tanh(conv(x, w))
    return x


def random(*shape, seed=0, dtype=jnp.bfloat16):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values / np.sqrt(np.prod(shape[1:])), dtype)


@pytest.fixture(name="data")
def make_data():
    x = jnp.asarray(np.random.default_rng(1).standard_normal((8, 14, 14, 64)), jnp.bfloat16)
    return x, [random(64, 3, 3, 64, seed=i) for i in range(LAYERS)]


def recorded_and_streamed(f, **options):
    return jax.jit(f, **options), jax.jit(f, compiler_options=STREAMED, **options)


@jax.jit
def differing(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return sum(jnp.sum(p != q) for p, q in pairs)


def count_executes(run):
    native = _load.native()
    native.time_stages(True)
    run()
    native.time_stages(False)
    return len(native.stage_samples()["execute"])


class TestCommandBuffers:
    """Bit-equal to the same steps without a command buffer, in each way that buffers can move."""

    def test_outputs_dropped(self, data):
        x, filters = data
        recorded, streamed = recorded_and_streamed(network)
        expected = streamed(x, filters)
        wrong = 0

        def run():
            nonlocal wrong
            for _ in range(STEPS):
                wrong += differing(recorded(x, filters), expected)
            jax.block_until_ready(wrong)

        executes = count_executes(run)
        assert wrong == 0
        assert executes < STEPS * LAYERS / 2  # else nothing was replayed, and nothing shown

    def test_inputs_change(self, data):
        x, filters = data
        recorded, streamed = recorded_and_streamed(network)
        roll = jax.jit(lambda x, step: jnp.roll(x, step, axis=0))
        wrong = 0
        for step in range(STEPS):
            moved = roll(x, step)
            wrong += differing(recorded(moved, filters), streamed(moved, filters))
        assert wrong == 0

    def test_outputs_kept(self, data):
        x, filters = data
        recorded, streamed = recorded_and_streamed(network)
        expected = streamed(x, filters)
        kept, wrong = [], 0
        for step in range(STEPS):
            kept.append(recorded(x, filters))
            if step % 31 == 30:  # a new set of addresses each time
                wrong += sum(differing(y, expected) for y in kept)
                kept.clear()
        assert wrong == 0

    def test_donated_training_step(self, data):
        x, filters = data

        def step(filters):
            loss = lambda f: jnp.mean(jnp.square(network(x, f).astype(jnp.float32)))  # noqa: E731
            grads = jax.grad(loss)(filters)
            return [w - jnp.asarray(0.5, w.dtype) * g for w, g in zip(filters, grads, strict=True)]

        recorded, streamed = recorded_and_streamed(step, donate_argnums=0)
        ours, expected = ([jnp.array(w) for w in filters] for _ in range(2))
        wrong = 0

        def run():
            nonlocal ours, expected, wrong
            for _ in range(STEPS):
                ours = recorded(ours)
            jax.block_until_ready(ours)

        executes = count_executes(run)
        for _ in range(STEPS):
            expected = streamed(expected)
        assert differing(ours, expected) == 0
        assert differing(ours, filters) > 0  # the weights did move
        assert executes < STEPS


@pytest.mark.parametrize("options", [{}, STREAMED], ids=["recorded", "streamed"])
def test_eight_threads_on_one_function(data, options):
    x, filters = data

    def step(x, filters):
        y, pullback = jax.vjp(network, x, filters)
        return y, pullback(y)

    compiled = jax.jit(step, compiler_options=options)
    expected = jax.block_until_ready(compiled(x, filters))
    start = threading.Barrier(8)

    def work(_):
        start.wait()
        return sum(int(differing(compiled(x, filters), expected)) for _ in range(100))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [0] * 8


def test_planning_beside_recording(data):
    """New plans, handles' first uses and compilations while command buffers are recorded."""
    x, filters = data
    recorded, streamed = recorded_and_streamed(network)
    expected = streamed(x, filters)
    stop, built, errors = threading.Event(), [], []

    def build():
        size = 5
        try:
            while not stop.is_set():
                image = random(2, size, size, 8, seed=size)
                built.append(
                    jax.jit(jax.grad(lambda w, x=image: jnp.sum(conv(x, w))))(random(8, 3, 3, 8))
                )
                size += 1
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    wrong = 0
    try:
        while len(built) < 20 and not errors:
            kept = [recorded(x, filters) for _ in range(20)]  # new addresses, so new recordings
            wrong += sum(int(differing(y, expected)) for y in kept)
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert wrong == 0


ATTRIBUTES = {
    "op": "fprop",
    "x": np.array([1, 8, 6, 6]),
    "w": np.array([8, 8, 3, 3]),
    "y": np.array([1, 8, 4, 4]),
    "stride": np.array([1, 1]),
    "pre_padding": np.array([0, 0]),
    "post_padding": np.array([0, 0]),
    "dilation": np.array([1, 1]),
    "flip": False,
    "dtype": "float32",
    "allow_tf32": True,
    "channels_first": False,
    "activation": "",
    "residual": False,
    "bias": False,
    "workspace_limit": 1 << 20,
    **_lowering._options_of(Options(algorithm="heuristic"), "fprop"),
}


def call_directly(target=_load.TARGET, workspace=1 << 20, **changes: Any):
    """The custom call as a program from elsewhere may make it, past every check in Python."""
    x, w = jnp.ones((1, 6, 6, 8)), jnp.ones((8, 3, 3, 8))
    results = (
        jax.ShapeDtypeStruct((1, 4, 4, 8), jnp.float32),
        jax.ShapeDtypeStruct((workspace,), jnp.uint8),
    )
    call = jax.ffi.ffi_call(target, results)
    return jax.jit(lambda x, w: call(x, w, **(ATTRIBUTES | changes))[0]), (x, w)


def assert_usable():
    f, operands = call_directly()
    np.testing.assert_array_equal(f(*operands), np.full((1, 4, 4, 8), 72.0, np.float32))


class TestErrors:
    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"op": "sideways"}, r"INVALID_ARGUMENT: jaxcudnn \(instantiate\).*'sideways'"),
            ({"dtype": "int3"}, r"jaxcudnn \(instantiate\): unknown dtype 'int3'"),
            ({"stride": np.array([1, 0])}, r"stride and dilation must be positive"),
            ({"flip": 3}, r"attribute 'flip' is missing or of the wrong type"),
            ({"y": np.array([1, 8, 5, 5])}, r"y must have the size that x, w"),
        ],
    )
    def test_instantiate(self, changes, text):
        f, operands = call_directly(**changes)
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            f(*operands)
        assert_usable()

    def test_initialize_says_what_has_no_plan(self):
        f, operands = call_directly(workspace_limit=-1)  # less than any plan needs
        for _ in range(2):
            with pytest.raises(
                jax.errors.JaxRuntimeError,
                match=r"RESOURCE_EXHAUSTED: jaxcudnn \(initialize\): every cuDNN plan .* given",
            ):
                jax.block_until_ready(f(*operands))
        assert_usable()

    @pytest.mark.parametrize("name", ["x", "w", "y"])
    def test_buffers_of_another_size_are_refused(self, name):
        smaller: dict[str, Any] = {  # of a convolution like the one described, but for one array
            "x": {"x": np.array([1, 8, 5, 6]), "post_padding": np.array([1, 0])},
            "w": {"w": np.array([8, 8, 2, 3]), "dilation": np.array([2, 1])},
            "y": {"y": np.array([1, 8, 3, 4]), "stride": np.array([2, 1]),
                  "post_padding": np.array([2, 0])},
        }[name]  # fmt: skip
        f, operands = call_directly(**smaller)
        with pytest.raises(
            jax.errors.JaxRuntimeError,
            match=r"jaxcudnn \(initialize\): the operands, the result, .* must hold .* bytes, got",
        ):
            jax.block_until_ready(f(*operands))
        assert_usable()

    def test_execute_without_initialize_and_recovery(self):
        """An error in Execute reaches Python, and the same executable works at the next call."""
        skip = False
        stages = dict(_load.native().registrations()[_load.TARGET])
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        initialize = handler(pointer(stages["initialize"], None))

        @handler
        def maybe_initialize(frame):
            return None if skip else initialize(frame)

        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = (
            ctypes.py_object,
            [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
        )
        stages["initialize"] = new(ctypes.cast(maybe_initialize, ctypes.c_void_p), None, None)
        target = "jaxcudnn_test_skips_initialize"
        jax.ffi.register_ffi_target(target, stages, platform="CUDA")

        f, operands = call_directly(target)
        compiled = f.lower(*operands).compile()
        skip = True
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=r"jaxcudnn \(execute\): Execute was reached without"
        ):
            jax.block_until_ready(compiled(*operands))
        skip = False
        np.testing.assert_array_equal(compiled(*operands), np.full((1, 4, 4, 8), 72, np.float32))
        assert_usable()

    def test_too_little_workspace_finds_a_plan_that_fits(self):
        f, operands = call_directly(workspace=0)
        np.testing.assert_array_equal(f(*operands), np.full((1, 4, 4, 8), 72, np.float32))


def mapped_cudnn():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if "/libcudnn.so" in line}


def test_the_cudnn_that_jax_loaded_is_the_one_used():
    assert_usable()
    assert mapped_cudnn() == {os.path.realpath(_load.native().cudnn_path())}


def test_another_cudnn_on_the_path_is_not_used(tmp_path):
    source = tmp_path / "decoy.c"
    source.write_text("unsigned long cudnnGetVersion(void) { return 90100; }")
    decoy = tmp_path / "libcudnn.so.9"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", decoy, source], check=True)
    script = """
        import jax.numpy as jnp, jaxcudnn
        from jaxcudnn import Options, _load, _lowering
        x, w = jnp.ones((1, 8, 6, 6)), jnp.ones((8, 8, 3, 3))
        y = jaxcudnn.conv_general_dilated(x, w, (1, 1), "VALID")
        assert (y == 72).all()
        print(_load.native().cudnn_path(), _load.native().cudnn_version())
    """
    path = f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    (line,) = run_python(script, LD_LIBRARY_PATH=path, JAX_PLATFORMS="cuda")
    used, version = line.split()
    assert Path(used).parent != tmp_path
    assert int(version) == _load.native().cudnn_version()
