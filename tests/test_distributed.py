# SPDX-License-Identifier: Apache-2.0
"""The processes of one `jax.distributed` job lower to identical programs, whatever each measured.

They are processes on CPU, in which something answers for a GPU, and which have stores of their own.
"""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxcudnn import store
from processes import PACKAGE, run_python
from test_plans import choice

RANK = """
    import jax
    jax.distributed.initialize("localhost:{port}", 2, {rank})
    import jaxcudnn
    from jaxcudnn import _load, _plans, store
    from test_plans import DEVICE, Extension, plan

    extension = Extension()
    extension.known = {known}
    _load.local_device = lambda: DEVICE
    _load.cudnn = _load.native = lambda: extension
    _plans._save_from_now_on = lambda: None

    def training(x, w):
        conv = lambda x, w: jaxcudnn.conv(x, w, (1, 1), "SAME")
        y, pullback = jax.vjp(conv, x, w)
        return y, *pullback(y)

    x, w = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((2, 8, 9, 9), (8, 8, 3, 3)))
    program = jax.jit(training).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    print(jax.process_index(), jax.process_count(), len(store.entries()), len(extension.remembered))
    print(repr(program))
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


def lower_in_two(tmp_path: Path, *known: str) -> list[list[str]]:
    """What two processes say of a program, whose GPUs know these plans."""
    port = free_port()

    def run(rank: int) -> list[str]:
        return run_python(
            RANK.format(port=port, rank=rank, known=known[rank]),
            PYTHONPATH=f"{PACKAGE}:{Path(__file__).parent}",
            JAXCUDNN_ALGORITHM="measure",
            JAXCUDNN_STORE=str(tmp_path / f"store{rank}"),
        )

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def test_one_has_measured_and_the_other_has_not(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXCUDNN_STORE", str(tmp_path / "store0"))
    store.put([choice(op) for op in ("fprop", "dgrad", "wgrad")])
    first, second = lower_in_two(tmp_path, "plan(40)", "None")
    assert (first[0], second[0]) == ("0 2 3 3", "1 2 0 0")
    assert first[1] == second[1]
    assert first[1].count("@jaxcudnn_conv_v1(") == 3


def test_they_have_measured_differently(tmp_path):
    first, second = lower_in_two(tmp_path, "plan(40)", "plan(50)")
    assert first[1] == second[1]


def test_one_has_found_that_no_plan_is_right(tmp_path):
    first, second = lower_in_two(tmp_path, "plan(40)", "extension.UnsupportedError('none passed')")
    assert first[1] == second[1]
    assert first[1].count("@jaxcudnn_conv_v1(") == 3
