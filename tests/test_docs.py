"""Every code block of docs/ runs, page by page in one folder, on a CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# In reading order: the second page repeats what the first one measured.
PAGES = (
    *("benchmark", "reproducing", "adding-an-optimizer", "adding-a-model"),
    *("library", "training", "numerics"),
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with `forge-bench` on PATH, as installed: without the folder on sys.path."""
    home = tmp_path_factory.mktemp("docs")
    command = home / "bin" / "forge-bench"
    command.parent.mkdir()
    command.write_text(
        f"#!{sys.executable} -P\nfrom forge.harness.cli import main\nmain()\n", encoding="utf-8"
    )
    command.chmod(0o755)
    return home


def shell(text: str, home: Path) -> None:
    env = dict(os.environ, PATH=f"{home / 'bin'}:{os.environ['PATH']}", PYTHONPATH=str(ROOT))
    env["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=home, env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"


def python(text: str, home: Path, monkeypatch, names: dict) -> None:
    first = text.splitlines()[0]
    named = re.fullmatch(r"# (\w+(?:/\w+)*\.py)", first)
    if named:
        file = home / named[1]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return
    monkeypatch.chdir(home)
    exec(compile(text, first, "exec"), names)


def blocks_of(page: str) -> list[tuple[str, str]]:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    blocks = BLOCK.findall(text)
    assert blocks and text.count("```") == 2 * len(blocks)
    return blocks


def test_these_are_all_pages():
    assert {file.stem for file in (ROOT / "docs").glob("*.md")} == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_run(page, home, monkeypatch):
    blocks = blocks_of(page)
    if page == "reproducing" and not (home / "results").exists():  # asked for alone
        for _, block in blocks_of("benchmark")[:2]:
            shell(block, home)
    names = {"__name__": "__main__"}  # a page's blocks go on from each other
    for language, block in blocks:
        if language == "sh":
            shell(block, home)
        elif language == "python":
            python(block, home, monkeypatch, names)
        elif language == "toml":
            assert tomllib.loads(block)
        else:
            raise AssertionError(f"{page}: a block without a language that can be run: {language}")


def test_every_command_and_exit_code_is_documented():
    from forge.harness.cli import HELP, app

    text = (ROOT / "docs" / "benchmark.md").read_text(encoding="utf-8")
    for command in app.registered_commands:
        assert f"| `{command.name}" in text, f"{command.name} is not in docs/benchmark.md"
    for code in re.findall(r"^  (\d+) ", HELP, re.MULTILINE):
        assert f"| {code} |" in text
