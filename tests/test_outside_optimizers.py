"""Optimizers of other packages: by module:attribute, by entry point, through the worker process."""

from __future__ import annotations

import json
import sys

import pytest

from command_line import forge_bench
from forge.harness import environment, records
from forge.optim import registry

MODULE = """
import torch
from forge.optim.spec import OptimizerSpec

class Lazy(torch.optim.AdamW):
    def step(self, closure=None):
        return None

def spec(key, target):
    return OptimizerSpec(
        key=key,
        method=f"Outside {key}",
        target=f"outside_package.methods:{target}",
        build=lambda cls, model, hyper: cls(model.parameters(), **hyper.adamw),
        summary="a test",
    )

class Raising(torch.optim.AdamW):
    def step(self, closure=None):
        raise KeyError("no such\\nstate")

Mine = torch.optim.AdamW
GOOD, LAZY, RAISING = spec("good", "Mine"), spec("lazy", "Lazy"), spec("raising", "Raising")
NUMBER = 3
"""
ENTRY_POINTS = """[forge_optim.optimizers]
good = outside_package.methods:GOOD
adamw = outside_package.methods:GOOD
renamed = outside_package.methods:LAZY
broken = outside_package.nothing:X
"""


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A package on sys.path, not installed; this process forgets it afterwards."""
    package = tmp_path / "site" / "outside_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "methods.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(environment, "gpus", lambda: [])
    registry.plugins.cache_clear()
    yield tmp_path / "site"
    registry.plugins.cache_clear()
    for name in [name for name in sys.modules if name.startswith("outside_package")]:
        del sys.modules[name]


@pytest.fixture
def installed(outside):
    """The same package with entry points."""
    folder = outside / "outside_package-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-package\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(ENTRY_POINTS)
    return outside


SMALL = ("--seq", "16", "--data", "random", "--device", "cpu")


def test_measured_beside_a_built_in_one(outside, tmp_path, monkeypatch, capsys):
    name = "outside_package.methods:GOOD"
    options = ["--optimizers", f"{name},adamw-fused", "--steps", "2", "--out", tmp_path / "runs"]
    assert forge_bench(monkeypatch, *options, *SMALL) == 0, capsys.readouterr().err
    (folder,) = (tmp_path / "runs").iterdir()
    found, _ = records.load(folder)
    assert {(r.key, r.method, r.status) for r in found} == {
        (name, "Outside good", "ok"), ("adamw-fused", "fused AdamW", "ok"),
    }  # fmt: skip
    mine = next(record for record in found if record.key == name)
    assert mine.latency_ms > 0 and mine.grad_bytes == 2 * mine.params
    assert json.loads((folder / "run.json").read_text())["rows"][0]["key"] == name
    assert forge_bench(monkeypatch, "--resume", folder) == 0


def test_check_says_what_failed(outside, monkeypatch, capsys):
    assert forge_bench(monkeypatch, "check", "outside_package.methods:LAZY,adamw", *SMALL) == 1
    shown = capsys.readouterr().out
    assert "never moved" in shown and "pass  adamw/hf/eager  after 6 steps" in shown


def test_check_of_what_cannot_run_proves_nothing(monkeypatch, capsys):
    assert forge_bench(monkeypatch, "check", "adalomo", *SMALL, "--json") == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["status"], row["gate"]) == ("unsupported", "")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("outside_package.nothing:X", "does not import (ModuleNotFoundError"),
        ("outside_package.methods:X", "does not import (AttributeError"),
        ("outside_package.methods:NUMBER", "is a int, not a forge.optim.spec.OptimizerSpec"),
        ("outside_package.methods:", "not of the form package.module:attribute"),
        (":GOOD", "not of the form package.module:attribute"),
        ("../outside_package:GOOD", "not of the form package.module:attribute"),
    ],
)
def test_refused_in_one_line(outside, name, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert forge_bench(monkeypatch, "--optimizers", name, *SMALL) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"forge-bench: --optimizers: {name} ") and message in error
    assert error.count("\n") == 1 and not (tmp_path / "results").exists()


def test_entry_points(installed, monkeypatch, capsys):
    specs, problems = registry.plugins()
    assert list(specs) == ["good"] and registry.find("good").method == "Outside good"
    for expected in (
        "entry point adamw of outside-package: the key is taken",
        "entry point renamed of outside-package: its spec has the key 'lazy'",
        "entry point broken of outside-package: outside_package.nothing:X does not import",
    ):
        assert any(problem.startswith(expected) for problem in problems), problems
    assert registry.find("adamw").method == "vanilla AdamW"
    assert forge_bench(monkeypatch, "list", "--json") == 0
    captured = capsys.readouterr()
    assert "good" in [row["key"] for row in json.loads(captured.out)]
    assert captured.err.count("forge-bench: entry point") == 3
    from forge.harness.rows import select_rows

    assert "good" in [row.key for row in select_rows(["all"], "cpu")]
    assert forge_bench(monkeypatch, "check", "good", *SMALL) == 0, "the worker did not find it"


def test_profiled_and_estimated(installed, tmp_path, monkeypatch, capsys):
    name = "outside_package.methods:GOOD"
    options = "--seq 16 --steps 1 --warmup 1 --device cpu --json --out".split()
    assert forge_bench(monkeypatch, "profile", name, *options, tmp_path / "runs") == 0
    assert json.loads(capsys.readouterr().out)["row"]["key"] == name
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "profile.json").read_text())["method"] == "Outside good"
    optimizers = ("--optimizers", f"{name},good,adamw")
    assert forge_bench(monkeypatch, "estimate", "qwen3-tiny", *optimizers, "--json") == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)["methods"]}
    assert rows[name]["peak_gib"] is None and rows["adamw"]["peak_gib"] > 0
    assert forge_bench(monkeypatch, "estimate", "qwen3-tiny", "--json") == 0
    assert "good" in [row["key"] for row in json.loads(capsys.readouterr().out)["methods"]]


def test_a_profile_of_one_that_raises_is_one_line(outside, tmp_path, monkeypatch, capsys):
    runs = tmp_path / "runs"
    options = "--seq 16 --steps 1 --warmup 1 --device cpu --out".split()
    name = "outside_package.methods:RAISING"
    assert forge_bench(monkeypatch, "profile", name, *options, runs) == 1
    errors = capsys.readouterr().err
    assert errors.startswith(f"forge-bench: profile {name}: KeyError: ") and errors.count("\n") == 1
    assert not list(runs.iterdir())
