# SPDX-License-Identifier: Apache-2.0
"""A store that is corrupt, another's, or cannot be read or written: one warning, and no more."""

import os
import random
import re
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from jaxcudnn import _store_file, _store_schema, store
from tuned import CUDNN, GPU, get, key, tuned


@pytest.fixture(autouse=True, name="path")
def own_store(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "choices.sqlite3"
    monkeypatch.setenv("JAXCUDNN_STORE", str(path))
    return path


def warned(function: Callable[[], object]) -> list[str]:
    """What it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    assert all(warning.category is RuntimeWarning for warning in caught)
    return [str(warning.message) for warning in caught]


def execute(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for sql in statements:
            connection.execute(sql)
        connection.commit()


# Corrupt


def cut(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size)


def replaced(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def changed(old: bytes, new: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = path.read_bytes()
        assert old in data and len(old) == len(new)
        path.write_bytes(data.replace(old, new))

    return change


def overwritten(path: Path) -> None:
    """All but the first page, which says that this is a store."""
    data = path.read_bytes()
    path.write_bytes(data[:4096] + random.Random(1).randbytes(len(data) - 4096))


def altered(*statements: str) -> Callable[[Path], None]:
    return lambda path: execute(path, *statements)


CORRUPTIONS = {
    "text": replaced(b"not a database\n" * 1000),
    "zeros": replaced(bytes(100_000)),
    "random": replaced(random.Random(0).randbytes(50_000)),
    "cut in the head": cut(50),
    "cut after the head": cut(100),
    "cut in the first page": cut(2000),
    "cut after the first page": cut(4096),
    "cut in the middle": cut(30_000),
    "pages overwritten": overwritten,
    "text that is not UTF-8": changed(b"eng7_k2=0", b"eng7_k2=\xff"),
    "a number that is text": altered("UPDATE choices SET microseconds = 'fast'"),
    "a number that is absent": altered("UPDATE choices SET tried = NULL"),
    "text that is absent": altered("UPDATE choices SET plan = NULL"),
    "a table that is absent": altered("DROP TABLE choices"),
    "a column that is absent": altered("DROP TABLE choices", "CREATE TABLE choices (key, used)"),
    "a column too many": altered("ALTER TABLE choices ADD COLUMN more TEXT"),
    "an index that is absent": altered("DROP INDEX choices_used"),
}


# What a connection that is open has read already, or does not need.
UNNOTICED = {
    "pages overwritten",
    "text that is not UTF-8",
    "a column too many",
    "an index that is absent",
}


@pytest.mark.parametrize(
    ("name", "opened"),
    [(name, False) for name in CORRUPTIONS]
    + [(name, True) for name in CORRUPTIONS if name not in UNNOTICED],
)
def test_corrupt_store_is_set_aside_and_begun_anew(path, name, opened):
    store.put(tuned(number) for number in range(100))
    if not opened:
        _store_file.at(path).close()
    CORRUPTIONS[name](path)
    before = path.read_bytes()
    (said,) = warned(lambda: [get(number) for number in range(100)])
    aside = Path(f"{path}.corrupt-1")
    assert re.fullmatch(
        rf"jaxcudnn: the store of tuned choices at {path} was corrupt \(.+\); what it held is in "
        rf"{aside}, it is begun anew, and convolutions are measured again. Delete {aside}, or "
        rf"restore {path} from a copy",
        said,
    )
    assert aside.read_bytes() == before
    store.put([tuned(1)])
    assert store.entries() == [tuned(1)]
    assert store.info().set_aside == (aside,)


FUNCTIONS = [lambda: store.put([tuned(1)]), store.entries, store.info]


@pytest.mark.parametrize("function", FUNCTIONS, ids=["put", "entries", "info"])
def test_every_function_sets_it_aside(path, function):
    path.write_text("not a database\n" * 1000)
    (said,) = warned(function)
    assert "was corrupt (file is not a database)" in said
    assert len(store.info().set_aside) == 1


@pytest.mark.parametrize("data", [b"", b"x"], ids=["none", "one"])
def test_so_few_bytes_are_a_store_without_choices(path, data):
    """One byte is what SQLite itself writes to some file systems before a first page."""
    path.write_bytes(data)
    assert get(1) is None
    store.put([tuned(1)])
    assert get(1) == tuned(1)
    assert store.info().set_aside == ()


def test_corrupt_again_is_said_once_and_only_so_many_are_kept(path):
    for number in range(12):
        path.write_text(f"not a database {number}\n" * 1000)
        assert len(warned(lambda: get(1))) == (number == 0)
    kept = store.info().set_aside
    assert kept == tuple(Path(f"{path}.corrupt-{n}") for n in range(1, 10))
    assert [file.read_text().split()[3] for file in kept] == [*"01234567", "11"]


def test_sound_store_is_not_set_aside(path):
    """As when another process has begun a new one since this one read the corrupt."""
    store.put([tuned(1)])
    errors = [sqlite3.DatabaseError("as if it were corrupt")]

    def work(connection):
        if errors:
            raise errors.pop()
        return "read"

    assert _store_file.at(path).read(work, None) == "read"
    assert get(1) == tuned(1) and store.info().set_aside == ()


def test_setting_aside_waits_for_who_is_writing(path, monkeypatch):
    store.put([tuned(1)])
    altered("UPDATE choices SET tried = NULL")(path)
    script = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("begun", flush=True)
sys.stdin.read(1)
connection.execute("UPDATE choices SET plan = 'written'")
connection.execute("COMMIT")
"""
    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin and other.stdout and other.stdout.readline() == b"begun\n"
        with monkeypatch.context() as patched:
            patched.setattr(_store_file, "BUSY_SECONDS", 0.1)
            (said,) = warned(lambda: get(1))
        assert re.search(
            r"cannot be read \(it is corrupt \(.*\), and was not set aside: other processes have "
            r"kept it locked for 0\.1 s\), so",
            said,
        )
        threading.Timer(0.2, other.stdin.close).start()  # which lets it go on
        (said,) = warned(store.entries)
        (aside,) = store.info().set_aside
        assert b"written" in aside.read_bytes()


def test_setting_aside_that_fails_is_said(path):
    path.write_text("not a database\n" * 1000)
    Path(f"{path}.corrupt-9").mkdir()
    for number in range(1, 9):
        Path(f"{path}.corrupt-{number}").touch()
    (said,) = warned(lambda: get(1))
    assert "cannot be read (it is corrupt (file is not a database), and was not set aside: " in said
    assert f"Is a directory: '{path}.corrupt-9'" in said
    assert path.read_text().startswith("not a database")


def test_corrupt_store_that_vanishes_is_no_fault(path):
    store.put([tuned(1)])

    def work(connection):
        path.unlink()  # as another process may
        raise sqlite3.DatabaseError("as if it were corrupt")

    assert _store_file.at(path).read(work, "absent") == "absent"
    assert not path.exists()


# Another's


def other_version(path: Path) -> None:
    store.put([tuned(1)])
    _store_file.at(path).close()
    execute(path, "PRAGMA user_version = 7")


def other_program(path: Path) -> None:
    execute(path, "CREATE TABLE choices (key)", "PRAGMA user_version = 2")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            other_version,
            "it was written by another version of jaxcudnn: its schema is 7, this version's 2",
        ),
        (other_program, "it is another program's SQLite file"),
    ],
)
def test_file_of_anothers_is_left_alone(path, make, reason):
    make(path)
    before = path.read_bytes()

    def use():
        assert get(1) is None
        store.put([tuned(2)])
        assert get(2) is None

    assert warned(use) == [
        f"jaxcudnn: the store of tuned choices at {path} cannot be read ({reason}), so what is "
        f"measured is forgotten when the process ends; set JAXCUDNN_STORE to a file that can be "
        f"read and written, or to 'off' for none"
    ]
    said = rf"{path} must be a file that can be read and written, got: {reason}; set JAXCUDNN_STORE"
    for function in (store.entries, store.clear, store.info):
        with pytest.raises(OSError, match=rf"^jaxcudnn\.store\.{function.__name__}: {said}"):
            function()
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


# Trouble with files


def under_a_file(path: Path, monkeypatch) -> None:
    path.write_text("")
    monkeypatch.setenv("JAXCUDNN_STORE", str(path / "choices.sqlite3"))


def directory(path: Path, monkeypatch) -> None:
    path.mkdir()


def directory_now(path: Path, monkeypatch) -> None:
    store.put([tuned(1)])
    path.unlink()
    path.mkdir()


def device(path: Path, monkeypatch) -> None:
    monkeypatch.setenv("JAXCUDNN_STORE", os.devnull)


def pipe(path: Path, monkeypatch) -> None:
    os.mkfifo(path)


def no_home(path: Path, monkeypatch) -> None:
    monkeypatch.delenv("JAXCUDNN_STORE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it is without one


def no_home_named(path: Path, monkeypatch) -> None:
    monkeypatch.setenv("JAXCUDNN_STORE", "~nobody-has-this-name/choices")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (under_a_file, r"\[Errno 20\] Not a directory: '.*'"),
        (directory, "it is not a regular file"),
        (directory_now, "it is not a regular file"),
        (device, "it is not a regular file"),
        (pipe, "it is not a regular file"),
        (no_home, "there is no home directory"),
        (no_home_named, "there is no home directory"),
    ],
)
def test_store_that_cannot_be_read_is_said_once(path, monkeypatch, make, reason):
    make(path, monkeypatch)
    listed = list(path.parent.iterdir())

    def use():
        for _ in range(2):
            assert get(1) is None
            store.put([tuned(1)])

    (said,) = warned(use)
    assert re.fullmatch(
        rf"jaxcudnn: the store of tuned choices at {store.path()} cannot be read \({reason}\), so "
        r"what is measured is forgotten when the process ends; set JAXCUDNN_STORE .*",
        said,
    )
    for function in (store.entries, store.clear, store.info):
        with pytest.raises(
            OSError, match=f"must be a file that can be read .*, got: {reason}; set"
        ):
            function()
    assert list(path.parent.iterdir()) == listed


def test_what_cannot_be_read_is_not_written(path, monkeypatch):
    """The first to fail may also be `put`."""
    under_a_file(path, monkeypatch)
    (said,) = warned(lambda: [store.put([tuned(1)]), get(1)])
    assert "cannot be written ([Errno 20] Not a directory" in said


def test_store_that_stays_locked_is_waited_for_once(path, monkeypatch):
    monkeypatch.setattr(_store_file, "BUSY_SECONDS", 0.1)
    store.put([tuned(1)])
    _store_file.at(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        start = time.perf_counter()
        (said,) = warned(lambda: get(1))
        assert time.perf_counter() - start > 0.08
        monkeypatch.setattr(_store_file, "_connect", lambda _: pytest.fail("it is tried again"))
        assert get(1) is None
        store.put([tuned(1)])
    assert "cannot be read (database is locked (SQLITE_BUSY))" in said


def limited(path: Path, pragma: str) -> None:
    _store_file.at(path).read(lambda connection: connection.execute(pragma).fetchall(), None)


@pytest.mark.parametrize(
    ("pragma", "reason"),
    [
        ("query_only = 1", "attempt to write a readonly database (SQLITE_READONLY)"),
        ("max_page_count = 1", "database or disk is full (SQLITE_FULL)"),
    ],
)
def test_store_that_cannot_be_written_is_still_read(path, pragma, reason):
    store.put([tuned(1)])
    execute(path, "UPDATE choices SET used = 0")
    limited(path, f"PRAGMA {pragma}")

    def use():
        assert get(1) == tuned(1)
        for _ in range(2):
            store.put(tuned(number) for number in range(2, 300))
            assert get(1) == tuned(1) and get(2) is None
        _store_file.at(path).record_uses()

    (said,) = warned(use)
    assert f"at {path} cannot be written ({reason}), so what is measured is forgotten" in said
    assert store.entries() == [tuned(1)]


def test_last_use_that_cannot_be_recorded_is_not_worth_a_warning(path):
    store.put([tuned(1)])
    execute(path, "UPDATE choices SET used = 0")
    limited(path, "PRAGMA query_only = 1")
    assert get(1) == tuned(1)
    _store_file.at(path).record_uses()
    assert get(1) == tuned(1)


def test_clear_that_cannot(path):
    store.put([tuned(1)])
    limited(path, "PRAGMA query_only = 1")
    with pytest.raises(OSError, match=r"^jaxcudnn\.store\.clear: \S+ must be .* readonly database"):
        store.clear()
    assert store.entries() == [tuned(1)]


def test_import_that_cannot(path, tmp_path):
    store.put([tuned(1)])
    store.export(tmp_path / "out.jsonl")
    store.clear()
    limited(path, "PRAGMA query_only = 1")
    with pytest.raises(OSError, match=r"^jaxcudnn\.store\.import_: \S+ must be .* readonly databa"):
        store.import_(tmp_path / "out.jsonl")


def test_corruption_is_told_from_other_errors():
    corrupt = sqlite3.DatabaseError()
    corrupt.sqlite_errorcode = sqlite3.SQLITE_CORRUPT_INDEX
    busy = sqlite3.OperationalError()
    busy.sqlite_errorcode = sqlite3.SQLITE_BUSY_RECOVERY
    assert _store_schema.is_corruption(corrupt) and not _store_schema.is_corruption(busy)


def test_store_that_cannot_be_looked_through_is_not_corrupt(path):
    store.put([tuned(1)])
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with closing(sqlite3.connect(path, timeout=0)) as connection:
            with pytest.raises(sqlite3.OperationalError, match="database is locked"):
                _store_schema.is_sound(connection)


def test_another_store_is_tried_after_one_that_fails(path, monkeypatch):
    path.mkdir()
    assert len(warned(lambda: get(1))) == 1
    monkeypatch.setenv("JAXCUDNN_STORE", f"{path}.other")
    store.put([tuned(1)])
    assert store.get(key(1), GPU, CUDNN) == tuned(1)
