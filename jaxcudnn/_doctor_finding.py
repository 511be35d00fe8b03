# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of one thing."""

from dataclasses import dataclass
from typing import NamedTuple


class Fault(NamedTuple):
    """What is wrong with an installation, and what its user can do."""

    text: str
    remedy: str


@dataclass(frozen=True)
class Finding:
    """One line of the report, and the faults that belong to it."""

    what: str
    found: str
    faults: tuple[Fault, ...] = ()
