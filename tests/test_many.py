# SPDX-License-Identifier: Apache-2.0
"""What thousands of computations are run by: on the CPU, with few, and with faults put in."""

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import ArrayLike

import many
import sweep
from cases import OPERANDS, named
from jaxcudnn import _load


@dataclass(frozen=True)
class Double:
    """Twice a number, unless a fault is put in."""

    number: int
    fault: str = ""
    dtype: str = "float32"
    x64: bool = False

    @property
    def script(self) -> str:
        return f"print({self!r})\n"

    def arrays(self) -> list[np.ndarray]:
        return [np.full(3, self.number, self.dtype)]

    def run(self, *arrays: ArrayLike) -> dict[str, jax.Array]:
        if self.fault == "raises":
            raise ValueError("put in")
        if self.fault == "ends":
            os._exit(9)
        (x,) = arrays
        return {"twice": jnp.multiply(x, 3 if self.fault == "wrong" else 2)}

    def check(self, results) -> None:
        np.testing.assert_array_equal(results["twice"], np.full(3, 2 * self.number, self.dtype))


def right(index: int, of: int, count: int) -> list[Double]:
    return [
        Double(number, dtype="float64" if number % 3 else "float32", x64=number % 3 > 0)
        for number in range(count)
    ][index::of]


def faulty(index: int, of: int, count: int) -> list[Double]:
    """A source whose second process ends while it computes."""
    if index == 1:
        return [Double(10), Double(11), Double(12, "ends"), Double(13)]
    return [
        Double(0),
        Double(1, "wrong"),
        Double(2, "raises"),
        Double(3, "wrong", dtype="float16"),
        Double(4),
    ]


def slow(index: int, of: int, count: int) -> list[Double]:
    time.sleep(1)  # longer than the process has
    return [Double(0)]


def work(
    folder: Path, index: int, source: str, count: int = 0, *, seconds: float = 100
) -> many.Report:
    """Do one process's share here."""
    own = folder / str(index)
    own.mkdir()
    many.work(own, f"test_many:{source}", count, of=2, size=2, seconds=seconds)
    report = own / many.REPORT
    return many.Report.read(report.read_text()) if report.exists() else many.Report()


def test_each_is_run_once(tmp_path):
    report = many.Report()
    for index in range(2):
        report.merge(work(tmp_path, index, "right", 7))
    assert (report.run, report.wrong, report.failures) == (7, {}, [])


def test_faults_are_counted_and_named():
    report = many.run("test_many:faulty", count=0, workers=2, size=2, seconds=100)
    assert report.run == 5 + 2  # the second process ended in its second batch
    assert report.wrong == {"float32": 2, "float16": 1, "process": 1}
    failures = "\n".join(report.failures)
    assert re.search(r"Mismatched elements: 3 / 3(?s:.*?)print\(Double\(number=1, ", failures)
    assert "ValueError: put in\nprint(Double(number=2, " in failures
    assert "print(Double(number=3, " in failures
    assert "process 1 ended with status 9, computing\nprint(Double(number=12, " in failures
    assert "print(Double(number=13, " in failures
    assert "number=11" not in failures


def test_no_batch_begins_after_its_time(tmp_path):
    assert work(tmp_path, 0, "slow", seconds=0.5).run == 0


def test_what_does_not_end_is_ended(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (tmp_path / many.LOG).write_text("last words")
    report = many.collect(tmp_path, process, deadline=time.monotonic())
    assert process.poll() is not None
    (failure,) = report.failures
    assert f"process {tmp_path.name} had not ended long after its time" in failure
    assert failure.endswith("last words")


def test_more_failures_are_counted_than_shown():
    report = many.Report()
    for number in range(2 * many.SHOWN):
        report.add(many.Outcome(Double(number), ValueError("odd"), lax=1, cudnn=2))
    assert report.wrong == report.by_lax == {"float32": 2 * many.SHOWN}
    assert report.custom_calls == 4 * many.SHOWN
    assert len(report.failures) == len(report.by_lax_too) == many.SHOWN
    assert many.Report.read(report.text) == report
    assert str(report) == (
        "10 run, 10 (float32 10) wrong, 20 custom calls, 10 (float32 10) with a convolution of lax"
    )


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_convolutions_are_counted_apart(platform: str, monkeypatch):
    """Each computation's own, in the module of all; also those of functions that it calls."""
    monkeypatch.setattr(_load, "local_device", lambda: None)
    case, empty = named("2d", "no-images")
    passes = [sweep.Pass(case, role, "float32", None) for role in OPERANDS]
    passes.append(sweep.Pass(empty, "y", "float32", None))
    functions = [many.with_name(one, index) for index, one in enumerate(passes)]

    def everything(operands):
        return [jax.jit(f)(*one) for f, one in zip(functions, operands, strict=True)]

    traced = jax.jit(everything).trace([one.arrays() for one in passes])
    counts = many.count_convolutions(traced.lower(lowering_platforms=(platform,)).as_text())
    found = [counts[many.name(index)] for index in range(4)]
    assert found == ([(1, 0)] * 3 if platform == "cpu" else [(0, 1)] * 3) + [(0, 0)]


class TestSweep:
    def test_part_of_it_is_right(self):
        """The whole takes minutes here."""
        report = many.run("sweep:share", count=54, workers=2, size=27, seconds=300)
        assert (report.run, report.wrong, report.failures) == (54, {}, [])

    def test_range(self):
        every = sweep.convolutions()
        assert len(set(every)) == 3 * 3 * 2 * 3 * 5 * 4
        assert all(min(case.y_shape) > 0 for case in every)
        assert {case.dimension_numbers[0] for case in every} == {
            "NWC", "NCW", "NHWC", "NCHW", "NDHWC", "NCDHW"
        }  # fmt: skip
        assert sum(case.dimension_numbers[0].endswith("C") for case in every) == len(every) * 4 // 5

    def test_shares_are_all(self):
        total = sweep.PASSES * len(sweep.convolutions())
        shares = [one for index in range(7) for one in sweep.share(index, 7, total)]
        assert len(set(shares)) == len(shares) == total
        single = [one for one in shares if one.dtype == "float32"]
        assert 2 * sum(one.precision == "highest" for one in single) == pytest.approx(
            len(single), rel=0.02
        )

    def test_script_computes(self):
        one = sweep.share(0, 1, 9)[4]
        names: dict = {}
        exec(one.script.replace("print", "shown = "), names)
        one.check({one.role: names["shown"]})

    def test_wrong_result_is_noticed(self):
        one = sweep.share(0, 1, 9)[0]
        right = sweep.exact(one.case, one.role)
        with pytest.raises(AssertionError):
            one.check({one.role: (right + 1).astype(np.float32)})
        with pytest.raises(AssertionError):
            one.check({one.role: right})
