# SPDX-License-Identifier: Apache-2.0
"""Thousands of convolutions on the GPU with integers, in processes that share it.

JAXCUDNN_EXAMPLES sets how many calls are drawn, JAXCUDNN_WORKERS how many processes there are, and
JAXCUDNN_SPACE (in strategies.py) narrows the calls down. Counts are printed, and are in the report.
"""

import os

import pytest

import many
import sweep

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("many")]

EXAMPLES = int(os.environ.get("JAXCUDNN_EXAMPLES", "20000"))
WORKERS = int(os.environ.get("JAXCUDNN_WORKERS", min(12, os.cpu_count() or 1)))
BATCH = 40  # computations to a compilation


@pytest.fixture(name="run")
def run_and_show(capsys, record_property):
    def run(source: str, count: int, seconds: float) -> many.Report:
        report = many.run(source, count=count, workers=WORKERS, size=BATCH, seconds=seconds)
        record_property("counts", str(report))
        with capsys.disabled():
            print(f"\n{source} in {WORKERS} processes: {report}")
        assert not report.wrong, "\n".join(report.failures)
        assert report.run == count, f"{report.run} of {count} were run in {seconds} s"
        return report

    return run


def test_calls(run):
    run("strategies:share", EXAMPLES, seconds=420)


def test_sweep(run):
    """Three ranks, windows, paddings; two strides, five dilations, four numbers of groups."""
    count = sweep.PASSES * len(sweep.convolutions())
    report = run("sweep:share", count, seconds=180)
    assert not report.by_lax, "\n".join(report.by_lax_too)
    assert report.custom_calls == count
