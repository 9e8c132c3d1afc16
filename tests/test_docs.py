"""Every code block of docs/ runs, page by page in one folder, on a CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
# In reading order: the second page repeats what the first one measured.
PAGES = (
    *("benchmark", "reproducing", "adding-an-optimizer", "adding-a-model"),
    *("library", "training", "numerics"),
)
DOCS = tuple(f"docs/{page}.md" for page in PAGES)
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


def package(text: str, home: Path) -> None:
    """Build the package of a `pyproject.toml` in the folder where the page's other files are; what
    it offers to `forge-bench` must load."""
    (home / "pyproject.toml").write_text(text, encoding="utf-8")
    build = "import setuptools.build_meta as b; b.build_wheel('wheel')"
    done = subprocess.run([sys.executable, "-c", build], cwd=home, capture_output=True, text=True)
    assert done.returncode == 0, f"{text}\n{done.stderr}"
    (wheel,) = (home / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(home / "installed")
    code = (
        "from forge.optim.registry import plugins; specs, problems = plugins()\n"
        "assert specs and not problems, problems\n"
    )
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(home / "installed"), str(ROOT)]))
    subprocess.run([sys.executable, "-P", "-c", code], cwd=home, env=env, check=True)


def blocks_of(page: str) -> list[tuple[str, str]]:
    return blocks_in(ROOT / "docs" / f"{page}.md")


def blocks_in(file: Path) -> list[tuple[str, str]]:
    text = file.read_text(encoding="utf-8")
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
            package(block, home)
        else:
            raise AssertionError(f"{page}: a block without a language that can be run: {language}")


def test_every_command_and_exit_code_is_documented():
    from forge.harness.cli import HELP, app

    text = (ROOT / "docs" / "benchmark.md").read_text(encoding="utf-8")
    for command in app.registered_commands:
        assert f"| `{command.name}" in text, f"{command.name} is not in docs/benchmark.md"
    for code in re.findall(r"^  (\d+) ", HELP, re.MULTILINE):
        assert f"| {code} |" in text


class TinyModel:
    """What the README's model is here: a small one of its class, on a CPU."""

    @staticmethod
    def from_pretrained(name: str, dtype: torch.dtype):
        from transformers import Qwen3Config, Qwen3ForCausalLM

        assert name == "Qwen/Qwen3-0.6B"
        config = Qwen3Config(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        )  # fmt: skip
        model = Qwen3ForCausalLM(config).to(dtype)
        model.to = lambda device: model
        return model


def test_the_readme(monkeypatch):
    """Its Python runs on a small model; its commands exist with these options."""
    import transformers
    from typer.main import get_command

    from forge.harness.cli import app

    monkeypatch.setattr(transformers, "AutoModelForCausalLM", TinyModel)
    ids = torch.randint(0, 64, (1, 16))
    names = {"loader": [{"input_ids": ids, "labels": ids}] * 3}
    commands, targets = [], []
    for language, block in blocks_in(ROOT / "README.md"):
        if language == "python":
            before = names.get("model")
            exec(compile(block, "README.md", "exec"), names)
            assert names["model"] is not before and names["model"].training
        elif language == "sh":
            lines = [line.partition("#")[0].split() for line in block.splitlines()]
            commands += [words[1:] for words in lines if words[0] == "forge-bench"]
            targets += [words[1] for words in lines if words[0] == "make"]
        else:
            raise AssertionError(f"a block without a language that can be run: {language}")
    assert names["loss"].isfinite() and len(commands) >= 4 and targets == ["bench", "test"]
    group: Any = get_command(app)
    for words in commands:
        name = "run" if words[0].startswith("--") else words.pop(0)
        group.commands[name].make_context(name, words)  # raises on what it does not know
    subprocess.run(["make", "-n", *targets], cwd=ROOT, check=True, capture_output=True)


def test_what_the_readme_says_of_the_numbers_is_what_was_measured():
    from forge.harness import leaderboard, noise, records

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"\(run `([^`]+)`\)", text)[1]
    passes = leaderboard.load_runs(ROOT / "results" / "runs")[0]
    rows = leaderboard.merge_repeats(passes)

    def factor(seq: int) -> float:
        rival = [r for r in rows if r.row == "adamw-fused/torch/compile+cuda_graph"]
        last = max((r for r in rival if r.seq == seq), key=lambda r: r.date).run_id
        run = shown if seq == 512 else last
        ms = {row.row: row.latency_ms for row in rows if row.run_id == run}
        return ms[rival[0].row] / ms["forge-bf16/forge/cuda_graph"]

    said = re.sub(r"\s+", " ", text)
    assert f"FORGE in that setting is {factor(512):.1f} times as fast" in said
    assert f"sequence 4096, where the factor is {factor(4096):.1f}." in said
    of_run = records.by_row(passes)
    apart = [
        max(medians) / min(medians)
        for group in of_run.values()
        for medians in [noise.pass_medians([r for r in group if r.run_id == shown])]
        if len(medians) > 1
    ]
    assert f"the passes of one row lie up to {100 * (max(apart) - 1):.0f} % apart" in said


def test_every_page_is_linked_once_from_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in PAGES:
        assert text.count(f"](docs/{page}.md)") == 1, page


@pytest.mark.parametrize("file", ["README.md", "CONTRIBUTING.md", "results/README.md", *DOCS])
def test_links_lead_somewhere(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        found = (ROOT / file).parent / target if target else ROOT / file
        assert found.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
            assert anchor in anchors, anchor
