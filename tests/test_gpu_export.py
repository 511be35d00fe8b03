# SPDX-License-Identifier: Apache-2.0
"""Programs that were saved or compiled without a GPU, in another process, run on one."""

import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.experimental import serialize_executable

import aot
import jaxcudnn
import saved
from cases import integers
from jaxcudnn import _load
from processes import PACKAGE, run_python

pytestmark = pytest.mark.gpu

NHWC = ("NHWC", "OHWI", "NHWC")
X_SHAPE, W_SHAPE = (4, 9, 8, 16), (8, 3, 3, 16)
TESTS = saved.__file__.rpartition("/")[0]


def by_lax(x, w):
    """What every program here computes; in float32, of small integers."""

    def conv(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)

    y, pullback = jax.vjp(conv, x, w)
    return y, *pullback(y)


def elsewhere(script: str, **environment: str) -> None:
    """Run in a process that sees no GPU."""
    run_python(
        TRAINING + script,
        JAX_PLATFORMS="cpu",
        CUDA_VISIBLE_DEVICES="",
        PYTHONPATH=f"{PACKAGE}:{TESTS}",
        **environment,
    )


TRAINING = f"""
    import pickle
    from pathlib import Path
    import jax, jaxcudnn
    from jax import export

    def training(x, w):
        def conv(x, w):
            return jaxcudnn.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers={NHWC})
        y, pullback = jax.vjp(conv, x, w)
        return y, *pullback(y)

    X_SHAPE, W_SHAPE = {X_SHAPE}, {W_SHAPE}
"""

SAVE = """
    def shaped(shape):
        return jax.ShapeDtypeStruct(export.symbolic_shape(shape), "float32")

    exported = export.export(
        jax.jit(training), platforms={platforms}, disabled_checks=jaxcudnn.export_checks()
    )(shaped("{images}, 9, 8, 16"), shaped("8, 3, 3, 16"))
    Path({path!r}).write_bytes(exported.serialize())
"""


@pytest.mark.parametrize("algorithm", ["measure", "heuristic"])
@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")], ids="+".join)
@pytest.mark.parametrize("images", ["4", "b", "2*b"])
def test_program_of_a_machine_without_a_gpu(tmp_path, platforms, images, algorithm):
    path = str(tmp_path / "program")
    elsewhere(
        SAVE.format(platforms=platforms, images=images, path=path), JAXCUDNN_ALGORITHM=algorithm
    )
    program = export.deserialize(bytearray((tmp_path / "program").read_bytes()))
    for n in (4,) if images == "4" else (4, 2, 64):
        operands = integers(1, (n, *X_SHAPE[1:])), integers(2, W_SHAPE)
        compiled = jax.jit(program.call).lower(*operands).compile()
        text = compiled.as_text() or ""
        assert text.count(f'custom_call_target="{_load.TARGET}"') == 3
        assert "__cudnn$conv" not in text and "conditional(" not in text
        for got, wanted in zip(compiled(*operands), by_lax(*operands), strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_derivatives_that_are_saved_with_a_program():
    def conv(x, w):
        return jaxcudnn.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)

    operands = integers(1, X_SHAPE), integers(2, W_SHAPE)
    exported = export.export(
        jax.jit(conv), platforms=("cuda",), disabled_checks=jaxcudnn.export_checks()
    )(*operands)
    program = export.deserialize(exported.serialize(vjp_order=1))
    y, pullback = jax.vjp(program.call, *operands)
    for got, wanted in zip((y, *pullback(y)), by_lax(*operands), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("path", saved.SAVED, ids=lambda path: path.stem)
def test_program_of_an_older_schema(path):
    program = export.deserialize(bytearray(path.read_bytes()))
    operands = [jnp.asarray(a) for a in saved.operands()]
    with jax.default_device(jax.devices("cpu")[0]):
        wanted = program.call(*(jax.device_put(a, jax.devices("cpu")[0]) for a in operands))
    for ours, theirs in zip(jax.jit(program.call)(*operands), wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_named_plan_that_there_is_not(tmp_path):
    """Which is known only where the program runs."""
    path = tmp_path / "program"
    save = SAVE.format(platforms=("cuda",), images="b", path=str(path))
    elsewhere(save, JAXCUDNN_ALGORITHM="eng0_k0=77")
    program = export.deserialize(bytearray(path.read_bytes()))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"jaxcudnn \(initialize\).*eng0_k0=77"):
        jax.block_until_ready(program.call(integers(1, X_SHAPE), integers(2, W_SHAPE)))


COMPILE = """
    import aot
    from jax.experimental import serialize_executable
    aot.H200 = {target!r}
    shapes = tuple(aot.shaped(shape, "float32") for shape in (X_SHAPE, W_SHAPE))
    arguments = aot.place(shapes, aot.mesh())
    compiled = jax.jit(training).lower(*arguments).compile(compiler_options=aot.NO_AUTOTUNING)
    Path({path!r}).write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
"""


def compiled_elsewhere(path, target: str):
    """A program that was compiled for a GPU that its process did not have, loaded on this one."""
    elsewhere(COMPILE.format(target=target, path=str(path)))
    return serialize_executable.deserialize_and_load(
        *pickle.loads(path.read_bytes()), backend="cuda", execution_devices=jax.devices("cuda")[:1]
    )


def test_program_compiled_ahead_of_time_without_a_gpu(tmp_path):
    if "H200" not in jax.devices("cuda")[0].device_kind:
        pytest.fail("the target's description is an H200's; put this GPU's into tests/data")
    program = compiled_elsewhere(tmp_path / "program", aot.H200)
    operands = integers(1, X_SHAPE), integers(2, W_SHAPE)
    for got, wanted in zip(program(*operands), by_lax(*operands), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_program_compiled_for_another_architecture(tmp_path):
    """XLA itself refuses, and names both."""
    other = re.sub(r"(?<=cuda_compute_capability) \{.*?\}", " { major: 8 }", aot.H200)
    assert other != aot.H200
    capability = jax.devices("cuda")[0].compute_capability
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        program = compiled_elsewhere(tmp_path / "program", other)
        jax.block_until_ready(program(integers(1, X_SHAPE), integers(2, W_SHAPE)))
    assert "8.0" in str(error.value) and capability in str(error.value)
