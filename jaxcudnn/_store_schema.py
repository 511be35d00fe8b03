# SPDX-License-Identifier: Apache-2.0
"""What the store's SQLite file holds, and how one is told from other files."""

import sqlite3
from dataclasses import fields
from typing import Any

from ._choice import Choice

COLUMNS = ", ".join(each.name for each in fields(Choice))
"""Those of a choice. The table has `used` beside them: seconds since the epoch."""

_APPLICATION = (
    0x6A63646E  # "jcdn", for PRAGMA application_id: no other program's file is written to
)
_VERSION = 2

_TYPES: dict[Any, str] = {str: "TEXT", int: "INTEGER", float: "REAL"}
_TYPED_COLUMNS = ", ".join(f"{each.name} {_TYPES[each.type]}" for each in fields(Choice))
_CREATE = [
    f"CREATE TABLE choices (id INTEGER PRIMARY KEY, {_TYPED_COLUMNS}, used INTEGER, "
    f"UNIQUE (key, gpu, cudnn))",
    # It finds what was used longest ago, and is small, so that counting entries is fast.
    "CREATE INDEX choices_used ON choices (used)",
]
# Without what SQLite makes itself.
_DESCRIBE = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%'"

# SQLITE_ERROR is a fault of a statement, and so, the statements being right, of the tables that it
# names. An error without a code is `Malformed`, or Python's, of text that is not UTF-8.
_CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, None)


class Malformed(sqlite3.DatabaseError):
    """A store's file whose tables or entries are not a store's."""


def choice(row: tuple) -> Choice:
    """Make a choice of the columns `COLUMNS`.

    Raises:
        Malformed: they are not those of a choice.
    """
    try:
        return Choice(*row)
    except (TypeError, ValueError) as error:
        raise Malformed(str(error)) from error


def prepare(connection: sqlite3.Connection) -> None:
    """Make the tables in an empty file, unless another process does so first.

    Raises:
        OSError: it is a sound file of another version's or another program's.
        Malformed: it is a store's, but does not hold what a store's does.
    """
    connection.execute("BEGIN")  # what is read before another process makes them, or all after it
    is_made = _is_stores(connection)
    connection.execute("COMMIT")
    if is_made:
        return
    connection.execute("BEGIN IMMEDIATE")
    if not _is_stores(connection):
        for sql in _CREATE:
            connection.execute(sql)
        connection.execute(f"PRAGMA application_id = {_APPLICATION}")
        connection.execute(f"PRAGMA user_version = {_VERSION}")
    connection.execute("COMMIT")


def is_sound(connection: sqlite3.Connection) -> bool:
    """Say whether everything in the file is as it should be.

    Raises:
        OSError: as `prepare`.
        sqlite3.Error: it cannot be read, for a reason that is not in what it holds.
    """
    try:
        if _is_stores(connection):
            for row in connection.execute(f"SELECT {COLUMNS} FROM choices"):
                choice(row)
        return connection.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",)
    except sqlite3.Error as error:
        if not is_corruption(error):
            raise
        return False


def is_corruption(error: sqlite3.Error) -> bool:
    """Say whether the cause of an error is what the file holds."""
    code = getattr(error, "sqlite_errorcode", None)
    return (code if code is None else code & 0xFF) in _CORRUPT  # the other bits are detail


def _is_stores(connection: sqlite3.Connection) -> bool:
    """Say whether the file is a store: True, or False for an empty one."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    described = [sql for (sql,) in connection.execute(_DESCRIBE)]
    if (application, version, described) == (0, 0, []):
        return False
    if application != _APPLICATION:
        raise OSError("it is another program's SQLite file")
    if version != _VERSION:
        raise OSError(
            f"it was written by another version of jaxcudnn: its schema is {version}, this "
            f"version's {_VERSION}"
        )
    if described != _CREATE:
        raise Malformed("its tables are not the store's")
    return True
