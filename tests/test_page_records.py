"""What a row of the page opens beside its numbers: log and efficiency; and plots of profiles."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from command_line import forge_bench
from forge.harness import leaderboard, logs, page, profiles, publish, records
from forge.harness.profiles import Profile

RESULTS = Path(__file__).resolve().parents[1] / "results"
HOSTILE = "</script><script>hacked=1</script>"
LOG = """\
2026-11-30T09:00:00Z forge-bench --optimizers adamw seed=0 order=['a/hf/eager']
2026-11-30T09:00:01Z === fp32 reference
of the reference
2026-11-30T09:00:02Z === a/hf/eager
a first line
</script><script>hacked=1</script>
2026-11-30T09:00:03Z a/hf/eager repeat=0 -> ok 
2026-11-30T09:00:04Z === a/hf/eager
killed here, and measured again after --resume
2026-11-30T09:00:05Z === a/hf/eager
the second pass
2026-11-30T09:00:06Z a/hf/eager repeat=1 -> failed a reason
2026-11-30T09:00:07Z b/hf/eager repeat=0 -> skipped b is not installed
"""  # noqa: W291


@pytest.fixture(scope="module")
def timed():
    """A timed row of the recorded runs."""
    found = leaderboard.load_runs(RESULTS / "runs")[0]
    return next(record for record in found if record.latency_ms)


def profile_of(timed, **changes) -> Profile:
    parts = [
        dict(part="update", ms=4.0, share_pct=40.0, pieces=3.0, floor_ms=2.0, gain_pct=20.0),
        dict(part="idle", ms=1.0, share_pct=10.0, pieces=0.0, floor_ms=None, gain_pct=10.0),
        dict(part="gemm", ms=5.0, share_pct=50.0, pieces=9.0, floor_ms=4.5, gain_pct=5.0),
    ]
    same = ("row", "method", "model", "batch", "seq", "precision", "hardware", "gpu_count", "date")
    facts = {name: getattr(timed, name) for name in same}
    facts |= dict(run_id="2026-11-30_profile-a", steps=5, wall_ms=10.0, launches=12.0, parts=parts)
    facts |= dict(environment={"commit": "d1e63e00f", "torch": "2.11.0"})
    return Profile(**{**facts, **changes})


def test_the_log_by_row_and_pass(tmp_path):
    (tmp_path / logs.LOG_FILE).write_text(LOG)
    found = logs.by_row_and_pass(tmp_path)
    assert list(found) == [("a/hf/eager", 0), ("a/hf/eager", 1), ("b/hf/eager", 0)]
    assert found["a/hf/eager", 0].splitlines()[:2] == ["a first line", HOSTILE]
    second = found["a/hf/eager", 1]
    assert second.startswith("the second pass\n") and second.endswith("-> failed a reason")
    assert found["b/hf/eager", 0].endswith("b is not installed")
    assert logs.by_row_and_pass(tmp_path / "none") == {}


def test_a_long_log_keeps_its_end(tmp_path):
    long = LOG.replace("a first line", "x" * 10_000)
    (tmp_path / logs.LOG_FILE).write_text(long)
    text = logs.by_row_and_pass(tmp_path)["a/hf/eager", 0]
    assert len(text) < logs.MOST_CHARACTERS + 100
    assert "characters before this are in log.txt" in text and text.endswith("-> ok ")


def shown(board) -> dict:
    """Data of the first record of the page."""
    text = page.render(board, [])
    assert "<script>hacked" not in text
    data = text.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    return json.loads(data)[0]


def test_the_page_has_the_log_of_each_pass(tmp_path, timed):
    run = tmp_path / "a copy under another name"
    run.mkdir()
    for repeat in (0, 1):
        records.append(run, replace(timed, row="a/hf/eager", repeat=repeat))
    (run / logs.LOG_FILE).write_text(LOG)
    board = leaderboard.read(tmp_path, tmp_path / "none.csv")
    first, second = (one["log"] for one in shown(board)["passes"])
    assert HOSTILE in first and second.startswith("the second pass")


@pytest.mark.parametrize(
    ("notes", "why"),
    [
        ("first step 9 ms; GPM: not supported by this GPU", "GPM: not supported by this GPU"),
        ("NVML: Driver Not Loaded", "NVML: Driver Not Loaded"),
        ("first step 9 ms", "not measured by the version that made this record"),
    ],
)
def test_a_gpu_row_without_counters_says_why(tmp_path, timed, notes, why):
    (tmp_path / "run").mkdir()
    blind = replace(timed, notes=notes, ofu_pct=None, dram_active_pct=None, mfu_pct=12.5)
    records.append(tmp_path / "run", blind)
    board = leaderboard.read(tmp_path, tmp_path / "none.csv")
    facts = shown(board)["facts"]
    assert why in facts["ofu_pct"] and why in facts["dram_active_pct"]
    assert facts["mfu_pct"] == 12.5
    assert board.frame["ofu_pct"].isna().all()


def test_efficiency_has_columns(tmp_path, timed):
    (tmp_path / "run").mkdir()
    seen = replace(timed, mfu_pct=31.234567, ofu_pct=35.5, dram_active_pct=41.0, energy_j=6.25)
    records.append(tmp_path / "run", seen)
    board = leaderboard.read(tmp_path, tmp_path / "none.csv")
    (row,) = csv.DictReader(leaderboard.csv_text(board.frame).splitlines())
    assert (row["mfu_pct"], row["ofu_pct"]) == ("31.23", "35.5")
    names = ("mfu_pct", "ofu_pct", "dram_active_pct", "energy_j")
    facts = shown(board)["facts"]
    assert [facts[name] for name in names] == [31.2346, 35.5, 41.0, 6.25]
    text = page.render(board, [])
    assert ">41.0<" in text and ">6.2<" in text


def test_a_profile_is_published_beside_the_run_of_its_work(tmp_path, timed):
    runs = tmp_path / "runs"
    for name in ("run", "profile", "evil", "cpu"):
        (runs / name).mkdir(parents=True)
    records.append(runs / "run", timed)
    profiles.save(runs / "profile", profile_of(timed))
    evil = profile_of(timed, run_id=f"../../{HOSTILE}", row=HOSTILE, model=HOSTILE)
    evil.parts[0]["part"] = HOSTILE
    profiles.save(runs / "evil", evil)
    profiles.save(runs / "cpu", profile_of(timed, run_id="cpu", gpu_count=0))
    board = leaderboard.read(runs, tmp_path / "none.csv")
    assert profile_of(timed) in board.profiles and len(board.profiles) == 2
    drawn = {plot.name: plot for plot in publish.draw(board) if plot.name.startswith("profile/")}
    assert len(drawn) == 2
    plot = drawn["profile/2026-11-30_profile-a"]
    assert plot.run_ids == (timed.run_id,) and "floor" in plot.caption
    for text in ("matrix products", "update", "idle", "measured", "floor", ">4.5<", ">2<"):
        assert text in plot.svg, text
    written = publish.publish(board, tmp_path / "out")
    inside = {path.resolve() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert inside == {path.resolve() for path in written}
    for path in written:
        if path.suffix == ".svg":
            tags = {element.tag.split("}")[-1] for element in ElementTree.parse(path).iter()}
            assert "script" not in tags
    markdown = (tmp_path / "out" / "LEADERBOARD.md").read_text()
    assert "## Time by part" in markdown and "<script" not in markdown
    assert "](plots/profile/2026-11-30_profile-a.svg)" in markdown
    assert "<script>hacked" not in (tmp_path / "out" / "page" / "index.html").read_text()


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"run_id": 3}', "NaN", "<parts>", "<floor>", "<wall>"],
)
def test_a_damaged_profile_is_named_and_left_out(tmp_path, timed, text, monkeypatch, capsys):
    folder = tmp_path / "runs" / "profile"
    folder.mkdir(parents=True)
    profiles.save(folder, profile_of(timed))
    path = folder / profiles.PROFILE_FILE
    raw = json.loads(path.read_text())
    if text == "<parts>":
        raw["parts"][0]["ms"] = "4"
    if text == "<floor>":
        raw["parts"][0]["floor_ms"] = -1
    if text == "<wall>":
        raw["wall_ms"] = 0
    path.write_text(json.dumps(raw) if text.startswith("<") else text)
    where = ("--runs", tmp_path / "runs", "--target", tmp_path / "out")
    assert forge_bench(monkeypatch, "publish", *where) == 0
    assert f"{path}:1: unreadable profile" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("plots/profile/*"))
