"""Records and the leaderboard made of them.

What is written is read back; damage costs the damaged line only; leaderboard.csv has exact columns,
published rows apart, runs kept together, and is replaced in one step.
"""

from __future__ import annotations

import dataclasses
import io
import json
import shutil

import pandas as pd
import pytest
from rich.console import Console

from forge.harness import files, leaderboard, noise, options, records, tables
from forge.harness.profiles import Profile
from forge.harness.records import Record

HEADER = (
    "method,source,status,hardware,gpu_count,model,batch,seq,precision,states,attention,kernels,"
    "execution,latency_ms,latency_p20_ms,latency_p80_ms,peak_memory_gib,state_bytes_per_param,"
    "tokens_per_s,mfu_pct,ofu_pct,loss,gate,steps,torch,triton,date,commit,run_id,source_ref,notes"
)
PUBLISHED = (
    "source,source_ref,date,method,model,hardware,batch,seq,precision,states,attention,kernels,"
    "execution,latency_ms,peak_memory_gib,tokens_per_s,approximate\n"
    "published,a paper,2026-06,vanilla AdamW,Qwen3-0.6B,H200,1,512,bf16-everywhere,bf16,FA3,Liger,"
    "eager,111.9,7.3,,False\n"
    "published,a post,2026,baseline,Phi-4-mini,H100,1,4096,bf16,,,,,,,4921.59,True\n"
)


def make_record(**changes) -> Record:
    """A complete ``ok`` record."""
    base = Record(
        run_id="2026-01-02_run",
        row="adamw/hf/eager",
        key="adamw",
        method="vanilla AdamW",
        status="ok",
        notes="",
        date="2026-01-02T03:04:05Z",
        hardware="H200",
        gpu_count=1,
        model="Qwen3-0.6B",
        batch=1,
        seq=512,
        precision="bf16",
        states="bf16",
        kernels="hf",
        execution="eager",
        attention_request="sdpa",
        attention="sdpa:cudnn",
        gate="pass",
        latency_ms=2.0,
        latency_p20_ms=1.0,
        latency_p80_ms=3.0,
        peak_memory_gib=4.5,
        tokens_per_s=256_000.0,
        samples_ms=[1.0, 2.0, 3.0],
        steps=3,
        environment={"torch": "2.11.0", "triton": "3.6.0", "commit": "abc", "dirty": False},
    )
    return dataclasses.replace(base, **changes)


def test_round_trip(tmp_path):
    written = [make_record(), make_record(row="b/hf/eager", gate_detail={"losses": [9.0, 8.5]})]
    for record in written:
        records.append(tmp_path, record)
    assert records.load(tmp_path) == (written, [])


def test_truncated_last_line_is_reported_and_the_next_record_is_whole(tmp_path):
    first, lost, later = (make_record(row=name) for name in ("a", "b", "c"))
    records.append(tmp_path, first)
    records.append(tmp_path, lost)
    path = tmp_path / records.RECORDS_FILE
    path.write_bytes(path.read_bytes()[:-20])
    found, damaged = records.load(tmp_path)
    assert found == [first]
    assert len(damaged) == 1 and ":2: unreadable record" in damaged[0]
    records.append(tmp_path, later)
    assert records.load(tmp_path)[0] == [first, later]


@pytest.mark.parametrize("line", [b"[1]", b'"text"', b"{}", b"\xff\xfe", b"null"])
def test_a_line_that_is_no_record_is_reported(tmp_path, line):
    records.append(tmp_path, make_record())
    with (tmp_path / records.RECORDS_FILE).open("ab") as file:
        file.write(line + b"\n")
    found, damaged = records.load(tmp_path)
    assert len(found) == 1 and len(damaged) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"latency_ms": "fast"},
        {"latency_ms": 0.0},
        {"samples_ms": [1.0, "2"]},
        {"samples_ms": 3},
        {"method": None},
        {"batch": 1.5},
        {"batch": True},
        {"environment": []},
        {"peak_memory_gib": float("nan")},
        {"run_id": 7},
    ],
)
def test_a_record_with_a_wrong_value_is_damage(tmp_path, changes):
    """It must fail where it is read, with file and line, not later in a plot or a page."""
    raw = dataclasses.asdict(make_record()) | changes
    (tmp_path / records.RECORDS_FILE).write_text(json.dumps(raw) + "\n")
    found, damaged = records.load(tmp_path)
    assert found == [] and len(damaged) == 1 and "records.jsonl:1: unreadable" in damaged[0]


@pytest.mark.parametrize("changes", [{"seq": 4096}, {"hardware": "H100"}, {"batch": 2}])
def test_a_record_of_other_work_is_not_ranked_with_the_run(tmp_path, changes):
    """The rows of a run are ranked together: one of another setting or machine is named instead."""
    records.append(tmp_path, make_record())
    records.append(tmp_path, make_record(row="b/hf/eager", **changes))
    records.append(tmp_path, make_record(row="c/hf/eager"))
    found, damaged = records.load(tmp_path)
    assert [record.row for record in found] == [make_record().row, "c/hf/eager"]
    assert len(damaged) == 1 and "records.jsonl:2: " in damaged[0] and "other work" in damaged[0]


def test_fields_of_a_later_version_are_ignored(tmp_path):
    raw = dataclasses.asdict(make_record()) | {"invented_later": 1}
    (tmp_path / records.RECORDS_FILE).write_text(json.dumps(raw) + "\n")
    assert records.load(tmp_path) == ([make_record()], [])


@pytest.mark.parametrize(
    "changes", [{"gate": "fail"}, {"gate": ""}, {"status": "failed"}, {"status": "oom"}]
)
def test_no_latency_without_a_green_gate(changes):
    with pytest.raises(ValueError, match="a latency needs status ok and gate pass"):
        make_record(**changes)


def test_unknown_status_is_refused():
    with pytest.raises(ValueError, match="status must be one of ok, oom"):
        make_record(status="fine")


def save(runs, *found):
    for record in found:
        folder = runs / record.run_id
        folder.mkdir(parents=True, exist_ok=True)
        records.append(folder, record)


@pytest.fixture
def published(tmp_path):
    path = tmp_path / "published.csv"
    path.write_text(PUBLISHED)
    return path


def regenerate(tmp_path, published, **options):
    target = tmp_path / "leaderboard.csv"
    board = leaderboard.read(tmp_path / "runs", published, **options)
    leaderboard.write(board, target)
    return pd.read_csv(target), board.damaged


def test_columns_are_exactly_these(tmp_path, published):
    save(tmp_path / "runs", make_record())
    regenerate(tmp_path, published)
    assert (tmp_path / "leaderboard.csv").read_text().splitlines()[0] == HEADER


def test_measured_and_published_rows(tmp_path, published):
    failed = make_record(
        row="x/hf/eager", status="oom", notes="why", gate="", latency_ms=None, samples_ms=[]
    )
    save(tmp_path / "runs", failed, make_record())
    frame, damaged = regenerate(tmp_path, published)
    assert damaged == []
    assert list(frame["source"]) == ["measured", "measured", "published", "published"]
    ok, oom, paper = frame.iloc[0], frame.iloc[1], frame[frame["hardware"] == "H200"].iloc[2]
    assert (ok["latency_ms"], ok["attention"], ok["date"]) == (2.0, "sdpa:cudnn", "2026-01-02")
    assert (oom["status"], oom["notes"]) == ("oom", "why") and pd.isna(oom["latency_ms"])
    assert (paper["status"], paper["latency_ms"], paper["source_ref"]) == ("ok", 111.9, "a paper")
    assert pd.isna(paper["run_id"]) and paper["execution"] == "eager"
    assert frame[frame["model"] == "Phi-4-mini"].iloc[0]["notes"] == "approximate"


def test_rows_of_a_run_stay_together(tmp_path, published):
    for run_id, times in (("2026-01-01_a", (5.0, 1.0)), ("2026-01-02_b", (4.0, 2.0))):
        for i, ms in enumerate(times):
            save(tmp_path / "runs", make_record(run_id=run_id, row=f"{i}", latency_ms=ms))
    measured = regenerate(tmp_path, published)[0].query("source == 'measured'")
    assert list(measured["run_id"]) == ["2026-01-01_a"] * 2 + ["2026-01-02_b"] * 2
    assert list(measured["latency_ms"]) == [1.0, 5.0, 2.0, 4.0]


def test_cpu_rows_stay_out_unless_asked_for(tmp_path, published):
    save(tmp_path / "runs", make_record(gpu_count=0, model="qwen3-tiny"))
    assert "measured" not in set(regenerate(tmp_path, published)[0]["source"])
    assert "measured" in set(regenerate(tmp_path, published, include_cpu=True)[0]["source"])


def test_repeats_are_pooled(tmp_path, published):
    for repeat, ms in enumerate((2.0, 4.0, 9.0)):
        save(tmp_path / "runs", make_record(repeat=repeat, latency_ms=ms, samples_ms=[ms] * 3))
    row = regenerate(tmp_path, published)[0].iloc[0]
    assert (row["latency_ms"], row["steps"], row["tokens_per_s"]) == (4.0, 9, 128_000)
    assert row["notes"] == ("3 passes: 2, 4, 9 ms; drift of 350.0 % between passes, above 2 %")


def test_the_latency_is_the_median_of_the_passes(tmp_path, published):
    """Not of the pooled steps: a pass with more steps has no more weight."""
    for repeat, samples in enumerate(([1.0] * 9, [5.0] * 3, [6.0] * 3)):
        record = make_record(repeat=repeat, latency_ms=samples[0], samples_ms=samples)
        save(tmp_path / "runs", record)
    row = regenerate(tmp_path, published)[0].iloc[0]
    assert (row["latency_ms"], row["steps"]) == (5.0, 15)
    assert row["latency_p20_ms"] == 1.0


def test_drift_is_told_by_the_row_that_came_first(tmp_path, published):
    for order, (row, ms) in enumerate([("b", 10.0), ("a", 10.0), ("b", 10.1), ("a", 19.0)]):
        record = make_record(
            row=row, method=row, order=order, repeat=order // 2, latency_ms=ms, samples_ms=[ms]
        )
        save(tmp_path / "runs", record)
    found = leaderboard.load_runs(tmp_path / "runs")[0]
    assert noise.drift_pct(found) == pytest.approx(1.0)
    assert noise.drift_note(1.0) == "" and "2.5 %" in noise.drift_note(2.5)
    assert not regenerate(tmp_path, published)[0]["notes"].str.contains("drift", na=False).any()
    assert noise.drift_pct([make_record()]) is None


def test_one_bad_repeat_is_not_hidden(tmp_path, published):
    bad = make_record(repeat=1, status="failed", gate="fail", notes="why", latency_ms=None)
    save(tmp_path / "runs", make_record(), bad)
    row = regenerate(tmp_path, published)[0].iloc[0]
    assert (row["status"], row["notes"]) == ("failed", "why") and pd.isna(row["latency_ms"])


def test_a_copied_run_does_not_count_twice(tmp_path, published):
    save(tmp_path / "runs", make_record())
    shutil.copytree(tmp_path / "runs" / "2026-01-02_run", tmp_path / "runs" / "2026-01-02_run_copy")
    frame, messages = regenerate(tmp_path, published)
    assert frame.iloc[0]["steps"] == 3 and pd.isna(frame.iloc[0]["notes"])
    assert len(messages) == 1 and "2026-01-02_run_copy: ignored" in messages[0]


def test_damaged_records_are_reported(tmp_path, published):
    save(tmp_path / "runs", make_record())
    with (tmp_path / "runs" / "2026-01-02_run" / records.RECORDS_FILE).open("a") as file:
        file.write('{"half": ')
    frame, damaged = regenerate(tmp_path, published)
    assert len(damaged) == 1 and len(frame) == 3


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "out.csv"
    target.write_text("old")

    def broken(*_):
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "fsync", broken)
    with pytest.raises(OSError, match="disk full"):
        files.write_atomically(target, "new")
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.csv"]


def test_readme_table(tmp_path, published):
    oom = make_record(
        row="y", method="GaLore r=128", status="oom", gate="", latency_ms=None, samples_ms=[]
    )
    save(tmp_path / "runs", make_record(kernels="liger"), oom)
    frame, _ = regenerate(tmp_path, published)
    readme = tmp_path / "README.md"
    readme.write_text(f"top\n{tables.BEGIN}\nold\n{tables.END}\nbottom\n")
    text = tables.with_table(readme, tables.markdown(frame, "2026-01-02_run"))
    assert text.startswith("top\n") and text.endswith("\nbottom\n") and "old" not in text
    assert (
        "| 1 | vanilla AdamW | bf16 | liger | eager | 2.0 | 1.0 to 3.0 | 4.50 |  | 256,000 "
        "| 111.9 / 7.3 |" in text
    )
    assert "| GaLore r=128 | bf16 | hf | eager | oom |" in text
    brief = tables.markdown(frame, "2026-01-02_run", brief=True).splitlines()
    assert "| 1 | vanilla AdamW | bf16 | liger | eager | 2.0 | 4.50 | 111.9 / 7.3 |" in brief
    assert "|  | GaLore r=128 | bf16 | hf | eager | oom |  |  |" in brief


def test_the_fullest_run_comes_first():
    made = [make_record(run_id="a"), make_record(run_id="a", row="y"), make_record(run_id="b")]
    assert leaderboard.headline(made) == "a" and leaderboard.headline([]) is None
    long = [dataclasses.replace(row, run_id="long", seq=4096) for row in made[:2]]
    new = [dataclasses.replace(row, run_id="new", date="2027-01-01T00:00:00Z") for row in made[:2]]
    assert leaderboard.headline([*long, *new, *made]) == "new"


def make_profile(**changes):
    fields: dict = dict(run_id="p", row="forge-bf16/forge/cuda_graph", method="FORGE", model="M",
                        batch=1, seq=512, precision="bf16", hardware="H200", gpu_count=1,
                        date="2026-01-02T00:00:00Z", steps=5, wall_ms=7.07, launches=5.0,
                        parts=[dict(part="loss", ms=0.14, floor_ms=0.07, pieces=1),
                               dict(part="idle", ms=0.35, floor_ms=None, pieces=0)])  # fmt: skip
    return Profile(**{**fields, **changes})


def test_readme_time_budget():
    text = f"top\n{tables.BUDGET_BEGIN}\nold\n{tables.BUDGET_END}\nbottom\n"
    newer = make_profile(run_id="newer", date="2026-01-03T00:00:00Z")
    other = make_profile(method="fused AdamW", date="2026-01-04T00:00:00Z")
    shown = tables.with_budget(text, [make_profile(), newer, other])
    assert "`newer`" in shown and "7.07 ms a step" in shown and "old" not in shown
    assert shown.index("| idle | 0.35 |  | 0 |") < shown.index("| loss | 0.14 | 0.07 | 1 |")
    assert shown.startswith("top\n") and shown.endswith("\nbottom\n")
    assert tables.with_budget(text, [other]) == text
    assert tables.with_budget("no markers", [newer]) == "no markers"


@pytest.mark.parametrize("width", [180, 120, 80, 60, 40, 24])
def test_no_terminal_is_so_narrow_that_a_number_is_cut(width, tmp_path, published):
    spent = make_record(method="optimi.gradient_release", execution="compile+cuda_graph",
                        latency_ms=12345.67, tokens_per_s=45132.0)  # fmt: skip
    save(tmp_path / "runs", spent, make_record(row="y", latency_ms=97.25, peak_memory_gib=40.19))
    frame, _ = regenerate(tmp_path, published)
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    options.show_table(console, tables.result_table(frame, "title"), tables.SPARE)
    shown = console.file.getvalue()
    assert "12,346.00" in shown and "97.25" in shown and "…" not in shown
    assert ("40.19" in shown) == (width > 40) and ("execution" in shown) == (width > 40)
    assert max(len(line) for line in shown.splitlines()) <= width


def test_a_published_figure_stands_beside_the_same_work_only(tmp_path, published):
    others = ({"states": "fp32"}, {"kernels": "liger+flce"}, {"execution": "compile"})
    for i, other in enumerate(({}, *others)):
        record = make_record(**{"row": str(i), "latency_ms": 2.0 + i, "kernels": "liger", **other})
        save(tmp_path / "runs", record)
    frame, _ = regenerate(tmp_path, published)
    rows = tables.markdown(frame, "2026-01-02_run").splitlines()[-4:]
    assert ["111.9 / 7.3" in row for row in rows] == [True, False, False, False]


def test_a_row_of_one_pass_among_rows_of_several_says_so(tmp_path, published):
    for repeat, ms in enumerate((3.0, 4.0)):
        save(tmp_path / "runs", make_record(row="several", repeat=repeat, latency_ms=ms))
    save(tmp_path / "runs", make_record(row="one", notes="why", latency_ms=2.9))
    frame, _ = regenerate(tmp_path, published)
    first, second = frame["notes"][:2]
    assert first == "1 pass; why" and second.startswith("2 passes: ")
    assert "`1 pass`: how far another is from it is not known" in tables.markdown(
        frame, "2026-01-02_run"
    )
    (above, *_) = tables.markdown(frame, "2026-01-02_run", brief=True).splitlines()
    assert "Row 2: median of 2 passes: 3, 4 ms. Marked: drift of 33.3 % between passes" in above
    assert "The other rows are one pass: how far another is from it is not known" in above


def test_a_run_of_single_passes_says_so(tmp_path, published):
    save(tmp_path / "runs", make_record(), make_record(row="b/hf/eager", notes="why"))
    frame, _ = regenerate(tmp_path, published)
    assert "One pass a row: how far another" in tables.markdown(frame, "2026-01-02_run")
    for row in ("b/hf/eager", make_record().row):
        save(tmp_path / "runs", make_record(row=row, repeat=1))
    frame, _ = regenerate(tmp_path, published)
    assert "ne pass a row" not in tables.markdown(frame, "2026-01-02_run")


def test_a_line_written_twice_is_no_second_pass(tmp_path, published):
    save(tmp_path / "runs", make_record())
    save(tmp_path / "runs", make_record(latency_ms=9.0))
    frame, damaged = regenerate(tmp_path, published)
    assert (frame.iloc[0]["steps"], frame.iloc[0]["latency_ms"]) == (3, 2.0)
    assert len(damaged) == 1 and "records.jsonl:2: " in damaged[0] and "pass 1 of" in damaged[0]


def test_readme_errors(tmp_path, published):
    save(tmp_path / "runs", make_record())
    frame, _ = regenerate(tmp_path, published)
    with pytest.raises(
        ValueError, match="no run 'x' in the leaderboard; there are: 2026-01-02_run"
    ):
        tables.markdown(frame, "x")
    with pytest.raises(ValueError, match="needs the lines"):
        tables.with_table(tmp_path / "README.md", "text")
