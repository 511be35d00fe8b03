# SPDX-License-Identifier: Apache-2.0
"""The store of tuned choices: what measuring found, kept for the processes to come.

It is one SQLite file, `choices-2.sqlite3` in the user's cache folder, or the one that the
environment variable `JAXCUDNN_STORE` names; `JAXCUDNN_STORE=off` (or empty) has none. It keeps the
50,000 choices used last. `get` and `put`, which convolutions call, never fail over the file: they
warn once, and what is measured is then forgotten when the process ends. The other functions raise.
"""

import functools
import os
import sqlite3
import time
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import platformdirs

from . import _store_file, _store_schema, _store_transfer
from ._choice import Choice as Choice

MAX_ENTRIES = 50_000
"""How many choices are kept; beyond, those that have not been used for the longest time go."""

_EVICTED_AT_ONCE = MAX_ENTRIES // 50
"""How many more go than have to, so that most writes find room."""

_USE_SECONDS = 24 * 60 * 60
"""By how much the recorded last use may be too old: a day, so that reading seldom writes."""

_VARIABLE = "JAXCUDNN_STORE"
_OFF = ("", "off")

# A later schema gets a file of another name, so that environments with different versions of
# jaxcudnn all remember. Only a file that the variable names can be another version's: it is left
# alone, with a warning.
_NAME = "choices-2.sqlite3"

_REMEDY = f"set {_VARIABLE} to a file that can be read and written, or to 'off' for none"

_COLUMNS = _store_schema.COLUMNS
_KEY = ("key", "gpu", "cudnn")
_GET = (
    f"SELECT {_COLUMNS}, used BETWEEN ? AND ? FROM choices WHERE key = ? AND gpu = ? AND cudnn = ?"
)
_CHANGES = ", ".join(
    f"{name} = excluded.{name}"
    for name in [*(each.name for each in fields(Choice)), "used"]
    if name not in _KEY
)
_PUT = (
    f"INSERT INTO choices ({_COLUMNS}, used) VALUES ({'?, ' * len(fields(Choice))}?) "
    f"ON CONFLICT ({', '.join(_KEY)}) DO UPDATE SET {_CHANGES}"
)
_PUT_IF_FASTER = f"{_PUT} WHERE excluded.microseconds < choices.microseconds"
_EVICT = "DELETE FROM choices WHERE id IN (SELECT id FROM choices ORDER BY used, id LIMIT ?)"


@dataclass(frozen=True)
class Info:
    """What the store is.

    Attributes:
        path: the file, which need not exist yet; None if the store is off.
        entries: how many choices it holds.
        max_entries: how many it may hold.
        bytes: the file's size.
        set_aside: copies of what it held when it was corrupt; nothing reads them.
    """

    path: Path | None
    entries: int
    max_entries: int
    bytes: int
    set_aside: tuple[Path, ...]


def path() -> Path | None:
    """Give the store's file, which need not exist yet, or None if the store is off."""
    named = os.environ.get(_VARIABLE)
    if named is not None:
        return None if named in _OFF else _absolute(named)
    try:
        return Path(platformdirs.user_cache_dir("jaxcudnn"), _NAME)
    except RuntimeError:  # there is no home directory, which is said where the file is opened
        return Path("~", ".cache", "jaxcudnn", _NAME)


def get(key: str, gpu: str, cudnn: str) -> Choice | None:
    """Give the choice that is kept for a convolution, or None.

    Args:
        key: the convolution and the options that bear on the choice.
        gpu: the GPU's model.
        cudnn: cuDNN's version.

    Raises:
        TypeError: for what is not a string.
    """
    names = (key, gpu, cudnn)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"jaxcudnn.store.get: key, gpu and cudnn must be strings, got {names!r}")
    file = _file()
    if file is None or not file.readable:
        return None

    def look_up(connection: sqlite3.Connection) -> tuple[Choice, bool] | None:
        now = int(time.time())
        row = connection.execute(_GET, (now - _USE_SECONDS, now, *names)).fetchone()
        return row and (_store_schema.choice(row[:-1]), row[-1])

    try:
        found = file.read(look_up, None)
    except OSError as error:
        file.readable = file.writable = False
        _warn(file, "read", error)
        return None
    if found is None:
        return None
    choice, used_today = found
    if not used_today:
        file.note_use(names)
    return choice


def put(choices: Iterable[Choice]) -> None:
    """Keep choices, each in place of what was kept for the same convolution, GPU and cuDNN.

    Raises:
        TypeError: for what is not a `Choice`.
    """
    choices = list(choices)
    for choice in choices:
        if not isinstance(choice, Choice):
            raise TypeError(f"jaxcudnn.store.put: choices must be Choice objects, got {choice!r}")
    file = _file()
    if not choices or file is None or not file.writable:
        return
    try:
        file.write(lambda connection: _insert(connection, _PUT, choices), None)
    except OSError as error:
        _warn(file, "written", error)  # which may raise, and then the next call tries again
        file.writable = False


def entries() -> list[Choice]:
    """Give all choices, in the order of their GPUs, cuDNNs and keys.

    Raises:
        OSError: the store cannot be read.
    """
    file = _file()
    if file is None:
        return []

    def select(connection: sqlite3.Connection) -> list[Choice]:
        rows = connection.execute(f"SELECT {_COLUMNS} FROM choices ORDER BY gpu, cudnn, key")
        return [_store_schema.choice(row) for row in rows]

    try:
        return file.read(select, [])
    except OSError as error:
        raise _refusal("entries", file, error) from error


def clear() -> int:
    """Forget all choices, and give their number. What was set aside stays.

    Raises:
        OSError: the store cannot be written.
    """
    file = _file()
    if file is None:
        return 0
    try:
        count = file.write(lambda c: c.execute("DELETE FROM choices").rowcount, 0, create=False)
        file.read(lambda connection: connection.execute("VACUUM"), None)
    except OSError as error:
        raise _refusal("clear", file, error) from error
    return count


def info() -> Info:
    """Say where the store is, what it holds and how large it is.

    Raises:
        OSError: it cannot be read.
    """
    file = _file()
    if file is None:
        return Info(None, 0, MAX_ENTRIES, 0, ())
    try:
        count, size = file.read(lambda c: (_count(c), file.path.stat().st_size), (0, 0))
    except OSError as error:
        raise _refusal("info", file, error) from error
    return Info(file.path, count, MAX_ENTRIES, size, _store_file.set_aside(file.path))


def export(path: str | os.PathLike[str]) -> int:
    """Write all choices to a file of JSON lines, to be read elsewhere by `import_`.

    Args:
        path: the file, which is replaced if there is one.

    Returns:
        How many choices were written.

    Raises:
        ValueError: the store is off, or is the file itself.
        OSError: the store cannot be read, or the file not written.
    """
    target = Path(path)
    store = _required("export").path
    if target.resolve() == store.resolve():
        raise ValueError(
            f"jaxcudnn.store.export: path must be another file than the store, got {target}; name "
            f"one that ends in .jsonl"
        )
    choices = entries()
    try:
        _store_transfer.write(target, choices)
    except OSError as error:
        raise OSError(
            f"jaxcudnn.store.export: {target} must be a file that can be written, got: {error}; "
            f"name another"
        ) from error
    return len(choices)


def import_(path: str | os.PathLike[str]) -> int:
    """Add the choices of a file that `export` wrote, all of them or, if there is an error, none.

    Where there is a choice for the same convolution, GPU and cuDNN already, the one with the lower
    time stays: both were made under the same options, and so the order does not matter in which
    the files of several machines are imported. To have exactly a file's choices, `clear` first.

    Args:
        path: the file.

    Returns:
        How many choices were new, or faster.

    Raises:
        ValueError: the store is off, or the file is not one that `export` wrote.
        OSError: the file cannot be read, or the store not written.
    """
    file = _required("import_")
    source = Path(path)
    try:
        choices = _store_transfer.read(source)
    except OSError as error:
        raise OSError(
            f"jaxcudnn.store.import_: {source} must be a file that can be read, got: {error}; "
            f"name one that jaxcudnn.store.export wrote"
        ) from error
    try:
        return file.write(lambda c: _insert(c, _PUT_IF_FASTER, choices), 0)
    except OSError as error:
        raise _refusal("import_", file, error) from error


@functools.lru_cache(maxsize=8)  # read once, so that a change of the working folder changes nothing
def _absolute(named: str) -> Path:
    expanded = os.path.expanduser(named)
    return Path(expanded if expanded.startswith("~") else os.path.abspath(expanded))


def _file() -> _store_file.File | None:
    where = path()
    return None if where is None else _store_file.at(where)


def _required(caller: str) -> _store_file.File:
    file = _file()
    if file is None:
        raise ValueError(
            f"jaxcudnn.store.{caller}: the store must be on, got "
            f"{_VARIABLE}={os.environ[_VARIABLE]!r}; unset it, or name a file"
        )
    return file


def _insert(connection: sqlite3.Connection, sql: str, choices: list[Choice]) -> int:
    """Give the number of entries that were added or changed, before any was evicted."""
    now = int(time.time())
    before = connection.total_changes
    connection.executemany(sql, [(*astuple(choice), now) for choice in choices])
    changed = connection.total_changes - before
    if (count := _count(connection)) > MAX_ENTRIES:
        connection.execute(_EVICT, (count - MAX_ENTRIES + _EVICTED_AT_ONCE,))
    return changed


def _count(connection: sqlite3.Connection) -> int:
    return connection.execute("SELECT count(*) FROM choices").fetchone()[0]


def _warn(file: _store_file.File, done: str, error: OSError) -> None:
    file.warn(
        "trouble",
        f"the store of tuned choices at {file.path} cannot be {done} ({error}), so what is "
        f"measured is forgotten when the process ends; {_REMEDY}",
    )


def _refusal(caller: str, file: _store_file.File, error: OSError) -> OSError:
    return OSError(
        f"jaxcudnn.store.{caller}: {file.path} must be a file that can be read and written, got: "
        f"{error}; {_REMEDY}"
    )
