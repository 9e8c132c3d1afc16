"""A row survives what happens to its worker: crashes, hangs, missing packages, a full disk."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time

import numpy as np
import pytest

from forge.harness import records, runner
from forge.harness.processes import Workers
from forge.harness.rows import VARIANTS, select_rows
from forge.optim.registry import REGISTRY
from tiny_runs import execute, make_job, make_run


def test_a_row_is_measured_and_recorded(tmp_path):
    found, _ = execute(tmp_path, ["adamw-fused"])
    assert found == records.load(tmp_path)[0]
    (record,) = found
    assert (record.status, record.gate, record.notes) == ("ok", "pass", "")
    assert record.steps == len(record.samples_ms) == 2 and len(record.warmup_ms) == 1
    assert record.grad_bytes == 2 * record.params
    assert record.latency_ms == pytest.approx(np.median(record.samples_ms))
    assert record.latency_p20_ms <= record.latency_ms <= record.latency_p80_ms
    assert record.tokens_per_s == pytest.approx(16e3 / record.latency_ms)
    assert 4.0 < record.state_bytes_per_param < 4.01
    assert (record.attention, record.kernels, record.execution) == ("sdpa:flash", "hf", "eager")
    assert record.mfu_pct is None and record.ofu_pct is None
    assert record.gate_detail["steps"] == 6 and len(record.gate_detail["losses"]) == 6
    assert record.environment["seed"] == 0 and record.environment["torch"]
    assert (record.model, record.hardware, record.gpu_count) == ("qwen3-tiny", "a CPU", 0)
    assert "adamw-fused/hf/eager" in (tmp_path / "log.txt").read_text()


def test_a_killed_worker_is_a_failed_row_and_the_run_goes_on(tmp_path):
    found, _ = execute(tmp_path, ["adamw", "adamw-fused"], "os.kill(os.getpid(), 9)")
    assert [record.status for record in found] == ["failed"] * 2
    assert all("killed by SIGKILL" in record.notes for record in found)
    assert all(record.latency_ms is None for record in found)


def test_the_last_line_of_a_crash_is_the_reason(tmp_path):
    patch = "print('first'); print('the reason', file=sys.stderr); os._exit(3)"
    (record,), _ = execute(tmp_path, ["adamw"], patch)
    assert record.notes == "worker exited with code 3: the reason"
    assert "first\n" in (tmp_path / "log.txt").read_text()


def test_a_hanging_worker_is_stopped(tmp_path):
    began = time.monotonic()
    patch = "os.system('sleep 300')"
    (record,), _ = execute(tmp_path, ["adamw"], patch, timeout_s=5.0)
    assert record.status == "failed" and "stopped after 5 s" in record.notes
    assert time.monotonic() - began < 60


def test_a_result_that_was_not_written_whole_is_a_failed_row(tmp_path):
    patch = "open(job.data.replace('batches.npy', '0/result.json'), 'w')"
    patch += ".write('{\"sta'); os._exit(0)"
    (record,), _ = execute(tmp_path, ["adamw"], patch)
    assert record.status == "failed" and "its result cannot be read" in record.notes


def test_a_full_scratch_folder_ends_the_run_and_is_no_rows_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "ROOM", 2**70)
    with pytest.raises(OSError, match="No space left on device"):
        execute(tmp_path, ["adamw"], "os._exit(1)")
    assert records.load(tmp_path) == ([], [])


def test_a_worker_writes_its_result_whole_or_not_at_all(tmp_path, monkeypatch):
    from forge.harness import files, worker

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(worker, "run", lambda job: worker.Result("ok"))
    monkeypatch.setattr(worker, "_die_with_parent", lambda: None)
    monkeypatch.setattr(files.os, "fsync", full)
    job, result = tmp_path / "job.json", tmp_path / "result.json"
    job.write_text(json.dumps(dataclasses.asdict(make_job())), encoding="utf-8")
    with pytest.raises(OSError, match="No space left"):
        worker.work(str(job), str(result))
    assert not result.exists()


def test_a_killed_server_is_named_and_the_next_row_has_a_new_one(tmp_path):
    flag = tmp_path / "killed"
    patch = (
        f"if not os.path.exists({str(flag)!r}):\n"
        f"        open({str(flag)!r}, 'w').close()\n"
        "        print('a warning', flush=True); os.kill(os.getppid(), 9); time.sleep(60)\n"
        "    return real(job)"
    )
    found, _ = execute(tmp_path, ["adamw", "adamw-fused"], patch)
    assert [record.status for record in found] == ["failed", "ok"]
    assert "server was killed by SIGKILL" in found[0].notes and "warning" not in found[0].notes


def test_a_server_that_cannot_start_is_reported(tmp_path):
    code = "raise SystemExit('broken installation')"
    run, _ = make_run(tmp_path, select_rows(["adamw"], "cpu"), (sys.executable, "-c", code))
    (record,) = run.execute(run.remaining([]))
    assert record.status == "failed" and "broken installation" in record.notes


@pytest.mark.parametrize(
    ("raised", "status", "notes"),
    [
        ("torch.cuda.OutOfMemoryError('CUDA out of memory. 1')", "oom", "CUDA out of memory"),
        ("MemoryError('no room')", "oom", "out of host memory: no room"),
        ("worker.UnsupportedExecution('not so')", "unsupported", "not so"),
        ("worker.Missing('it does not import')", "skipped", "it does not import"),
        ("worker.GateFailed('too far')", "failed", "gate: too far"),
        ("KeyError('x')", "failed", "KeyError: 'x'"),
    ],
)
def test_what_is_raised_becomes_a_status(raised, status, notes, monkeypatch):
    import torch

    from forge.harness import worker

    namespace = {"torch": torch, "worker": worker}

    def measure(*_):
        raise eval(raised, namespace)

    monkeypatch.setattr(worker, "_measure", measure)
    result = worker.run(make_job())
    assert result.status == status and notes in result.notes


def test_a_missing_rival_is_a_skipped_row(tmp_path, monkeypatch):
    ghost = dataclasses.replace(
        REGISTRY["adamw"], key="ghost", target="no_such_rival:X", distribution="no-such-rival"
    )
    monkeypatch.setitem(REGISTRY, "ghost", ghost)
    (record,), _ = execute(tmp_path, ["ghost"])
    assert (record.status, record.notes) == ("skipped", "no-such-rival is not installed")


def test_a_rival_that_does_not_import_is_skipped(monkeypatch):
    from forge.harness import worker
    from forge.harness.rows import Row

    broken = dataclasses.replace(REGISTRY["adamw"], target="torch.optim:NoSuchClass")
    monkeypatch.setitem(REGISTRY, "adamw", broken)
    with pytest.raises(worker.Missing, match="torch does not import: AttributeError"):
        worker._resolve(Row("adamw", "hf", "eager"))


@pytest.mark.parametrize("text", ["raise ValueError('broken')", "raise ImportError('broken')",
                                  "def (", "raise SystemExit('broken')"])  # fmt: skip
def test_whatever_a_rival_raises_when_imported_it_is_skipped(text, tmp_path, monkeypatch):
    from forge.harness import worker
    from forge.harness.rows import Row

    (tmp_path / "broken_rival.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    broken = dataclasses.replace(REGISTRY["adamw"], target="broken_rival:X", distribution="rival")
    monkeypatch.setitem(REGISTRY, "adamw", broken)
    with pytest.raises(worker.Missing, match="rival does not import: "):
        worker._resolve(Row("adamw", "hf", "eager"))


def test_a_rival_that_transformers_imports_breaks_its_own_row_only(tmp_path, monkeypatch):
    package = tmp_path / "torchao"
    package.mkdir()
    (package / "__init__.py").write_text("raise ValueError('a broken torchao')")
    info = tmp_path / "torchao-9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchao\nVersion: 9.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    found, _ = execute(tmp_path, ["adamw", "torchao-adamw8bit"])
    ends = {record.key: (record.status, record.notes) for record in found}
    assert ends["adamw"] == ("ok", "")
    assert ends["torchao-adamw8bit"] == (
        "skipped",
        "torchao does not import: ValueError: a broken torchao",
    )


def test_a_method_that_fails_its_gate_has_no_latency(tmp_path):
    patch = (
        "from forge.optim.registry import REGISTRY; import dataclasses; "
        "REGISTRY['adamw'] = dataclasses.replace("
        "REGISTRY['adamw'], train=lambda optimizer, loss, hyper: loss.backward()); "
        "return real(job)"
    )
    (record,), _ = execute(tmp_path, ["adamw"], patch)
    assert (record.status, record.gate, record.latency_ms) == ("failed", "fail", None)
    assert "never moved" in record.notes


def test_settled_rows_do_not_start_a_worker(tmp_path):
    settled = [row for row in VARIANTS if row.kernels != "forge"]
    run, _ = make_run(tmp_path, [*select_rows(["adalomo"], "cpu"), *settled], ("/no/worker",))
    found = list(run.execute(run.remaining([])))
    assert {record.status for record in found} == {"unsupported"}
    assert {record.notes for record in found} == {
        "AdaLomo runs on cuda only",
        "a CUDA graph needs a CUDA device",
        "Liger's kernels need a CUDA device",
    }


def test_workers_of_a_server_that_has_opened_the_gpu_start_a_new_interpreter(tmp_path):
    code = (
        "import sys\n"
        "from forge.harness import worker\n"
        "worker._has_opened_gpu = lambda: True\n"
        "worker.work = None\n"
        "worker.serve(sys.argv[1])\n"
    )
    command = (sys.executable, "-c", code)
    run, _ = make_run(tmp_path, select_rows(["adamw"], "cpu"), command)
    (record,) = run.execute(run.remaining([]))
    assert record.status == "ok", record.notes


def test_a_row_whose_gate_leaves_memory_is_timed_in_a_fresh_process(tmp_path):
    patch = (
        "if job.gated is not None:\n"
        "        return worker.Result('failed', 'timed where the gate ran')\n"
        "    worker._allocated_gib = lambda device: 5.0\n"
        "    return real(job)"
    )
    (record,), _ = execute(tmp_path, ["adamw-fused"], patch)
    assert (record.status, record.gate) == ("ok", "pass") and record.latency_ms > 0


def test_a_row_passes_its_gate_once_a_run(tmp_path):
    patch = (
        f"flag = {str(tmp_path / 'gated')!r}\n"
        "    if (job.gated is None) == os.path.exists(flag):\n"
        "        return worker.Result('failed', 'gated twice, or not at all')\n"
        "    open(flag, 'w').close()\n"
        "    return real(job)"
    )
    found, _ = execute(tmp_path, ["adamw-fused"], patch, repeat=2)
    assert [(r.status, r.gate) for r in found] == [("ok", "pass")] * 2
    assert found[0].loss == found[1].loss and found[1].latency_ms > 0


def test_workers_start_clean(tmp_path):
    """Two jobs see no trace of each other: each is its own process."""
    code = (
        "import os, sys\n"
        "from forge.harness import worker\n"
        "worker.work = lambda job, result: open(result, 'a').write(f'{os.getpid()} ')\n"
        "worker.serve(sys.argv[1])\n"
    )
    result, output = tmp_path / "result", tmp_path / "output"
    command = (sys.executable, "-c", code)
    with Workers("cpu", tmp_path / "log", dict(os.environ), command) as workers:
        endings = [workers.run(tmp_path, result, output, 60) for _ in range(2)]
        server = workers.server.pid
        pipes = workers.server.stdin, workers.server.stdout
    assert all(pipe.closed for pipe in pipes)
    pids = result.read_text().split()
    assert endings == ["exited with code 0"] * 2
    assert len(set(pids)) == 2 and str(server) not in pids


def test_a_worker_imports_nothing_from_the_current_folder(tmp_path, monkeypatch):
    """A file there may have the name of a module that some library imports."""
    (tmp_path / "h2.py").write_text("raise SystemExit('imported')")
    (tmp_path / "torch.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    with Workers("cpu", tmp_path / "log", environment) as workers:
        ending = workers.run(tmp_path / "no job", tmp_path / "result", tmp_path / "output", 60)
    assert ending == "exited with code 1", (tmp_path / "output").read_text()
