# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the reported problems, as far as a CPU can tell."""

import argparse
import importlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from jax import lax

import jaxcudnn
from jaxcudnn import _routes
from processes import PACKAGE
from reported import load

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))  # scripts, which no package holds
command, entries, machines, record, report, reported_figures, watch = map(
    importlib.import_module, "command entries machines record report reported_figures watch".split()
)

ENTRIES = ["jax#17464", "pytorch#19599", "pytorch#136812"]


def arguments(**changes):
    given = {"entry": None, "quick": True, "dry_run": True, "resume": False}
    return argparse.Namespace(**{**given, **changes})


def measured(section, folder: Path, faults=(), **changes):
    """What a section records in a dry run."""
    own = record.Record(folder / "results.json", section, fresh=True)
    progress = watch.Progress(folder / "progress", dict(faults))
    machine = machines.DryRun()
    own.environment(machine.environment())
    getattr(reported_figures, section)(machine, own, progress, arguments(**changes))
    own.finish()
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(name="results", scope="module")
def dry_run(tmp_path_factory):
    """What a dry run of some entries and of a layer records."""
    folder = tmp_path_factory.mktemp("reported")
    measured("reported", folder, entry=ENTRIES)
    return measured("transposed", folder, entry=["HiFi-GAN 16/8 32"])


# What is recorded


def test_a_row_for_each_pass(results):
    section = results["sections"]["reported"]
    assert section["failures"] == [] and "seconds" in section
    rows = {(row["entry"], row["pass"]): row for row in section["rows"]}
    assert list(rows) == [(entry, which) for entry in ENTRIES[:1] + ENTRIES[2:] + ENTRIES[1:2]
                          for which in ("fwd", "dgrad", "wgrad")]  # fmt: skip
    for (entry, _), row in rows.items():
        empty = entry == "pytorch#19599"
        assert row["route"] == ("neither" if empty else "cudnn")
        assert sorted(row["us"]) == ([] if empty else ["jaxcudnn", "lax"])
        assert ("ratio" in row) != empty
        assert 0 <= row["error"] < 1e-3
    strided = rows["jax#17464", "fwd"]
    assert strided["reading"] == "dgrad 32x32/16" and strided["plan"] == "eng0_k1=2"
    assert strided["lax_call"] == "2x2" and strided["missed"]
    assert not rows["jax#17464", "dgrad"]["missed"]
    assert rows["pytorch#136812", "wgrad"]["reading"] == "wgrad 1x4"
    assert strided["what"] == "transposed 1x4x2x2 to 4 32x32/16 float32 NHWC"


def test_the_words_for_a_convolution():
    words = {reported.name: str(reported) for reported in load()}
    assert words["pytorch#9465"] == "2x256x196x196 to 512 3x3/2 float16 NCHW"
    assert words["jax#26266-3"] == "32x64x1024 to 64 3d64 depthwise float32 NCW"
    assert words["chainer#7187-1d"] == "4x32x16 to 32 3d2 4 groups float32 NCW"
    assert words["jax#7637"] == "8x4x256x256 to 64 3x3 int8 in int32 NCHW"


def test_transposed_beside_lax_in_16_bits_alone(results):
    section = results["sections"]["transposed"]
    assert section["failures"] == []
    labels = {(row["entry"].split()[-1], *sorted(row["us"])) for row in section["rows"]}
    assert labels == {("bfloat16", "jaxcudnn", "lax"), ("float32", "jaxcudnn")}
    assert section["figures"]["torch"]["faults"] == ["PyTorch is left out of a dry run"]


def test_report(results):
    text = report.render(results)
    assert "| jax#17464 " in text and "| pytorch#19599 " in text
    assert "`lax` runs 2x2" in text
    assert "beside no PyTorch." in text and "* PyTorch is left out of a dry run" in text
    assert "Not measured" not in text


def test_report_goes_into_its_document(results, tmp_path):
    path, document = tmp_path / "results.json", tmp_path / "reported.md"
    path.write_text(json.dumps(results))
    document.write_text((ROOT / "docs" / "reported.md").read_text())
    assert report.main([str(path), "--write", str(document)]) == 0
    assert "| jax#17464 " in document.read_text()


def test_what_is_recorded_is_not_measured_again(tmp_path, monkeypatch):
    first = measured("reported", tmp_path, entry=["jax#12461"])["sections"]["reported"]["rows"]
    own = record.Record(tmp_path / "results.json", "reported", fresh=False)
    monkeypatch.setattr(entries, "Measurement", None)
    reported_figures.reported(machines.DryRun(), own, None, arguments(entry=["jax#12461"]))
    assert own.rows == first


@pytest.mark.parametrize(
    ("options", "left", "failures"),
    [
        ({"resume": True}, ["a#1", "a#10", "b#2"], ["a#10, check: x", "b#2 fwd: y"]),
        ({"entry": ["a#1"]}, ["b#2"], ["b#2 fwd: y"]),
        ({"entry": ["b#2"]}, ["a#1", "a#10"], ["a#10, check: x"]),
        ({}, [], []),
    ],
)
def test_what_is_kept_of_an_earlier_run(tmp_path, monkeypatch, options, left, failures):
    path = tmp_path / "results.json"
    own = record.Record(path, "reported", fresh=True)
    for name in ("a#1", "a#10", "b#2"):
        own.row(entry=name)
    for text in ("a#10, check: x", "b#2 fwd: y", "reported: no time was left"):
        own.failure(text)
    monkeypatch.setattr(reported_figures, "supervise", lambda *_, **__: "")
    given = arguments(**options, output=path)
    reported_figures.run_section("reported", given)
    section = record.read(path)["sections"]["reported"]
    assert [row["entry"] for row in section["rows"]] == left
    assert section["failures"] == failures


def test_rows_of_another_machine_are_dropped(tmp_path):
    own = record.Record(tmp_path / "results.json", "reported", fresh=True)
    own.environment({"GPU": "a", "date": "1"})
    own.row(entry="a#1")
    own.environment({"GPU": "a", "date": "2"})
    assert own.rows
    own.environment({"GPU": "b", "date": "2"})
    assert not own.rows


def test_rows_stand_in_the_order_of_the_entries(tmp_path):
    measured("reported", tmp_path, entry=["pytorch#19599"])
    own = record.Record(tmp_path / "results.json", "reported", fresh=False)
    progress = watch.Progress(tmp_path / "progress", {})
    reported_figures.reported(machines.DryRun(), own, progress, arguments(entry=["jax#12461"]))
    assert [row["entry"] for row in own.rows[::3]] == ["jax#12461", "pytorch#19599"]


def test_routes_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(_routes, "FEWEST_ELEMENTS", 0)
    section = measured("reported", tmp_path, entry=["jax#30469"])["sections"]["reported"]
    assert [row["route"] for row in section["rows"]] == ["matmul"] * 3


# What goes wrong


def test_wrong_numbers_are_a_failure(tmp_path, monkeypatch):
    def wrong(x, w, **options):
        return lax.conv_general_dilated(x, w, **options) * 2

    monkeypatch.setattr(jaxcudnn, "conv_general_dilated", wrong)
    section = measured("reported", tmp_path, entry=["jax#12461"])["sections"]["reported"]
    assert len(section["failures"]) == 3
    for failure in section["failures"]:
        assert re.fullmatch(r"jax#12461 \w+: 2\d\d of 256 drawn elements are wrong", failure)
    assert {row["route"] for row in section["rows"]} == {"lax"}


def test_what_lax_cannot_do_is_no_failure(tmp_path, monkeypatch):
    def refuse(*operands, **options):
        raise NotImplementedError("not on\nthis device")

    # Ours does not reach lax by this name.
    monkeypatch.setattr(entries, "lax", SimpleNamespace(conv_general_dilated=refuse))
    section = measured("reported", tmp_path, entry=["jax#12461"])["sections"]["reported"]
    assert section["failures"] == []
    assert {row["note"] for row in section["rows"]} == {"lax: not on"}
    assert all([*row["us"]] == ["jaxcudnn"] and "ratio" not in row for row in section["rows"])


@pytest.mark.parametrize("stage", ["operands", "jaxcudnn dgrad", "check", "lax wgrad"])
def test_faults_of_earlier_processes(tmp_path, stage):
    faults = {f"jax#12461: {stage}": "took more than 10 s"}
    section = measured("reported", tmp_path, faults, entry=["jax#12461"])["sections"]["reported"]
    rows = {row["pass"]: row for row in section["rows"]}
    assert [*rows] == ["fwd", "dgrad", "wgrad"]
    if stage == "lax wgrad":
        assert section["failures"] == []
        assert rows["wgrad"]["note"] == "lax: took more than 10 s"
        assert "ratio" in rows["dgrad"] and "ratio" not in rows["wgrad"]
        return
    assert section["failures"] == [f"jax#12461, {stage}: Fault: took more than 10 s"]
    failed = {which for which, row in rows.items() if "failure" in row}
    assert failed == ({"dgrad"} if stage == "jaxcudnn dgrad" else {*rows})
    assert ("error" in rows["fwd"]) == (stage == "jaxcudnn dgrad")
    assert ("ratio" in rows["fwd"]) == (stage in ("jaxcudnn dgrad", "check"))


# What programs consist of


def test_windows_of_compiled_programs():
    call = "  %c = (f32[2]{0}, u8[0]{0}) custom-call(%a, %b)"
    text = "\n".join(
        [
            f'{call}, window={{size=14x14 pad=2_2}}, custom_call_target="__cudnn$convForward"',
            f'{call}, window={{size=3}}, custom_call_target="__cudnn$convBackwardInput"',
            f'{call}, custom_call_target="__cublas$gemm"',
            "  ROOT %e = f32[2]{0} convolution(%a, %b), dim_labels=b01f_o01i->b01f",
        ]
    )
    found = entries.convolutions(text)
    assert found == [("Forward", (14, 14)), ("BackwardInput", (3,)), ("", ())]
    assert [*map(str, found)] == ["Forward 14x14", "BackwardInput 3", ""]


@pytest.mark.parametrize(
    ("name", "which", "operation", "window", "missed"),
    [
        ("pytorch#9465", "dgrad", "BackwardInput", (3, 3), False),
        ("pytorch#9465", "dgrad", "Forward", (3, 3), True),
        ("pytorch#9465", "dgrad", "", (3, 3), False),
        ("pytorch#9465", "wgrad", "BackwardFilter", (3, 3), False),
        ("pytorch#9465", "wgrad", "BackwardFilter", (98, 98), True),
        ("pytorch#9465", "fwd", "BiasActivationForward", (3, 3), False),
        ("jax#8506", "dgrad", "Forward", (3, 3), False),  # the same with a reversed filter
        ("pytorch#51044", "fwd", "BackwardInput", (1, 10000), False),
        ("pytorch#51044", "fwd", "Forward", (10000,), True),
        ("pytorch#51044", "dgrad", "Forward", (10000,), False),
        ("pytorch#51044", "wgrad", "Forward", (109000,), True),
    ],
)
def test_what_xla_misses(name, which, operation, window, missed):
    (reported,) = (reported for reported in load() if reported.name == name)
    call = entries.Convolution(operation, window)
    assert entries.misses(call, reported, which) is missed


def test_route_of_lowered_programs():
    call = "custom_call @jaxcudnn_conv_v1("
    assert entries.route(f"a {call} b") == "cudnn"
    assert entries.route("stablehlo.convolution(a)") == "lax"
    assert entries.route(f"{call} stablehlo.convolution(a)") == "cudnn and lax"


def row(which, ratio, *, missed=True, transposed=False, strided=True):
    return {"pass": which, "ratio": ratio, "missed": missed, "transposed": transposed,
            "strided": strided}  # fmt: skip


def test_figures():
    rows = [
        row("fwd", 1.01),
        row("dgrad", 0.05),
        row("wgrad", 0.9, missed=False),
        row("fwd", 0.08, transposed=True),
        row("dgrad", 0.7, strided=False),
        {"pass": "fwd", "strided": True, "transposed": False},
    ]
    assert [report.is_misread(row) for row in rows] == [False, True, False, True, False, False]
    sections = {
        "reported": {"rows": rows},
        "transposed": {"rows": [{"torch_ratio": 1.04}, {"torch_ratio": 0.5}, {}]},
    }
    table = [
        [cell.strip() for cell in line.split("|")[2:5]]
        for line in report.figures_table(sections).splitlines()[2:]
    ]
    assert table == [
        ["1.03", "1.01", "reached"], ["0.1", "0.08", "reached"], ["1.05", "1.04", "reached"]
    ]  # fmt: skip


# The command


def test_command(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)  # with it scripts do not find each other
    path = tmp_path / "reported.json"
    options = ["--dry-run", "--quick", "--section", "reported", "--entry", "jax#12461"]
    assert reported_figures.main([*options, "--output", str(path)]) == 0
    rows = record.read(path)["sections"]["reported"]["rows"]
    assert [row["entry"] for row in rows] == ["jax#12461"] * 3
    assert "| jax#12461 " in capfd.readouterr().out
    assert list(tmp_path.iterdir()) == [path]


def test_a_worker_that_fails_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "has_gpu", lambda: True)
    monkeypatch.setattr(reported_figures, "supervise", lambda *_, **__: "no time was left")
    path = tmp_path / "reported.json"
    assert reported_figures.main(["--output", str(path), "--section", "transposed"]) == 1
    failures = record.read(path)["sections"]["transposed"]["failures"]
    assert failures == ["transposed: no time was left"]


def test_choice_of_lines():
    assert reported_figures.is_chosen("b", arguments(quick=False), ["a"])
    assert not reported_figures.is_chosen("b", arguments(), ["a"])
    assert reported_figures.is_chosen("a", arguments(), ["a"])
    assert reported_figures.is_chosen("abc", arguments(entry=["x", "b"]), [])
    assert {*reported_figures.QUICK_ENTRIES} <= {reported.name for reported in load()}
