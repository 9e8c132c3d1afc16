"""What is generated from records: complete, the same each time, safe against what records hold."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from command_line import forge_bench
from forge.harness import (
    files,
    leaderboard,
    page,
    plots,
    publish,
    records,
    tables,
    verdict,
)

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
HOSTILE = "</script><script>hacked=1</script><img src=x onerror=hacked=1> a|b & \"c\" 'd'\n# e"


@pytest.fixture(scope="module")
def real():
    """Rows of the recorded runs: what the synthetic ones are made of."""
    return leaderboard.load_runs(RESULTS / "runs")[0]


@pytest.fixture(scope="module")
def recorded():
    """The recorded runs, and what is drawn of them."""
    board = leaderboard.read(RESULTS / "runs", RESULTS / "published.csv")
    return board, publish.draw(board)


def save(runs: Path, *found) -> None:
    for record in found:
        folder = runs / re.sub(r"\W", "_", record.run_id)
        folder.mkdir(parents=True, exist_ok=True)
        records.append(folder, record)


def board_of(tmp_path: Path, *found):
    save(tmp_path / "runs", *found)
    return leaderboard.read(tmp_path / "runs", RESULTS / "published.csv")


class Page(HTMLParser):
    """Elements of a page, the text of its scripts, and the cells of each row by group."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.scripts: list[str] = []
        self.rows: list[tuple[str, list[str]]] = []
        self.kind, self.inside = "", ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append((tag, given))
        self.kind = given["data-kind"] if tag == "tbody" else self.kind
        if tag == "script":
            self.scripts.append("")
        if tag == "tr" and given.get("class", "").startswith("row"):
            self.rows.append((self.kind, []))
        if tag in ("td", "th") and self.kind and self.rows:
            self.rows[-1][1].append("")
        self.inside = tag

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.kind and self.rows and self.rows[-1][1]:
            self.rows[-1][1][-1] += data.strip()


def test_the_recorded_runs(tmp_path, recorded):
    board, _ = recorded
    written = publish.publish(board, tmp_path / "a")
    names = {str(path.relative_to(tmp_path / "a")) for path in written}
    assert {"leaderboard.csv", "LEADERBOARD.md", "page/index.html"} < names
    drawings = [path for path in written if path.suffix == ".svg"]
    assert len(drawings) >= 2
    for path in drawings:
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
    text = (tmp_path / "a" / "LEADERBOARD.md").read_text()
    for path in drawings:
        assert f"]({path.relative_to(tmp_path / 'a')})" in text
    assert "| 1 | FORGE | bf16 | forge | cuda_graph |" in text
    assert "**Marked: drift of" in text and "## Published by others" in text
    again = publish.publish(board, tmp_path / "b")
    for one, other in zip(written, again, strict=True):
        assert one.read_bytes() == other.read_bytes(), one


def test_what_is_committed_was_published_from_the_recorded_runs(recorded):
    """Drawings depend on the version of matplotlib; the names of all files, and these, do not."""
    board, figures = recorded
    hint = "forge-bench publish, forge-bench leaderboard --readme README.md"
    assert (RESULTS / "leaderboard.csv").read_text() == leaderboard.csv_text(board.frame), hint
    text = (RESULTS / "LEADERBOARD.md").read_text()
    assert text == publish.markdown(board, figures), hint
    drawn = {f"{figure.name}.svg" for figure in figures}
    plots_of = RESULTS / "plots"
    assert {p.relative_to(plots_of).as_posix() for p in plots_of.rglob("*.svg")} == drawn, hint
    readme = (ROOT / "README.md").read_text()
    shown = re.search(r"\(run `([^`]+)`\)", readme)[1]
    assert (
        tables.with_table(ROOT / "README.md", tables.markdown(board.frame, shown, True)) == readme
    )
    assert tables.with_budget(readme, board.profiles) == readme, hint
    trained = verdict.measured(RESULTS / "runs")
    assert tables.with_fidelity(readme, verdict.markdown(trained)) == readme, hint
    assert (RESULTS / "fidelity.csv").read_text() == verdict.text_of(trained)


def test_a_number_is_the_same_in_every_table(recorded):
    """5.1148 GiB is 5.115 with four digits, and that 5.12 with three: rounded twice."""
    board, _ = recorded
    frame = board.frame[board.frame["source"] == "measured"]
    named = ["run_id", "method", "states", "kernels", "execution"]
    rows = {tuple(row[name] for name in named): row for row in frame.to_dict("records")}
    assert len(rows) == len(board.rows)
    shown = {"peak_memory_gib": 2, "latency_ms": 1, "state_bytes_per_param": 2, "tokens_per_s": 0}
    for record in board.rows:
        row = rows[tuple(getattr(record, name) for name in named)]
        for column, places in shown.items():
            assert f"{row[column]:.{places}f}" == f"{getattr(record, column):.{places}f}", column


def test_the_page_needs_no_network_and_ranks_no_published_row(recorded):
    text = page.render(*recorded)
    board, _ = recorded
    found = Page(text)
    assert not {"link", "img", "iframe"} & {tag for tag, _ in found.tags}
    assert all("src" not in given for _, given in found.tags)
    assert not re.search(r"url\(\s*['\"]?(https?:|//)|@import|fetch\(", text)
    measured = [cells for kind, cells in found.rows if kind == "measured"]
    published = [cells for kind, cells in found.rows if kind == "published"]
    assert len(measured) == len(board.rows) and len(published) > 20
    assert all(cells[0] == "" for cells in published)
    timed = [cells for cells, row in zip(measured, board.rows, strict=True) if row is not None]
    ranks = [cells[0] for cells in timed if cells[0]]
    assert ranks.count("1") == len(records.by_run(board.rows)) and {"2", "3"} <= set(ranks)
    ids = [given["id"] for _, given in found.tags if "id" in given]
    own = [name for name in ids if not re.fullmatch(r"[mp][0-9a-f]{10,}", name)]
    assert len(own) == len(set(own)), "an id occurs twice"


def test_hostile_text_stays_text(tmp_path, real):
    evil = replace(
        real[0],
        run_id=f"../../{HOSTILE}",
        row=f"{HOSTILE}/hf/eager",
        method=HOSTILE,
        notes=HOSTILE,
        states=HOSTILE,
        execution=HOSTILE,
        memory_kind=HOSTILE,
        environment={"command": HOSTILE, HOSTILE: HOSTILE, "commit": HOSTILE, "torch": HOSTILE},
        gate_detail={**real[0].gate_detail, "layers": HOSTILE},
    )  # fmt: skip
    longer = replace(evil, run_id=f"{HOSTILE}2", seq=1024, latency_ms=2.0)
    board = board_of(tmp_path, evil, longer)
    written = publish.publish(board, tmp_path / "out")
    assert any("sequence/" in str(path) for path in written)
    inside = {path.resolve() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert inside == {path.resolve() for path in written}, "a file outside the target folder"
    for path in written:
        if path.suffix == ".svg":
            tags = {element.tag.split("}")[-1] for element in ElementTree.parse(path).iter()}
            assert not {"script", "img"} & tags
    text = (tmp_path / "out" / "page" / "index.html").read_text()
    found = Page(text)
    plain = page.render(board_of(tmp_path / "plain", real[0]), [])
    assert len(found.scripts) == len(Page(plain).scripts) == 2
    assert not {"img"} & {tag for tag, _ in found.tags}
    (shown, *_) = json.loads(found.scripts[0])
    assert shown["notes"] == shown["command"] == shown["gate"]["layers"] == HOSTILE
    markdown = (tmp_path / "out" / "LEADERBOARD.md").read_text()
    assert "<script" not in markdown and "<img" not in markdown
    rows = [line for line in markdown.splitlines() if line.startswith("| 1 |")]
    assert rows and all(line.count("|") == 13 for line in rows)


def test_a_damaged_line_is_named_and_the_rest_published(tmp_path, monkeypatch, capsys, real):
    save(tmp_path / "runs", real[0])
    (folder,) = (tmp_path / "runs").iterdir()
    with (folder / records.RECORDS_FILE).open("a") as file:
        file.write('{"half": \n')
    options = ["--runs", str(tmp_path / "runs"), "--target", str(tmp_path / "out"), "--json"]
    assert forge_bench(monkeypatch, "publish", *options) == 0
    captured = capsys.readouterr()
    assert f"{folder / records.RECORDS_FILE}:2: unreadable record" in captured.err
    shown = json.loads(captured.out)
    assert len(shown["damaged"]) == 1 and len(shown["files"]) >= 4


def test_nothing_is_written_when_something_cannot_be_made(tmp_path, monkeypatch, real):
    board = board_of(tmp_path, real[0])
    publish.publish(board, tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}

    def broken(*_):
        raise RuntimeError("template")

    monkeypatch.setattr(page, "render", broken)
    with pytest.raises(RuntimeError):
        publish.publish(board_of(tmp_path, replace(real[0], run_id="another")), tmp_path / "out")
    after = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert after == before


def test_a_full_disk_leaves_whole_files(tmp_path, monkeypatch, capsys, real):
    publish.publish(board_of(tmp_path, real[0]), tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}

    def full(_):
        raise OSError(28, "No space left on device")

    save(tmp_path / "runs", replace(real[1], run_id="another"))
    monkeypatch.setattr(files.os, "fsync", full)
    options = ["--runs", str(tmp_path / "runs"), "--target", str(tmp_path / "out")]
    assert forge_bench(monkeypatch, "publish", *options) == 1
    assert "No space left on device" in capsys.readouterr().err
    after = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert after == before


def test_drawings_of_a_run_that_is_gone_are_removed(tmp_path, real):
    out, gone = tmp_path / "out", replace(real[0], run_id="gone")
    publish.publish(board_of(tmp_path, real[0], gone), out)
    foreign = out / "plots" / "notes.txt"
    foreign.write_text("not of publish")
    assert (out / "plots" / "gone" / "memory.svg").exists()
    shutil.rmtree(tmp_path / "runs" / "gone")
    written = publish.publish(board_of(tmp_path), out)
    kept = {path for path in out.rglob("*") if path.is_file()}
    assert kept == {*written, foreign} and not (out / "plots" / "gone").exists()


def test_no_runs_at_all(tmp_path):
    (tmp_path / "runs").mkdir()
    board = leaderboard.read(tmp_path / "runs", tmp_path / "missing.csv")
    publish.publish(board, tmp_path / "out")
    assert "No run is recorded" in (tmp_path / "out" / "LEADERBOARD.md").read_text()
    assert Page((tmp_path / "out" / "page" / "index.html").read_text()).rows == []


def test_a_run_without_one_time(tmp_path, real):
    failed = replace(
        real[0], status="oom", gate="", latency_ms=None, peak_memory_gib=None, samples_ms=[]
    )
    written = publish.publish(board_of(tmp_path, failed), tmp_path / "out")
    assert not [path for path in written if path.suffix == ".svg"]


def test_the_fullest_run_comes_first_though_a_small_one_is_newer(tmp_path, real):
    full = next(run for run in records.by_run(real).values() if len(records.by_row(run)) > 10)
    small = [replace(row, run_id="small", date="2999-01-01T00:00:00Z") for row in full[:1]]
    old = [replace(row, run_id="old", date="2000-01-01T00:00:00Z") for row in full[:2]]
    board = board_of(tmp_path, *old, *small, *full)
    order = [run[0].run_id for run in page.runs_in_order(board.rows)]
    assert order == [full[0].run_id, "small", "old"]
    told = publish.markdown(board, [])
    assert told.index(full[0].run_id) < told.index("small") < told.index("`old`")


@pytest.mark.parametrize(("other", "least", "most"), [(101.25, 0.0, 0.05), (150.0, 0.8, 0.9)])
def test_times_that_are_about_equal_are_drawn_close_together(monkeypatch, real, other, least, most):
    row = next(record for record in real if record.latency_ms and record.peak_memory_gib)
    rows = [replace(row, latency_ms=101.16), replace(row, row="other/hf/eager", latency_ms=other)]
    seen = []
    monkeypatch.setattr(plots, "_number_points", lambda axes, points: seen.append(axes))
    assert plots.latency_memory(rows)
    low, high = (seen[0].transAxes.inverted().transform(seen[0].transData.transform((ms, 1)))[0]
                 for ms in (101.16, other))  # fmt: skip
    assert 0 <= low and high <= 1 and least < high - low < most  # of the width


def test_pareto_front():
    import random

    assert plots.pareto_front([(1.0, 5.0), (2.0, 4.0), (2.0, 6.0), (3.0, 4.0), (0.5, 9.0)]) == [
        4, 0, 1,
    ]  # fmt: skip
    draw = random.Random(0)
    points = [(draw.randrange(30), draw.randrange(30)) for _ in range(60)]
    front = plots.pareto_front(points)
    kept = {points[i] for i in front}
    for p in points:
        beaten = any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)
        assert (p not in kept) == beaten


def test_the_front_ends_at_the_edges():
    """What is dominated is right of it and above: also beyond its first and last point."""
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    axes.set(xlim=(0, 10), ylim=(0, 20))
    plots._draw_front(axes, [(2.0, 8.0), (3.0, 4.0)])
    (line,) = axes.lines
    assert list(map(tuple, line.get_xydata())) == [(2, 20), (2, 8), (3, 4), (10, 4)]
    assert axes.get_xlim() == (0, 10) and axes.get_ylim() == (0, 20)


def test_no_two_rows_of_a_plot_have_one_name(real):
    for run in records.by_run(real).values():
        named = plots.labels(run)
        assert len(set(named.values())) == len(named) == len(records.by_row(run)) > 0
    ours = replace(real[0], key="forge-bf16", method="FORGE", states="bf16", execution="eager")
    rows = [
        replace(ours, row=str(i), kernels=kernels)
        for i, kernels in enumerate(("liger", "liger", "forge"))
    ]
    assert plots.usual_kernels(rows) == "liger" and plots.usual_kernels(rows[1:]) == ""
    assert list(plots.labels(rows).values()) == ["FORGE (0)", "FORGE (1)", "FORGE, forge"]
    assert list(plots.labels(rows[1:]).values()) == ["FORGE, liger", "FORGE, forge"]
    assert plots.labels([]) == {}


@pytest.mark.parametrize(
    ("wanted", "gap"),
    [([0.5] * 20, 0.05), ([0.0] * 5 + [1.0] * 5, 0.1), ([0.1, 0.9], 0.05), ([-0.5, 2.0], 0.1)],
)
def test_names_beside_lines_do_not_overlap(wanted, gap):
    places = plots.spread_out(wanted, gap)
    apart = [b - a for a, b in zip(places, places[1:], strict=False)]
    assert min(apart) >= gap - 1e-9 and 0 <= places[0] and places[-1] <= 1
    if wanted == [0.1, 0.9]:
        assert places == wanted


def test_memory_parts_add_up_to_the_peak(real):
    record = next(r for r in real if r.row == "adamw-fused/liger/eager")
    parts = plots.memory_parts(record)
    assert sum(parts.values()) == pytest.approx(record.peak_memory_gib)
    assert parts["weights"] == pytest.approx(2 * record.params / 2**30)
    assert parts["gradients"] == pytest.approx(parts["weights"]) and "activations, other" in parts
    known = plots.memory_parts(replace(record, grad_bytes=2**30))
    assert known["gradients"] == 1.0 and "activations, other" in known
    assert sum(known.values()) == pytest.approx(record.peak_memory_gib)
    assert plots.memory_parts(replace(record, state_bytes=None)) is None


@pytest.mark.parametrize(
    ("changes", "drawn"),
    [
        ({}, True),
        ({"hardware": "H100"}, False),
        ({"batch": 4}, False),
        ({"environment": {"commit": "another", "torch": "2.11.0"}}, False),
        ({"environment": {"commit": "d1e63e00f", "torch": "2.12.0"}}, False),
        ({"environment": {"commit": "d1e63e00f", "torch": "2.11.0", "dirty": True}}, False),
    ],
)
def test_lengths_are_joined_only_where_they_compare(tmp_path, real, changes, drawn):
    short = next(r for r in real if r.status == "ok")
    long = replace(short, run_id="longer", seq=4 * short.seq, **changes)
    names = [figure.name for figure in publish.draw(board_of(tmp_path, short, long))]
    assert any(name.startswith("sequence/") for name in names) == drawn


def test_the_templates_are_in_the_wheel(tmp_path):
    """Package data behind a symlinked namespace package."""
    setuptools = pytest.importorskip("setuptools", reason="building a wheel needs setuptools")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip(f"building a wheel needs setuptools 77 or later, not {setuptools.__version__}")
    names = (".git", ".venv", "build", "*.egg-info", "__pycache__", ".*_cache")
    skipped = shutil.ignore_patterns(*names)
    shutil.copytree(ROOT, tmp_path / "source", symlinks=True, ignore=skipped)
    build = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)],
        cwd=tmp_path / "source", check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "installed")
    assert {"page.html.j2", "page.css", "page.js"} <= {
        Path(name).name for name in names if name.startswith("forge/harness/templates/")
    }
    code = (
        "import sys; from pathlib import Path; import forge; print(forge.__file__)\n"
        "from forge.harness import leaderboard, publish\n"
        "board = leaderboard.read(Path(sys.argv[1]), Path('none.csv'))\n"
        "publish.publish(board, Path('out'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(RESULTS / "runs")],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert str(tmp_path / "installed") in done.stdout
    assert (tmp_path / "out" / "page" / "index.html").stat().st_size > 10_000
