"""What the worker of each row printed, from ``log.txt`` of its run."""

from __future__ import annotations

import re
from pathlib import Path

LOG_FILE = "log.txt"
# Of a row's text as much as a page shows, its end: that is where a failure says why.
MOST_CHARACTERS = 4000
_BEGIN = re.compile(r"^\S+Z === (.+)$")
_END = re.compile(r"^\S+Z (\S+) repeat=(\d+) -> ")


def by_row_and_pass(folder: Path) -> dict[tuple[str, int], str]:
    """Text of each ``(row, pass)`` in the log of the run in ``folder``; none without a log.

    A text above ``MOST_CHARACTERS`` is cut at its beginning, and says so.
    """
    path = folder / LOG_FILE
    if not path.exists():
        return {}
    found: dict[tuple[str, int], str] = {}
    row = ""
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        begin, end = _BEGIN.match(line), _END.match(line)
        if begin:
            row, lines = begin[1], []
        elif end:
            # A row that was settled without a worker has this line alone.
            text = [*lines, line] if end[1] == row else [line]
            found[end[1], int(end[2])] = _shortened("\n".join(text))
            row, lines = "", []
        elif row:
            lines.append(line)
    return found


def _shortened(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    cut = len(text) - MOST_CHARACTERS
    return f"[{cut:,} characters before this are in {LOG_FILE}]\n{text[cut:]}"
