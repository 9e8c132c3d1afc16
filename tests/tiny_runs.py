"""Runs of a tiny model with real or patched workers: for several test files."""

from __future__ import annotations

import dataclasses
import sys

from forge.harness import environment
from forge.harness.rows import select_rows
from forge.harness.runner import Run
from forge.harness.settings import Settings, batches_of, save_settings


def make_run(folder, rows, worker=None, **changes):
    settings = Settings(
        run_id=folder.name,
        model="qwen3-tiny",
        model_name="qwen3-tiny",
        weights=None,
        batch=1,
        seq=16,
        steps=2,
        warmup=1,
        attention="sdpa",
        data="random",
        device="cpu",
        dtype="bfloat16",
        seed=0,
        repeat=1,
        repeat_only=[],
        hardware="a CPU",
        timeout_s=120.0,
        rows=[dataclasses.asdict(row) for row in rows],
    )
    settings = dataclasses.replace(settings, **changes)
    save_settings(folder, settings)
    extra = {"worker": worker} if worker else {}
    said: list[str] = []
    batches = batches_of(settings)
    return Run(settings, folder, batches, environment.describe(), said.append, **extra), said


def make_job():
    from forge.harness import worker

    return worker.Job(
        row={"key": "adamw", "kernels": "hf", "execution": "eager"},
        model="qwen3-tiny", weights=None, batch=1, seq=16, device="cpu", dtype="bfloat16",
        attention="sdpa", data="", seed=0, warmup=1, steps=1, hardware="",
    )  # fmt: skip


def patched_worker(patch):
    """A server whose workers run ``patch`` (code) in place of every row, not of the reference."""
    code = (
        "import os, sys, time\n"
        "from forge.harness import worker\n"
        "real = worker.run\n"
        "def run(job):\n"
        "    if job.row is None:\n"
        "        return real(job)\n"
        f"    {patch}\n"
        "worker.run = run\n"
        "worker.serve(sys.argv[1])\n"
    )
    return (sys.executable, "-c", code)


def execute(folder, keys, patch=None, **changes):
    worker = patched_worker(patch) if patch else None
    run, said = make_run(folder, select_rows(keys, "cpu"), worker, **changes)
    return list(run.execute(run.remaining([]))), said
