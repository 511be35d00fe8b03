# SPDX-License-Identifier: Apache-2.0
"""Print a command of the README, so that what is tested is what a reader is told to type.

`python tools/readme_command.py NAME` prints the lines of the fenced block that follows the comment
`<!-- ci: NAME -->`, without the fences.
"""

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def command(text: str, name: str) -> str:
    """The lines of the block called `name` in the Markdown `text`.

    Raises:
      ValueError: not exactly one block has that name.
    """
    mark = rf"^<!-- ci: {re.escape(name)} -->\n+```\w*\n(.*?)^```$"
    blocks = re.findall(mark, text, flags=re.MULTILINE | re.DOTALL)
    if len(blocks) != 1:
        raise ValueError(
            f"{README.name}: one fenced block after '<!-- ci: {name} -->' wanted, got {len(blocks)}"
        )
    return blocks[0]


if __name__ == "__main__":
    print(command(README.read_text(), sys.argv[1]), end="")
