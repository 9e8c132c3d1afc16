"""Ratios of two runs: right numbers, and no claim that the spread does not carry."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from forge.harness import cli, leaderboard, noise, options, records
from forge.harness.compare import CAUTION, cautions, compare, side

RESULTS = Path(__file__).resolve().parents[1] / "results"


@pytest.fixture(scope="module")
def real():
    """A row that was measured once."""
    found = leaderboard.load_runs(RESULTS / "runs")[0]
    return next(r for r in found if (r.row, r.seq) == ("adamw-fused/torch/cuda_graph", 512))


def passes(record, *medians, jitter=0.01, **changes):
    """``record`` in several passes with these medians, 41 steps each."""
    around = np.linspace(-jitter, jitter, 41)
    return [
        replace(record, repeat=i, latency_ms=m, samples_ms=list(m * (1 + around)), **changes)
        for i, m in enumerate(medians)
    ]


def test_passes_that_overlap_are_noise(real):
    a, b = passes(real, 10.0, 11.0, 10.5), passes(real, 10.9, 12.0, 11.5)
    (found,) = compare(a, b)
    assert (found.a.median, found.b.median) == (10.5, 11.5)
    assert found.ratio == pytest.approx(11.5 / 10.5)
    assert (found.ratio_low, found.ratio_high) == pytest.approx((10.9 / 11.0, 12.0 / 10.0))
    assert found.verdict == "within noise" and not found.one_pass


def test_passes_that_lie_apart_are_a_difference(real):
    a, b = passes(real, 10.0, 11.0), passes(real, 11.1, 12.0)
    assert compare(a, b)[0].verdict == "slower" and compare(b, a)[0].verdict == "faster"
    said = cautions(a, b, compare(a, b))
    assert said == [
        f"{side}: drift of {percent} % between passes, above 2 %, of {real.row}"
        for side, percent in (("A", "10.0"), ("B", "8.1"))
    ]


def test_one_pass_is_said_to_know_little(real):
    a, b = passes(real, 10.0), passes(real, 12.0)
    (found,) = compare(a, b)
    assert found.verdict == "slower" and found.one_pass
    assert found.a.low < 10.0 < found.a.high and found.a.source == "bootstrap of 1 pass"
    assert CAUTION in cautions(a, b, [found])
    (same,) = compare(a, a)
    assert (same.ratio, same.verdict) == (1.0, "within noise")


def test_other_work_and_failed_rows_are_left_out(real):
    (a,) = passes(real, 10.0)
    assert compare([a], passes(real, 9.0, seq=4096)) == []
    failed = replace(a, repeat=1, status="failed", gate="fail", latency_ms=None)
    assert compare([a], [*passes(real, 9.0), failed]) == []


def test_what_differs_is_said(real):
    (a,) = passes(real, 10.0, environment={"torch": "2.11.0"})
    (b,) = passes(real, 10.0, environment={"torch": "2.13.0", "dirty": True}, hardware="H100")
    said = cautions([a], [b], compare([a], [b]))
    assert "hardware differs: H200 against H100" in said
    assert "torch differs: 2.11.0 against 2.13.0" in said
    assert "B was measured on a checkout with changes" in said


def test_what_was_not_compared_is_no_caution(real):
    """A commit's runs of two lengths, with other data each, against a run of one of them."""
    a, b = passes(real, 10.0, 10.1), passes(real, 10.0, 10.1)
    longer = passes(real, 50.0, 51.0, seq=4096, data="another", environment={"torch": "0"})
    found = compare([*a, *longer], b)
    assert len(found) == 1 and cautions([*a, *longer], b, found) == []


def test_the_bootstrap_covers_the_median():
    """Of 200 samples of 21 steps each, about 95 % of the intervals hold the true median."""
    draws = np.random.default_rng(1).lognormal(3.0, 0.2, (200, 21))
    intervals = [noise.bootstrap_median(draw) for draw in draws]
    held = np.mean([low <= np.exp(3.0) <= high for low, high in intervals])
    assert 0.90 <= held <= 0.99
    assert noise.bootstrap_median(draws[0]) == intervals[0]


@pytest.fixture
def runs(tmp_path, real):
    for name, commit, ms in (("one", "aaaa11112", 10.0), ("two", "bbbb22223", 20.0)):
        (tmp_path / name).mkdir()
        for record in passes(real, ms, ms * 1.01, run_id=name, environment={"commit": commit}):
            records.append(tmp_path / name, record)
    return tmp_path


@pytest.mark.parametrize("name", ["one", "aaaa11112", "aaaa", "{runs}/one", "aaaa111122223333"])
def test_a_side_is_a_run_or_a_commit(runs, name):
    found, damaged = side(name.format(runs=runs), runs)
    assert {record.run_id for record in found} == {"one"} and len(found) == 2 and damaged == []


def forge_bench(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["forge-bench", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code


def test_the_command(runs, monkeypatch, capsys):
    assert forge_bench(monkeypatch, "compare", "one", "bbbb22223", "--runs", runs) == 0
    shown = capsys.readouterr().out
    assert "slower" in shown and "2.000" in shown and "1.980 to 2.020" in shown
    assert forge_bench(monkeypatch, "compare", "two", "one", "--runs", runs, "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["verdict"] == "faster" and row["ratio"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ("compare one two", ("2.000", "slower", "B is")),
        ("roofline qwen3-0.6b", ("3.51", "floor")),
        ("estimate qwen3-0.6b", ("4.46", "peak")),
    ],
)
def test_a_narrow_terminal_keeps_what_the_table_is_for(runs, arguments, kept, monkeypatch, capsys):
    narrow = Console(width=40, force_terminal=True, color_system=None)
    monkeypatch.setattr(options, "console", lambda **_: narrow)
    runs_of = ["--runs", runs] if arguments.startswith("compare") else []
    assert forge_bench(monkeypatch, *arguments.split(), *runs_of) == 0
    shown = re.sub(r"\s*\n\s*", "\n", capsys.readouterr().out)
    table = [line for line in shown.splitlines() if line[:1] in "┃│"]
    assert all(any(word in line for line in table) for word in kept), shown
    assert max(map(len, table)) <= 40


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("one", "nope"), "nope: no such run folder, run or commit"),
        (("one", "aaa"), "runs: one, two"),
        (("one", "other"), "no row of the same work was timed in both"),
    ],
)
def test_refused(runs, real, names, message, monkeypatch, capsys):
    (runs / "other").mkdir()
    records.append(runs / "other", replace(real, run_id="other", seq=4096, environment={}))
    if "nope" in names or "aaa" in names:
        (runs / "other" / records.RECORDS_FILE).unlink()
    assert forge_bench(monkeypatch, "compare", *names, "--runs", runs) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
