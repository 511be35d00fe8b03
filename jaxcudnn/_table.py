# SPDX-License-Identifier: Apache-2.0
"""Tables as text for terminals and as HTML for notebooks."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple, TypeVar

Each = TypeVar("Each", covariant=True)


class Column(NamedTuple):
    """A column of a table."""

    title: str
    limit: int = 1000
    """How many letters of a cell the text shows at most; HTML shows all."""
    right: bool = False
    """Whether cells stand at the right."""


@dataclass
class Table:
    """Cells in columns, and notes below them. A column without any text is left out."""

    columns: Sequence[Column]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> str:
        """Put a note below, once however often it is made, and give its mark: '[1]'."""
        if text not in self.notes:
            self.notes.append(text)
        return f"[{self.notes.index(text) + 1}]"

    @property
    def _used(self) -> list[int]:
        return [i for i in range(len(self.columns)) if any(row[i] for row in self.rows)]

    def text(self, summary: str) -> str:
        """Write it for a terminal, with a line below the cells."""
        columns = [self.columns[i] for i in self._used]
        lines = [[column.title for column in columns]]
        for row in self.rows:
            lines.append([_elided(row[i], self.columns[i].limit) for i in self._used])
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        written = [
            "  ".join(
                cell.rjust(width) if column.right else cell.ljust(width)
                for cell, width, column in zip(line, widths, columns, strict=True)
            ).rstrip()
            for line in lines
        ]
        if widths:
            written.insert(1, "  ".join("-" * width for width in widths))
        notes = [f"[{number}] {note}" for number, note in enumerate(self.notes, 1)]
        return "\n".join([*(written if widths else ()), summary, *notes])

    def html(self, summary: str) -> str:
        """Write it for a notebook."""
        head = "".join(f"<th>{escape(self.columns[i].title)}</th>" for i in self._used)
        body = "".join(
            "<tr>" + "".join(self._html_cell(row[i], self.columns[i]) for i in self._used) + "</tr>"
            for row in self.rows
        )
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        return (
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            f"<p>{escape(summary)}</p>" + (f"<ol>{notes}</ol>" if notes else "")
        )

    @staticmethod
    def _html_cell(text: str, column: Column) -> str:
        align = "right" if column.right else "left"
        return f'<td style="text-align: {align}">{escape(text)}</td>'


class Listing(Sequence[Each]):
    """An immutable sequence that shows itself as a table, in a terminal or a notebook."""

    @abstractmethod
    def _table(self) -> tuple[Table, str]:
        """Give the table and the line below it."""

    def __str__(self) -> str:
        """Give the table as text."""
        table, summary = self._table()
        return table.text(summary)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        table, summary = self._table()
        return table.html(summary)


def _elided(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
