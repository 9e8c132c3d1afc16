"""``forge-bench`` in the process of a test: for several test files."""

from __future__ import annotations

import sys

import pytest

from forge.harness import cli


def forge_bench(monkeypatch, *arguments):
    """Run the command; its exit code."""
    monkeypatch.setattr(sys, "argv", ["forge-bench", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code
