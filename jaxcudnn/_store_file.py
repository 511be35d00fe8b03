# SPDX-License-Identifier: Apache-2.0
"""The SQLite file of the store: opened, shared between processes, and set aside when it is corrupt.

Processes share it on one machine, and on several that mount the same home. So it has SQLite's
rollback journal: a write-ahead log keeps its index in memory that all processes share, which works
on one machine only (https://sqlite.org/wal.html), and has readers write to the folder. With the
journal, readers wait while a writer commits, some milliseconds, and a process that is killed while
it writes leaves a journal from which the next one restores what was there.
"""

import atexit
import ctypes
import fcntl
import os
import shutil
import sqlite3
import stat
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from . import _store_schema

BUSY_SECONDS = 10.0
"""How long to wait for other processes, each of which writes for milliseconds."""

_LOCK_BYTES = (512, 1 << 30)  # how many and where: https://sqlite.org/fileformat2.html, section 1.4

_MOST_ASIDE = 9
"""How many corrupt files are kept; a disk that goes bad is not to be filled with them."""

_USE = "UPDATE choices SET used = ? WHERE key = ? AND gpu = ? AND cudnn = ?"

T = TypeVar("T")


class File:
    """One file, and the connection that this process's threads share, one at a time.

    Attributes:
        path: where the file is, or will be.
        readable: False once reading it has failed, after which it is left alone.
        writable: the same of writing.
    """

    def __init__(self, path: Path) -> None:
        """Open nothing yet."""
        self.path = path
        self.readable = self.writable = True
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._uses: dict[tuple[str, str, str], int] = {}
        self._warned: set[str] = set()

    def read(self, work: Callable[[sqlite3.Connection], T], absent: T) -> T:
        """Give what `work` makes of the connection, or `absent` if there is no file.

        A corrupt file is set aside, with a warning, and then absent.

        Raises:
            OSError: the file cannot be read, or is another program's or version's.
        """
        return self._run(work, absent, create=False)

    def write(
        self, work: Callable[[sqlite3.Connection], T], absent: T, *, create: bool = True
    ) -> T:
        """Do the same in a transaction that may write.

        Args:
            work: what is done; it happens wholly or, if it raises, not at all.
            absent: the result if there is no file and none is made.
            create: whether to make a file if there is none.

        Raises:
            OSError: as `read`, or the file cannot be written.
        """

        def transaction(connection: sqlite3.Connection) -> T:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(_USE, [(when, *names) for names, when in self._uses.items()])
            result = work(connection)
            connection.execute("COMMIT")
            self._uses.clear()
            return result

        return self._run(transaction, absent, create=create)

    def note_use(self, names: tuple[str, str, str]) -> None:
        """Have the next transaction, or the end of the process, record that an entry is used now.

        Args:
            names: its key, GPU and cuDNN.
        """
        with _lock:
            self._uses[names] = int(time.time())

    def record_uses(self) -> None:
        """Record what `note_use` has noted, if that is possible."""
        if self._uses and self.writable:
            with suppress(OSError):  # they only decide what goes first
                self.write(lambda _: None, None, create=False)

    def warn(self, kind: str, message: str) -> None:
        """Warn, once for each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"jaxcudnn: {message}", RuntimeWarning, stacklevel=2)

    def close(self) -> None:
        """Close the connection, which takes back what it has begun; the next use opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def abandon(self) -> None:
        """Forget the connection without closing it, in a child that has it from its parent.

        SQLite's connections do not survive a fork, and closing one there could take the parent's
        transaction back (https://sqlite.org/howtocorrupt.html, section 2.6).
        """
        if self._connection is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))
            self._connection = None
        self._uses.clear()

    def _run(self, work: Callable[[sqlite3.Connection], T], absent: T, *, create: bool) -> T:
        with _lock:
            try:
                try:
                    return self._attempt(work, absent, create)
                except sqlite3.Error as error:
                    if not (_store_schema.is_corruption(error) or _is_moved(error)):
                        raise
                    self._set_aside_if_corrupt(error)
                return self._attempt(work, absent, create)
            except sqlite3.Error as error:
                name = getattr(error, "sqlite_errorname", type(error).__name__)
                raise OSError(f"{error} ({name})") from error

    def _attempt(self, work: Callable[[sqlite3.Connection], T], absent: T, create: bool) -> T:
        try:
            connection = self._open(create)
            return absent if connection is None else work(connection)
        except BaseException:
            self.close()
            raise

    def _open(self, create: bool) -> sqlite3.Connection | None:
        """Give the connection to the file that is at the path now, or None if there is none."""
        if str(self.path).startswith("~"):
            raise OSError("there is no home directory")
        found = _identity(self.path)
        if self._connection is not None and found == self._identity:
            return self._connection
        self.close()
        if found is None:
            if not create:
                return None
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._connection = _connect(self.path)
        _store_schema.prepare(self._connection)
        self._identity = _identity(self.path)
        return self._connection

    def _set_aside_if_corrupt(self, error: sqlite3.Error) -> None:
        """Copy a corrupt file and empty it, unless another process has done so.

        It is not renamed: a process that has the old file open takes the journal of one that
        writes to a new file by the same name for its own.
        """
        try:
            # Nothing else may open and close the file until the end, since that gives up the lock.
            with open(self.path, "r+b") as file:
                _lock_out_others(file)
                with closing(_connect(self.path, "nolock=1")) as connection:
                    if _store_schema.is_sound(connection):
                        return
                    aside = _free(self.path)
                    with open(aside, "wb") as copy:
                        shutil.copyfileobj(file, copy)
                    file.truncate(0)
        except FileNotFoundError:
            return
        except OSError as second:
            raise OSError(f"it is corrupt ({error}), and was not set aside: {second}") from error
        self.warn(
            "corrupt",
            f"the store of tuned choices at {self.path} was corrupt ({error}); what it held is in "
            f"{aside}, it is begun anew, and convolutions are measured again. Delete {aside}, or "
            f"restore {self.path} from a copy",
        )


def at(path: Path) -> File:
    """Give the file at a path, and close the one at any other."""
    global _file
    with _lock:
        if _file is None or _file.path != path:
            if _file is not None:
                _file.record_uses()
                _file.close()
            _file = File(path)
        return _file


def set_aside(path: Path) -> tuple[Path, ...]:
    """Give the corrupt files that were set aside."""
    return tuple(aside for aside in _asides(path) if aside.exists())


_file: File | None = None

# Held while a process forks as well: then no transaction is under way whose locks the child's copy
# of SQLite would take for its own.
_lock = threading.RLock()


def _after_fork_in_child() -> None:
    if _file is not None:
        _file.abandon()
    _lock.release()


os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_after_fork_in_child
)


@atexit.register
def _finish() -> None:
    if _file is not None:
        _file.record_uses()
        _file.close()


def _connect(path: Path, options: str = "") -> sqlite3.Connection:
    # Transactions are begun by name, and this module's lock takes the place of a check for threads.
    return sqlite3.connect(
        f"{path.as_uri()}?{options}",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )


def _lock_out_others(file: BinaryIO) -> None:
    """Take all of SQLite's locks, which it can take itself on a file only that it can read.

    Raises:
        OSError: others hold one for too long.
    """
    end = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, *_LOCK_BYTES)
        except BlockingIOError as error:
            if time.monotonic() > end:
                raise OSError(
                    f"other processes have kept it locked for {BUSY_SECONDS} s"
                ) from error
        time.sleep(0.005)


def _identity(path: Path) -> tuple[int, int] | None:
    """Give the device and the number of a file, which a new one of the same name has not, or None.

    Raises:
        OSError: it is something else than a file; opening it may take forever.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise OSError("it is not a regular file")
    return status.st_dev, status.st_ino


def _is_moved(error: sqlite3.Error) -> bool:
    """Say whether SQLite found that the file it has open is no longer at its path."""
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_READONLY_DBMOVED


def _asides(path: Path) -> list[Path]:
    return [Path(f"{path}.corrupt-{n}") for n in range(1, _MOST_ASIDE + 1)]


def _free(path: Path) -> Path:
    """Give the first name that is free, else the last, so that the copies do not grow in number."""
    names = _asides(path)
    return next((name for name in names if not name.exists()), names[-1])
