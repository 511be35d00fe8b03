# SPDX-License-Identifier: Apache-2.0
"""The store of tuned choices: how it travels between machines, and its command."""

import argparse
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxcudnn import _command_store, store
from tuned import CUDNN, GPU, get, key, tuned


@pytest.fixture(autouse=True, name="path")
def own_store(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "cache" / "choices.sqlite3"
    monkeypatch.setenv("JAXCUDNN_STORE", str(path))
    return path


# How it travels


def test_export_and_import(path, tmp_path, monkeypatch):
    file = tmp_path / "out.jsonl"
    store.put(tuned(number) for number in range(20))
    assert store.export(file) == 20
    before = store.entries()
    monkeypatch.setenv("JAXCUDNN_STORE", f"{path}.other")
    assert store.import_(str(file)) == 20
    assert store.entries() == before
    assert store.import_(file) == 0
    head, *lines = file.read_text().splitlines()
    assert json.loads(head) == {"jaxcudnn_choices": 1, "entries": 20}
    assert [json.loads(line)["plan"] for line in lines] == [choice.plan for choice in before]


def test_of_two_choices_the_faster_stays(tmp_path):
    file = tmp_path / "out.jsonl"
    fast, slow = tuned(1, plan="eng1", microseconds=1.0), tuned(1, plan="eng2", microseconds=2.0)
    for here, there in ((fast, slow), (slow, fast)):
        store.clear()
        store.put([there])
        store.export(file)
        store.put([here])
        assert store.import_(file) == (here is slow)
        assert store.entries() == [fast]


def test_export_of_nothing(tmp_path):
    assert store.export(tmp_path / "out.jsonl") == 0
    assert store.import_(tmp_path / "out.jsonl") == 0


def test_export_replaces_a_file_at_once(tmp_path, path, monkeypatch):
    file, link = tmp_path / "out.jsonl", tmp_path / "link"
    file.write_text("old")
    link.symlink_to(file)
    store.put([tuned(1)])

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        with pytest.raises(OSError, match=r"export: \S+/link must be a file .* No space left"):
            store.export(link)
    assert file.read_text() == "old" and sorted(tmp_path.iterdir()) == [path.parent, link, file]
    assert store.export(link) == 1
    assert link.is_symlink() and file.read_text().startswith('{"jaxcudnn_choices"')
    assert sorted(tmp_path.iterdir()) == [path.parent, link, file]


def test_export_through_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    store.put([tuned(1)])
    with ThreadPoolExecutor(1) as threads:
        text = threads.submit(pipe.read_text)
        assert store.export(pipe) == 1
    assert pipe.is_fifo() and len(text.result().splitlines()) == 2


def test_export_elsewhere_than_possible(path, tmp_path):
    store.put([tuned(1)])
    with pytest.raises(
        ValueError, match=r"path must be another file than the store, got \S+; name"
    ):
        store.export(path)
    for place in (tmp_path, tmp_path / "no" / "out.jsonl"):
        with pytest.raises(OSError, match=rf"export: {place} must be a file that can be written"):
            store.export(place)
    assert get(1) == tuned(1)


GOOD = tuned(1).__dict__
HEAD = {"jaxcudnn_choices": 1, "entries": 1}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], r"line 1 must say that choices follow, got b''"),
        ([b"\x00\xff\xfe"], r"line 1 must say that choices follow, got b'\\x00\\xff\\xfe\\n'"),
        ([b"[" * 100_000], r"line 1 .*got b'\[\[.*\.\.\. \(it is nested too deeply\)"),
        ([b" " * (1 << 21), HEAD, GOOD], "line 1 must say that choices follow"),
        ([[1]], r"line 1 .* \(it is not an object\)"),
        ([{"entries": 1}, GOOD], r"line 1 .* \('jaxcudnn_choices'\)"),
        ([{"jaxcudnn_choices": 2, "entries": 1}], r"line 1 must say that the format is 1, got 2"),
        ([HEAD, {**GOOD, "workspace": -1}], r"line 2 must be a choice, got .*\.\.\. \(.* got -1\)"),
        ([HEAD, GOOD, {**GOOD, "gpu": 1}], r"line 3 must be a choice.* a string, got 1\)"),
        ([HEAD, {**GOOD, "odd": 1}], r"line 2 must be a choice.*unexpected keyword.*'odd'"),
        ([HEAD, {"key": "k"}], r"line 2 must be a choice.*missing 7 required"),
        ([HEAD, {**GOOD, "microseconds": float("nan")}], "line 2 .*must be finite"),
        ([HEAD, {**GOOD, "plan": "\ud800"}], "line 2 .*must be printable text"),
        ([HEAD, b'{"key": "cut sh'], r"line 2 must be a choice, got b'\{\"key"),
        ([{**HEAD, "entries": 3}, GOOD], "there must be 3 choices, as line 1 says, got 1"),
        ([HEAD, GOOD, GOOD], "there must be 1 choices, as line 1 says, got 2"),
    ],
)
def test_import_of_another_file(tmp_path, lines, said):
    file = tmp_path / "in.jsonl"
    written = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    file.write_bytes(b"".join(line + b"\n" for line in written))
    said = (
        rf"^jaxcudnn\.store\.import_: {re.escape(str(file))}: {said}.*; write the file again with"
    )
    with pytest.raises(ValueError, match=said):
        store.import_(file)
    assert store.entries() == []


def test_import_of_no_file(tmp_path):
    for place in (tmp_path, tmp_path / "none"):
        with pytest.raises(
            OSError, match=rf"import_: {place} must be a file that can be read, got"
        ):
            store.import_(place)


# The command


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    _command_store.add(parser.add_subparsers())
    args = parser.parse_args(["store", *words])
    return args.run(args)


def test_command(path, tmp_path, capsys):
    def said(*words: str) -> list[str]:
        assert command(*words) == 0
        return capsys.readouterr().out.splitlines()

    store.put([tuned(1), tuned(22, gpu="H100")])
    size = path.stat().st_size
    info = [f"file: {path}", "choices: 2 of at most 50,000", f"size: {size:,} bytes"]
    assert said("info") == said() == info
    assert said("path") == [str(path)]
    heads, *rows = said("list")
    assert heads.split() == [
        "gpu",
        "cudnn",
        "us",
        "workspace",
        "tried",
        "ms",
        "spent",
        "plan",
        "key",
    ]
    assert [row.split() for row in rows] == [
        ["H100", CUDNN, "22.50", "22", "22", "22.2", "eng22_k2=0", *key(22).split()],
        [*GPU.split(), CUDNN, "1.50", "1", "1", "1.2", "eng1_k2=0", *key(1).split()],
    ]
    assert {row.index("eng") for row in rows} == {heads.index("plan")}
    file = str(tmp_path / "out.jsonl")
    assert said("export", file) == [f"2 choices written to {file}"]
    assert said("clear") == ["2 choices forgotten"]
    assert said("import", file) == [f"2 choices of {file} were new, or faster"]
    Path(f"{path}.corrupt-1").touch()
    assert said()[-1] == f"set aside, corrupt: {path}.corrupt-1"


def test_command_where_the_store_is_off(monkeypatch, capsys):
    monkeypatch.setenv("JAXCUDNN_STORE", "off")
    assert [command(), command("path"), command("list"), command("export", "x")] == [0, 0, 0, 1]
    said = capsys.readouterr()
    assert said.out.splitlines()[:2] == ["off, by the environment variable JAXCUDNN_STORE", "off"]
    assert said.err.startswith("jaxcudnn.store.export: the store must be on")


def test_command_that_fails(tmp_path, capsys):
    assert command("import", str(tmp_path)) == 1
    assert f"import_: {tmp_path} must be a file that can be read" in capsys.readouterr().err


def test_command_whose_reader_leaves(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert command() == 0
        out.write("goes to /dev/null, as what Python flushes at its end")
