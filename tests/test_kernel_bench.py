"""forge-bench kernels: the command, what is written, and the table of paths."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from command_line import forge_bench
from forge.harness import environment, kernel_bench, leaderboard, path_table
from forge.harness.kernel_bench import merged, plan, read, text_of
from forge.harness.kernel_cases import OPS
from forge.harness.kernel_timing import Row
from forge.kernels import wgrad_auto
from tiny_cases import ORIGIN, all_cases


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(environment, "gpus", lambda: [])


# -- what is written --------------------------------------------------------------------------


def test_the_command_on_a_cpu(monkeypatch, capsys, tmp_path, no_gpu):
    monkeypatch.chdir(tmp_path)
    arguments = ("kernels", "--op", "rms_norm,swiglu", "--provider", "forge", "--tokens", "3,8")
    assert forge_bench(monkeypatch, *arguments) == 0
    assert "says nothing about a GPU" in capsys.readouterr().out
    assert not list(tmp_path.iterdir()), "a CPU run writes only what was asked for"
    assert forge_bench(monkeypatch, *arguments, "--out", "r/kernels.csv", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    with open("r/kernels.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = (
        "op, provider, case, tokens, dtype, ms, p20_ms, p80_ms, floor_ms, gb_per_s, tflop_per_s, "
        "max_rel_err, gate, hardware, torch, triton, date, commit"
    )
    assert list(rows[0]) == wanted.split(", ")
    assert len(rows) == len(shown) == 8 and {r["tokens"] for r in rows} == {"3", "8"}
    assert {r["hardware"] for r in rows} == {environment.cpu_name()}
    (folder,) = Path("r/runs").iterdir()
    records = [json.loads(line) for line in (folder / "kernels.jsonl").read_text().splitlines()]
    assert [r["samples_ms"] for r in records] == [r["samples_ms"] for r in shown]
    assert torch.__version__.startswith(records[0]["environment"]["torch"])
    assert "[8/8] swiglu tiny-forward-backward, 8 tokens" in (folder / "log.txt").read_text()
    # A run folder of another kind beside those of the leaderboard.
    assert leaderboard.load_runs(Path("r/runs")) == ([], [])


def test_what_another_run_wrote_meanwhile_stays(monkeypatch, tmp_path, no_gpu):
    target = tmp_path / "kernels.csv"

    def measured(case, tokens, providers, device, origin):
        target.write_text(text_of(merged([], [row(hardware="A100")])))  # the other run
        numbers = dict(p20_ms=1.0, p80_ms=1.0, gb_per_s=1.0, max_rel_err=0.0)
        yield row(op=case.op, case=case.name, tokens=tokens, **numbers)

    monkeypatch.setattr("forge.harness.kernel_bench.measure", measured)
    words = ("kernels", "--op", "rms_norm", "--case", "tiny-forward", "--out", str(target))
    assert forge_bench(monkeypatch, *words) == 0
    assert [r["hardware"] for r in read(target)] == ["A100", "H200"]


def row(op="rms_norm", case="c", tokens=512, provider="forge", **rest):
    known = dict(ORIGIN) | dict(dtype="bf16", gate="pass", ms=1.0)
    return Row(op=op, case=case, tokens=tokens, provider=provider, **(known | rest))


def test_rows_that_stand_side_by_side_were_measured_together(tmp_path):
    file = tmp_path / "kernels.csv"
    assert read(file) == []
    first = [row(), row(provider="torch"), row(tokens=64), row(hardware="A100")]
    file.write_text(text_of(merged([], first)))
    again = merged(read(file), [row(ms=0.123456789, commit="new")])
    file.write_text(text_of(again))
    kept = [(r["provider"], r["tokens"], r["hardware"], r["commit"], r["ms"]) for r in read(file)]
    assert kept == [
        ("forge", "64", "H200", "abc", "1"),
        ("forge", "512", "A100", "abc", "1"),
        ("forge", "512", "H200", "new", "0.12346"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--op nope", "--op: unknown nope; valid: wgrad_update, rms_norm"),
        ("--case x,tiny-forward", "--case: unknown x; valid: tiny-blocks-bf16"),
        ("--provider liger2", "--provider: unknown liger2; valid: forge, torch"),
        ("--op rms_norm --case tiny-head-bf16", "no case has all that they name"),
        ("--tokens 512,x", "--tokens 512,x: must be numbers from 1"),
        ("--tokens 0", "--tokens 0: must be numbers from 1 to 16777216"),
        ("--tokens 99999999999999999999", "must be numbers from 1 to 16777216"),
        ("--op rms_norm,linear", "--op linear: its kernels need an NVIDIA GPU"),
        ("--device tpu", "--device: unknown 'tpu'"),
        ("--device cuda", "--device cuda: no NVIDIA GPU here"),
        ("--write-paths", "--write-paths: chooses by the time on a GPU"),
        ("--out {tmp}/foreign.csv", "not a file of `forge-bench kernels`"),
    ],
)
def test_bad_input_is_refused_in_a_line(monkeypatch, capsys, tmp_path, no_gpu, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreign.csv").write_text("a,b\n1,2\n")
    words = [word.format(tmp=tmp_path) for word in arguments.split()]
    assert forge_bench(monkeypatch, "kernels", *words) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert [f.name for f in tmp_path.iterdir()] == ["foreign.csv"]


def test_the_options_choose():
    cases = all_cases(on_gpu=True)
    everything = plan(cases, "", "", "", [])
    assert len(everything) == 3 * 3 + 2 * 2 * len(OPS)
    some = plan(cases, "wgrad_update,swiglu", "", "torch,liger", [7])
    assert {(p.case.op, p.tokens) for p in some} == {("wgrad_update", 7), ("swiglu", 7)}
    # The case of 8-bit states has neither.
    assert len(some) == 4 and {p.providers for p in some} == {("torch",), ("torch", "liger")}


# -- the table of paths -----------------------------------------------------------------------


def measured(tokens, provider, ms, host):
    return row(tokens=tokens, provider=provider, ms=ms, host_ms=host)


def test_paths_by_time(tmp_path, monkeypatch):
    table = tmp_path / "wgrad_auto.json"
    table.write_text(wgrad_auto.TABLE.read_text())
    before = json.loads(table.read_text())
    monkeypatch.setattr(wgrad_auto, "TABLE", table)
    rows = [
        # On the GPU hopper, then scratch; eagerly the host decides, then the GPU.
        *(measured(512, f"forge:{p}", *t) for p, t in
          dict(tiles=(4.0, 0.6), scratch=(2.6, 3.0), hopper=(1.6, 9.0)).items()),
        *(measured(1024, f"forge:{p}", *t) for p, t in
          dict(tiles=(5.0, 0.6), scratch=(3.3, 3.0), hopper=(2.1, 9.0)).items()),
        *(measured(4096, f"forge:{p}", *t) for p, t in
          dict(tiles=(11.0, 0.6), scratch=(7.0, 3.0), hopper=(7.1, 9.0)).items()),
        *(measured(65536, f"forge:{p}", *t) for p, t in
          dict(tiles=(110.0, 0.6), scratch=(70.0, 3.0), hopper=(60.0, 9.0)).items()),
        # Others have no say.
        measured(512, "torch", 0.1, 0.1),
        measured(512, "scratch", 0.1, 0.1),
        measured(512, "forge:tiles", None, None),
    ]  # fmt: skip
    assert path_table.write("9.0", rows) == table
    found = json.loads(table.read_text())
    assert found.pop("9.0") == {
        "graph": [[2048, ["hopper", "scratch"]], [16384, ["scratch"]],
                  [None, ["hopper", "scratch"]]],
        "eager": [[16384, ["scratch"]], [None, ["hopper", "scratch"]]],
    }  # fmt: skip
    before.pop("9.0")
    assert found == before
    path_table.write("10.0", rows[:3])
    again = json.loads(table.read_text())
    assert list(again) == ["9.0", "10.0", "other"] and again["other"] == before["other"]
    assert again["10.0"]["eager"] == [[None, ["scratch"]]]


def test_the_table_of_the_repository_has_the_form_that_is_written():
    text = wgrad_auto.TABLE.read_text()
    assert path_table.text_of(json.loads(text)) == text


def test_no_table_without_a_path_that_takes_everything(tmp_path, monkeypatch):
    table = tmp_path / "wgrad_auto.json"
    table.write_text("{}")
    monkeypatch.setattr(wgrad_auto, "TABLE", table)
    with pytest.raises(ValueError, match="at 512 tokens no path but hopper"):
        path_table.write("9.0", [measured(512, "forge:hopper", 1.0, 9.0)])
    with pytest.raises(ValueError, match="no path was measured"):
        path_table.write("9.0", [measured(512, "forge:tiles", None, None)])
    assert table.read_text() == "{}"


def test_the_path_table_needs_every_path(capsys):
    cases = all_cases(on_gpu=True)
    kernel_bench._check_paths(plan(cases, "", "", "", []), True)
    for choice in (("swiglu", "", ""), ("", "tiny-head-bf16", ""), ("", "", "forge:tiles")):
        with pytest.raises(kernel_bench.typer.Exit):
            kernel_bench._check_paths(plan(cases, *choice, []), True)
        assert "needs forge:tiles, forge:scratch, forge:hopper" in capsys.readouterr().err
