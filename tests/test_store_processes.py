# SPDX-License-Identifier: Apache-2.0
"""The store in many processes: at once, killed, forked, and for users who may not write.

The processes are forks of a small one, since pytest's own has threads.
"""

import os
import re
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from jaxcudnn import _store_file, store
from processes import run_python
from tuned import CUDNN, GPU, get, tuned

WORKERS, ROUNDS = 8, 15


def in_new_process(path: Path, function: Callable[[Path], object]) -> list[str]:
    """The lines that a function of this module prints in a process of its own."""
    folder = Path(__file__).parent
    script = f"""
        import sys
        sys.path.append({str(folder)!r})
        import test_store_processes as module
        module.{function.__name__}(module.Path({str(path)!r}))
    """
    return run_python(script, JAXCUDNN_STORE=str(path))


def fork(works: Sequence[Callable[[], object]]) -> list[int]:
    """Start a process for each, all at once, and give their exit statuses."""
    begin, started = os.pipe()
    children = []
    for work in works:
        if (child := os.fork()) == 0:
            signal.alarm(60)  # ends a process that waits forever
            status = 1
            try:
                os.close(started)
                os.read(begin, 1)
                work()
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(status)
        children.append(child)
    os.close(started)
    os.close(begin)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


@pytest.fixture(name="path")
def make_path(tmp_path) -> Path:
    return tmp_path / "choices.sqlite3"


# Many at once


def many_writers(path: Path) -> None:
    warnings.simplefilter("error", RuntimeWarning)

    def work(worker: int) -> None:
        for number in range(worker * ROUNDS, (worker + 1) * ROUNDS):
            store.put([tuned(number), tuned(number, key="shared")])
            assert get(number) == tuned(number)
            shared = store.get("shared", GPU, CUDNN)
            assert shared and shared == tuned(shared.workspace, key="shared")

    print(fork([lambda worker=worker: work(worker) for worker in range(WORKERS)]))


def test_many_writers_lose_nothing_and_tear_nothing(path, monkeypatch):
    assert in_new_process(path, many_writers) == [str([0] * WORKERS)]
    monkeypatch.setenv("JAXCUDNN_STORE", str(path))
    assert store.info().entries == WORKERS * ROUNDS + 1
    assert all(get(number) == tuned(number) for number in range(WORKERS * ROUNDS))


def many_find_it_corrupt(path: Path) -> None:
    path.write_text("not a database\n" * 1000)

    def work(worker: int) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(worker * ROUNDS, (worker + 1) * ROUNDS):
                store.put([tuned(number)])
        print(*(f"warned: {warning.message}" for warning in caught), sep="\n", end="")

    print(fork([lambda worker=worker: work(worker) for worker in range(WORKERS)]))


def test_corrupt_store_is_set_aside_by_one_of_many(path, monkeypatch):
    lines = in_new_process(path, many_find_it_corrupt)
    (said,) = [line for line in lines if line.startswith("warned: ")]
    assert "was corrupt" in said
    monkeypatch.setenv("JAXCUDNN_STORE", str(path))
    info = store.info()
    assert (info.entries, len(info.set_aside)) == (WORKERS * ROUNDS, 1)


# Killed


def killed_while_writing(path: Path) -> None:
    store.put(tuned(number) for number in range(10))

    def write(connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA cache_size = 10")  # so that much goes to the file at once
        connection.execute("UPDATE choices SET plan = 'half'")
        rows = [(str(number) * 400,) for number in range(2000)]
        connection.executemany("INSERT INTO choices (key) VALUES (?)", rows)
        os.kill(os.getpid(), signal.SIGKILL)

    size = path.stat().st_size
    print(fork([lambda: _store_file.at(path).write(write, None)]))
    print(path.stat().st_size > 10 * size, Path(f"{path}-journal").exists())


def test_process_killed_while_it_writes_changes_nothing(path, monkeypatch):
    lines = in_new_process(path, killed_while_writing)
    assert lines == [f"[-{signal.SIGKILL:d}]", "True True"]
    monkeypatch.setenv("JAXCUDNN_STORE", str(path))
    assert get(3) == tuned(3)
    assert store.entries() == [tuned(number) for number in range(10)]
    store.put([tuned(10)])
    assert store.info().entries == 11 and store.info().set_aside == ()


# Forked


def forked(path: Path) -> None:
    import threading

    store.put([tuned(1)])
    writing = threading.Event()

    def slow(connection: sqlite3.Connection) -> None:
        connection.execute("UPDATE choices SET plan = 'slowly'")
        writing.set()
        time.sleep(0.2)

    connection = _store_file.at(path)._connection
    references = sys.getrefcount(connection)

    def child() -> None:
        assert _store_file.at(path)._connection is None
        assert sys.getrefcount(connection) == references  # it is never closed
        assert get(1) == tuned(1, plan="slowly")
        store.put([tuned(2)])

    thread = threading.Thread(target=lambda: _store_file.at(path).write(slow, None))
    thread.start()
    writing.wait()
    print(fork([child]))
    thread.join()
    store.put([tuned(3)])
    print([choice.workspace for choice in store.entries()])

    # A child that ends as a process does, and leaves the parent's connection and uses alone.
    with closing(sqlite3.connect(path)) as other:
        other.execute("UPDATE choices SET used = 0")
        other.commit()
    get(1)
    if os.fork() == 0:
        sys.exit()
    os.wait()
    print(used(path))
    get(3)


def used(path: Path) -> list[int]:
    """The numbers of the entries that were used lately."""
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT workspace FROM choices WHERE used > 0 ORDER BY used")
        return [number for (number,) in rows]


def test_a_fork_opens_its_own_connection(path):
    assert in_new_process(path, forked) == ["[0]", "[1, 2, 3]", "[]"]
    assert sorted(used(path)) == [1, 3]  # recorded when the process ended


# Who may not write


def without_rights(folder: Path) -> None:
    """Root may write anything, so the children are another user."""
    path = folder / "choices.sqlite3"
    os.environ["JAXCUDNN_STORE"] = str(path)

    def use() -> None:
        if os.getuid() == 0:
            os.setuid(65534)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = [get(1) == tuned(1) for _ in range(2)]
            for number in range(2):
                store.put([tuned(number)])
        (warning,) = caught
        print(found, str(warning.message).partition(" cannot be ")[2].partition(", so")[0])

    store.put([tuned(1)])
    path.chmod(0o444)
    folder.chmod(0o555)
    fork([use])
    path.chmod(0)
    fork([use])
    folder.chmod(0)
    fork([use])
    folder.chmod(0o700)
    path.unlink()
    folder.chmod(0o555)
    fork([use])
    folder.chmod(0o700)


def test_users_without_rights_read_what_they_may():
    with tempfile.TemporaryDirectory() as name:  # pytest's own are closed to other users
        folder = Path(name)
        readable, closed_file, closed_folder, no_file = in_new_process(folder, without_rights)
    unable = r"\(unable to open database file \(SQLITE_CANTOPEN\w*\)\)"
    readonly = r"\(attempt to write a readonly database \(SQLITE_READONLY\w*\)\)"
    assert re.fullmatch(rf"\[True, True\] written {readonly}", readable)
    assert re.fullmatch(rf"\[False, False\] read {unable}", closed_file)
    assert closed_folder.startswith("[False, False] read ([Errno 13] Permission denied: ")
    assert re.fullmatch(rf"\[False, False\] written {unable}", no_file)
