"""A run as a whole: its order and folders, killed parents, interrupts, resumed runs."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from forge.harness import records
from forge.harness.rows import VARIANTS, select_rows
from forge.harness.settings import load_settings, new_folder
from forge.optim.registry import REGISTRY
from tiny_runs import execute, make_run

ROOT = Path(__file__).resolve().parents[1]
BENCH = [sys.executable, "-m", "forge.harness.cli", "--device", "cpu", "--seq", "16"]


def test_rows_of_all():
    rows = select_rows(["all"], "cuda")
    assert [row.key for row in rows[: len(REGISTRY)]] == list(REGISTRY)
    assert tuple(rows[len(REGISTRY) :]) == VARIANTS
    assert len({row.id for row in rows}) == len(rows)


def test_order_is_shuffled_by_the_seed_and_repeats_are_interleaved(tmp_path):
    rows = select_rows(["all"], "cpu")
    run, _ = make_run(tmp_path, rows, repeat=3)
    plan = run.settings.schedule()
    passes = [[row for repeat, row in plan if repeat == n] for n in range(3)]
    assert [repeat for repeat, _ in plan] == sorted(repeat for repeat, _ in plan)
    assert all(set(each) == set(rows) for each in passes) and passes[0] != passes[1]
    assert plan == load_settings(tmp_path).schedule()
    only = dataclasses.replace(run.settings, repeat_only=["adamw-fused/hf/eager", "adamw"])
    later = [row.id for repeat, row in only.schedule() if repeat > 0]
    assert sorted(later) == ["adamw-fused/hf/eager"] * 2 + ["adamw/hf/eager"] * 2
    other = dataclasses.replace(run.settings, seed=1)
    assert plan != other.schedule()


def test_folders_never_collide(tmp_path):
    names = {new_folder(tmp_path, "Qwen3-0.6B", "H200", "abc").name for _ in range(3)}
    assert len(names) == 3 and all("_Qwen3-0.6B_H200_abc" in name for name in names)


def start(out, *options):
    return subprocess.Popen(
        [*BENCH, "--out", str(out), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_record(out, process):
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        for file in out.glob(f"*/{records.RECORDS_FILE}"):
            if file.read_bytes().count(b"\n"):
                return file.parent
        time.sleep(0.05)
    raise AssertionError(f"no record: {process.communicate()[0]}")


ROWS = ("--optimizers", "adamw,adamw-fused,adamw-foreach", "--steps", "3", "--data", "random")


def test_resume_after_a_kill(tmp_path):
    process = start(tmp_path, *ROWS)
    folder = wait_for_record(tmp_path, process)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert workers
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    first = records.load(folder)[0]
    assert 1 <= len(first) < 3
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive, "workers outlived the killed parent"
    with (folder / records.RECORDS_FILE).open("a") as file:
        file.write('{"half a record')
    again = subprocess.run(
        [sys.executable, "-m", "forge.harness.cli", "--resume", str(folder)],
        capture_output=True,
        text=True,
    )
    assert again.returncode == 0, again.stderr
    found, damaged = records.load(folder)
    assert found[: len(first)] == first and len(damaged) == 1
    assert "unreadable record ignored" in again.stdout
    assert sorted(record.key for record in found) == ["adamw", "adamw-foreach", "adamw-fused"]
    assert [record.order for record in found] == [0, 1, 2]


def test_two_runs_at_once_do_not_mix(tmp_path):
    both = [start(tmp_path, "--optimizers", "adalomo", "--data", "random") for _ in range(2)]
    outputs = [process.communicate(timeout=90)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == 2
    for folder in folders:
        (record,) = records.load(folder)[0]
        assert record.run_id == folder.name == load_settings(folder).run_id


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupt_keeps_what_was_measured(stop, tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    process = start(tmp_path, *ROWS)
    folder = wait_for_record(tmp_path, process)
    process.send_signal(stop)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert f"forge-bench --resume {folder}" in output.replace("\n", "")
    assert output.endswith("forge-bench: interrupted\n")
    assert 1 <= len(records.load(folder)[0]) < 3
    assert not list(scratch.glob("forge-bench-*"))


def test_an_interrupt_amid_imports_shows_no_traceback(tmp_path):
    """torch alone is imported for seconds; here for as long as it takes to send a signal."""
    (tmp_path / "torch.py").write_text(
        "print('importing', flush=True)\nimport time; time.sleep(60)"
    )
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    process = subprocess.Popen(
        [sys.executable, ROOT / "forge_bench.py", "list"],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT and errors == ""  # a shell says 130


def test_the_entry_point_is_the_command_line():
    command = [sys.executable, ROOT / "forge_bench.py", "nope"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith("forge-bench: unknown command nope")


def test_rows_that_would_not_compare_are_not_mixed(tmp_path):
    found, _ = execute(tmp_path, ["adalomo"])
    run, _ = make_run(tmp_path, select_rows(["adalomo"], "cpu"))
    assert run.mismatch(found) == "" and run.remaining(found) == []
    for name in ("torch", "triton", "transformers", "liger_kernel"):
        other = dataclasses.replace(run, environment={**run.environment, name: "1.0"})
        assert other.mismatch(found).startswith(f"{name} was")
    rival = {**found[0].environment, "rival_version": "0.0.1"}
    measured = dataclasses.replace(found[0], environment=rival)
    assert run.mismatch([measured]).startswith("lomo-optim was 0.0.1 and is")
    other_input = dataclasses.replace(run, batches=run.batches + 1)
    assert other_input.mismatch(found).startswith("input was random")
    elsewhere = dataclasses.replace(run.settings, hardware="another")
    assert dataclasses.replace(run, settings=elsewhere).mismatch(found).startswith("hardware was")
