# SPDX-License-Identifier: Apache-2.0
"""The store of tuned choices: what it keeps, where, and for how long."""

import importlib
import os
import re
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import platformdirs
import pytest

from jaxcudnn import _store_file, _store_schema, store
from tuned import CUDNN, GPU, get, key, tuned

DAY = 24 * 60 * 60


@pytest.fixture(autouse=True, name="path")
def own_store(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "cache" / "choices.sqlite3"
    monkeypatch.setenv("JAXCUDNN_STORE", str(path))
    return path


def used(path: Path) -> dict[int, int]:
    """When each entry was used last, by its number."""
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT workspace, used FROM choices").fetchall()
    connection.close()
    return dict(rows)


# What it keeps


def test_what_was_put_is_found():
    assert get(1) is None
    store.put(tuned(number) for number in range(3))
    assert [get(number) for number in range(3)] == [tuned(number) for number in range(3)]
    assert get(3) is None
    assert store.entries() == [tuned(number) for number in range(3)]


def test_another_process_would_find_it(path):
    store.put([tuned(1)])
    _store_file.at(path).close()
    assert get(1) == tuned(1)


def test_every_part_of_the_key_counts():
    others = [tuned(1), tuned(2, key=key(1), gpu="H100"), tuned(3, key=key(1), cudnn="9.20.0")]
    store.put(others)
    assert get(1) == others[0]
    assert store.get(key(1), "H100", CUDNN) == others[1]
    assert store.get(key(1), GPU, "9.20.0") == others[2]
    assert store.entries() == [others[1], others[0], others[2]]


def test_the_last_put_stays():
    store.put([tuned(1), tuned(2, key=key(1))])
    assert get(1) == tuned(2, key=key(1))
    store.put([tuned(1)])
    assert store.entries() == [tuned(1)]


def test_reading_makes_no_file(path):
    store.put([])
    assert get(1) is None
    assert store.entries() == [] and store.clear() == 0
    assert store.info() == store.Info(path, 0, store.MAX_ENTRIES, 0, ())
    assert not path.parent.exists()


def test_another_process_makes_it_while_this_one_looks(path, monkeypatch):
    connect = _store_file._connect

    def make(said: str) -> None:
        if "user_version" in said:
            with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as other:
                _store_schema.prepare(other)

    def traced(path):
        connection = connect(path)
        connection.set_trace_callback(make)
        return connection

    monkeypatch.setattr(_store_file, "_connect", traced)
    store.put([tuned(1)])
    assert get(1) == tuned(1)


def target(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:  # another thread has closed it
        return ""


def test_file_that_was_deleted_is_begun_anew(path):
    store.put([tuned(1)])
    path.unlink()
    assert get(1) is None
    assert not [link for link in map(target, Path("/proc/self/fd").iterdir()) if str(path) in link]
    store.put([tuned(2)])
    assert store.entries() == [tuned(2)]


def test_file_that_is_deleted_under_way_is_begun_anew(path):
    store.put([tuned(1)])

    def work(connection):
        if get_one(connection):
            path.unlink()
        connection.execute("INSERT INTO choices (key) VALUES ('new')")
        return get_one(connection)

    def get_one(connection):
        return connection.execute("SELECT workspace FROM choices").fetchone()

    assert _store_file.at(path).write(work, None) == (None,)


def test_a_transaction_happens_wholly_or_not_at_all(path):
    store.put([tuned(1)])

    def work(connection):
        connection.execute("DELETE FROM choices")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _store_file.at(path).write(work, None)
    assert store.entries() == [tuned(1)]


def test_readers_need_no_shared_memory_and_a_power_cut_costs_nothing(path):
    store.put([tuned(1)])

    def pragmas(connection):
        names = ("journal_mode", "synchronous")
        return [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names]

    assert _store_file.at(path).read(pragmas, None) == ["delete", 2]


def test_threads_share_it():
    start = threading.Barrier(4)

    def work(first: int) -> bool:
        start.wait()
        numbers = range(first, first + 10)
        for number in numbers:
            store.put([tuned(number)])
        return all(get(number) == tuned(number) for number in numbers)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, (0, 10, 20, 30))) == [True] * 4
    assert store.info().entries == 40


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"key": 5}, TypeError, "key must be a string, got 5"),
        ({"plan": ""}, ValueError, "plan must be printable text, got ''"),
        ({"gpu": "a\nb"}, ValueError, r"gpu must be printable text, got 'a\\nb'"),
        ({"cudnn": "\ud800"}, ValueError, "cudnn must be printable text"),
        ({"workspace": 1.0}, TypeError, "workspace must be an integer, got 1.0"),
        ({"tried": True}, TypeError, "tried must be an integer, got True"),
        ({"tried": -1}, ValueError, r"tried must be from 0 to 2\^63 - 1, got -1"),
        ({"workspace": 1 << 63}, ValueError, r"workspace must be from 0 to 2\^63 - 1, got 9"),
        ({"microseconds": "5"}, TypeError, "microseconds must be a number, got '5'"),
        ({"microseconds": False}, TypeError, "microseconds must be a number, got False"),
        ({"microseconds": float("nan")}, ValueError, "must be finite and at least 0, got nan"),
        ({"milliseconds": float("inf")}, ValueError, "must be finite and at least 0, got inf"),
        ({"milliseconds": -0.5}, ValueError, "must be finite and at least 0, got -0.5"),
        ({"milliseconds": 10**400}, ValueError, "must be finite and at least 0, got 10"),
    ],
)
def test_what_is_no_choice(changes, error, said):
    with pytest.raises(error, match=r"jaxcudnn\.store\.Choice: .*" + said):
        tuned(1, **changes)


def test_whole_numbers_are_times():
    store.put([tuned(1, microseconds=10**20)])
    assert get(1) == tuned(1, microseconds=1e20)


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"store\.get: key, gpu and cudnn must be strings, got \(5"):
        store.get(5, GPU, CUDNN)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"store\.put: choices must be Choice objects, got 'x'"):
        store.put([tuned(1), "x"])  # pyright: ignore[reportArgumentType]
    assert store.entries() == []


# Where it is


def test_path(monkeypatch, path, tmp_path):
    assert store.path() == path
    monkeypatch.setenv("JAXCUDNN_STORE", "~/choices")
    assert store.path() == Path.home() / "choices"
    monkeypatch.delenv("JAXCUDNN_STORE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.path() == Path(platformdirs.user_cache_dir("jaxcudnn")) / "choices-2.sqlite3"
    assert store.path() == tmp_path / "jaxcudnn" / "choices-2.sqlite3"


def test_relative_path_stays_where_it_was(monkeypatch, tmp_path):
    name = f"{tmp_path.name}.sqlite3"  # that no other test has used
    monkeypatch.setenv("JAXCUDNN_STORE", name)
    monkeypatch.chdir(tmp_path)
    assert store.path() == tmp_path / name
    monkeypatch.chdir(tmp_path.parent)
    assert store.path() == tmp_path / name


@pytest.mark.parametrize("value", ["off", ""])
def test_off(monkeypatch, path, tmp_path, value):
    monkeypatch.setenv("JAXCUDNN_STORE", value)
    store.put([tuned(1)])
    assert store.path() is None and get(1) is None
    assert store.entries() == [] and store.clear() == 0
    assert store.info() == store.Info(None, 0, store.MAX_ENTRIES, 0, ())
    said = rf"the store must be on, got JAXCUDNN_STORE='{value}'; unset it, or name a file"
    with pytest.raises(ValueError, match=r"jaxcudnn\.store\.export: " + said):
        store.export(tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match=r"jaxcudnn\.store\.import_: " + said):
        store.import_(tmp_path / "out.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_two_stores(monkeypatch, path):
    store.put([tuned(1)])
    monkeypatch.setenv("JAXCUDNN_STORE", f"{path}.other")
    assert get(1) is None
    store.put([tuned(2)])
    monkeypatch.setenv("JAXCUDNN_STORE", str(path))
    assert store.entries() == [tuned(1)]


def test_clear(path):
    store.put(tuned(number) for number in range(100))
    full = store.info()
    assert (full.entries, full.bytes) == (100, path.stat().st_size)
    assert store.clear() == 100
    assert get(1) is None
    assert store.info().bytes < full.bytes / 4
    _store_file.at(path).close()
    store.put([tuned(1)])
    assert store.entries() == [tuned(1)]


# How long it keeps it


@pytest.fixture(name="clock")
def make_clock(monkeypatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1_000_000.0)
    for module in (store, _store_file):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: clock.now))
    return clock


def test_reading_within_a_day_writes_nothing(path, clock):
    store.put([tuned(1)])
    before = path.read_bytes(), path.stat().st_mtime_ns
    clock.now += DAY
    assert get(1) == tuned(1)
    _store_file.at(path).record_uses()
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    clock.now += 1
    assert get(1) == tuned(1)
    assert path.read_bytes() == before[0]  # it is written when something else is
    store.put([tuned(2)])
    assert used(path) == {1: 1_000_001 + DAY, 2: 1_000_001 + DAY}
    before = path.stat().st_mtime_ns
    _store_file.at(path).record_uses()
    assert path.stat().st_mtime_ns == before


def test_use_in_the_future_was_a_wrong_clock(path, clock):
    store.put([tuned(1)])
    clock.now -= 5
    get(1)
    _store_file.at(path).record_uses()
    assert used(path) == {1: 999_995}


def test_use_of_another_store_is_recorded_there(path, clock, monkeypatch):
    store.put([tuned(1)])
    clock.now += 2 * DAY
    get(1)
    monkeypatch.setenv("JAXCUDNN_STORE", f"{path}.other")
    get(1)
    assert used(path) == {1: 1_000_000 + 2 * DAY}


def test_least_recently_used_go_first_and_some_at_once(path, clock, monkeypatch):
    monkeypatch.setattr(store, "MAX_ENTRIES", 20)
    monkeypatch.setattr(store, "_EVICTED_AT_ONCE", 5)
    for number in range(20):
        clock.now += 1
        store.put([tuned(number)])
    assert store.info().entries == 20
    clock.now += 2 * DAY
    get(0)
    store.put([tuned(20)])
    assert sorted(used(path)) == [0, *range(7, 21)]
    for number in range(21, 26):
        store.put([tuned(number)])
    assert store.info().entries == 20


def test_more_than_it_may_hold(monkeypatch):
    monkeypatch.setattr(store, "MAX_ENTRIES", 20)
    monkeypatch.setattr(store, "_EVICTED_AT_ONCE", 5)
    store.put(tuned(number) for number in range(100))
    assert store.entries() == sorted(map(tuned, range(85, 100)), key=lambda choice: choice.key)


# The script that times it


def test_figures(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[1] / "benchmarks")
    figures = importlib.import_module("store_figures")
    arguments = ["--entries", "60", "--repeats", "30", "--folder", str(tmp_path)]
    assert figures.main(arguments) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head == "60 entries, 30 repeats"
    parsed = [re.fullmatch(r"(.*?) +median +(\S+) us  99th percentile +(\S+) us", r) for r in rows]
    medians = {row[1]: float(row[2]) for row in parsed if row}
    assert list(medians) == ["get, found", "get, not found", "put, one"]
    assert medians["get, found"] < 1000 and medians["get, not found"] < 1000
    assert list(tmp_path.iterdir()) == []
