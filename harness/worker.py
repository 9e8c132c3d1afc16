"""Runs one row in its own process: ``python -m forge.harness.worker JOB.json RESULT.json``.

``--serve DEVICE`` instead reads jobs from standard input and forks a worker for each
(:mod:`forge.harness.processes`).
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import math
import os
import signal
import sys
import traceback
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from forge.harness import checks, timing
from forge.harness.attention import attention_backend
from forge.harness.efficiency import record_columns
from forge.harness.environment import one_line, package_version
from forge.harness.execution import GraphStep, Step, UnsupportedExecution, build_step
from forge.harness.files import write_atomically
from forge.harness.memory import GIB, GradientMeter, PeakMeter, state_bytes
from forge.harness.rows import Row
from forge.harness.turns import MORE_STEPS, Turns
from forge.harness.workloads import MODELS, build_model, import_transformers, load_model
from forge.optim.spec import Hyper

HYPER = Hyper()
# The reference takes 16 bytes a parameter plus a copy; 2e9 parameters fit in 80 GB.
GATE_PARAMS, GATE_LAYERS = 2e9, 4
# More than the cuBLAS workspaces, 0.06 GiB, which any step allocates.
LEFT_GIB = 0.1
# What the gate adds to a record.
GATE_FIELDS = ("gate", "gate_detail", "loss")


@dataclass(frozen=True)
class Job:
    """What a worker is asked to do. ``row=None`` asks for the gate's reference trajectory."""

    row: dict[str, str] | None
    model: str
    weights: str | None
    batch: int
    seq: int
    device: str
    dtype: str
    attention: str
    data: str
    seed: int
    warmup: int
    steps: int | None
    hardware: str
    reference: str | None = None
    # What the row's gate found, when it has passed already in this run.
    gated: dict[str, Any] | None = None
    gate_only: bool = False
    # Arguments of a :class:`~forge.harness.turns.Turns`.
    turns: dict[str, Any] | None = None


@dataclass
class Result:
    """What a worker hands back: fields of a :class:`~forge.harness.records.Record`."""

    status: str
    notes: str = ""
    fields: dict[str, Any] = field(default_factory=dict)


class GateFailed(RuntimeError):
    """The method did not train as the reference; the message says how."""


class Leftovers(BaseException):
    """The gate passed, and its model is still in memory: the row must be timed without it.

    Gradient-release hooks form reference cycles through C++, which no garbage collector breaks.
    """


class Missing(RuntimeError):
    """The package of a method is installed but does not import."""


def run(job: Job) -> Result:
    """Do ``job``; what goes wrong becomes a status and its reason."""
    fields: dict[str, Any] = {}
    if job.device == "cpu":
        # A second thread halves the time on an idle machine and costs 40 times on a busy one.
        torch.set_num_threads(1)
    try:
        import_transformers()
        if job.row is None:
            return Result("ok", fields={"trajectory": _reference(job).to_json()})
        _measure(job, Row(**job.row), fields)
        return Result("ok", fields.pop("notes", ""), fields)
    except GateFailed as error:
        return Result("failed", f"gate: {error}", fields)
    except UnsupportedExecution as error:
        return Result("unsupported", str(error), fields)
    except Missing as error:
        return Result("skipped", str(error), fields)
    except MemoryError as error:
        return Result("oom", f"out of host memory: {error}", fields)
    except Exception as error:
        traceback.print_exc()
        if _is_oom(error):
            return Result("oom", one_line(error), fields)
        return Result("failed", one_line(error), fields)


def _is_oom(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(
        phrase in text for phrase in ("CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    )


def _resolve(row: Row) -> Any:
    try:
        return row.spec.resolve()
    except (Exception, SystemExit) as error:  # somebody else's module may raise anything
        name = row.spec.distribution or "torch"
        raise Missing(f"{name} does not import: {one_line(error)}") from error


def _measure(job: Job, row: Row, fields: dict[str, Any]) -> None:
    target = _resolve(row)
    if row.spec.distribution:
        fields["rival_version"] = package_version(row.spec.distribution)
    batches = _load_batches(job)
    if job.gated is None:
        _gate(job, row, target, batches, fields)
        if job.gate_only:
            return
        _free(job.device, row.execution)
        if _allocated_gib(job.device) > LEFT_GIB:
            raise Leftovers({key: fields[key] for key in GATE_FIELDS})
    else:
        fields |= job.gated
    _time(job, row, target, batches, fields)


def _gate(job: Job, row: Row, target: Any, batches: list[Any], fields: dict[str, Any]) -> None:
    fields["gate"] = "fail"
    assert job.reference is not None
    reference = checks.Trajectory.from_json(
        json.loads(Path(job.reference).read_text(encoding="utf-8"))
    )
    config = _gate_config(job)
    common = _placement(job, row.kernels)
    model = build_model(config, **common, attention=job.attention, seed=job.seed)
    step, _ = _build_step(row, target, model, checks.GATE_HYPER, batches[0])
    trajectory = checks.run_trajectory(model, step, batches[:2], len(reference.losses))
    fields["loss"] = trajectory.losses[-1]
    fields["gate_detail"] = {
        "steps": len(trajectory.losses),
        "layers": config.num_hidden_layers,
        "hyper": asdict(checks.GATE_HYPER),
        "tolerance": asdict(checks.EXACT if row.spec.exact else checks.LOSSY),
        "losses": trajectory.losses,
        "reference_losses": reference.losses,
        "movement": {kind: asdict(m) for kind, m in trajectory.movement.items()},
        "reference_movement": {kind: asdict(m) for kind, m in reference.movement.items()},
    }
    reasons = checks.judge(trajectory, reference, row.spec.exact, row.spec.adamw_decay)
    if reasons:
        raise GateFailed("; ".join(reasons))
    fields["gate"] = "pass"


def _time(job: Job, row: Row, target: Any, batches: list[Any], fields: dict[str, Any]) -> None:
    common = _placement(job, row.kernels)
    if job.weights:
        model = load_model(job.weights, **common, attention=job.attention)
    else:
        model = build_model(_config(job), **common, attention=job.attention, seed=job.seed)
    fields["attention"] = attention_backend(model, batches[0])
    meter = PeakMeter(job.device)
    gradients = GradientMeter(model)
    # Python's cycle collector need not walk what the imports and the model are made of in a step.
    gc.collect()
    gc.freeze()
    step, optimizer = _build_step(row, target, model, HYPER, batches[0], gradients)
    meter.reset()
    first, _ = timing.time_steps(step, batches, 1, job.device)
    fields["grad_bytes"] = gradients.stop()
    others, _ = timing.time_steps(step, batches, job.warmup - 1, job.device, start=1)
    fields["warmup_ms"] = first + others
    fields["peak_warmup_gib"], _ = meter.read()
    turns = Turns(**job.turns) if job.turns else None
    steps = job.steps or timing.steps_needed(fields["warmup_ms"]) * (MORE_STEPS if turns else 1)
    meter.reset()
    samples, loss = timing.time_steps(step, batches, steps, job.device, job.warmup, turns)
    allocated, fields["peak_reserved_gib"] = meter.read()
    # A replayed graph allocates nothing that the allocator sees: its peak is that of the capture.
    captured = step.peak_bytes / GIB if isinstance(step, GraphStep) else 0.0
    fields["peak_memory_gib"] = max(allocated, captured)
    fields["memory_kind"] = meter.kind
    if not bool(torch.isfinite(loss)):
        raise RuntimeError(f"the loss is {float(loss)} after {job.warmup + steps} steps")
    p20, p50, p80 = timing.quantiles(samples)
    params = sum(p.numel() for p in model.parameters() if p.requires_grad)
    held = state_bytes(optimizer, model)
    tokens = job.batch * job.seq
    feed = itertools.cycle(batches)
    if turns is not None:
        turns.take()  # nobody else may use the GPU
    efficiency, missing = record_columns(
        _config(job),
        job.batch,
        job.seq,
        job.hardware,
        latency_ms=p50,
        step=(lambda: step(next(feed))) if job.device == "cuda" else None,
    )
    measured = efficiency | dict(
        samples_ms=samples,
        steps=steps,
        latency_ms=p50,
        latency_p20_ms=p20,
        latency_p80_ms=p80,
        params=params,
        state_bytes=held,
        state_bytes_per_param=held / params,
        tokens_per_s=tokens / p50 * 1e3,
        slow_steps=timing.slow_steps(samples),
    )
    notes = "; ".join(filter(None, [_notes({**fields, **measured}), *missing]))
    fields |= {**measured, "notes": notes}


def _notes(fields: dict[str, Any]) -> str:
    notes = []
    first, median = fields["warmup_ms"][0] if fields["warmup_ms"] else 0, fields["latency_ms"]
    if first > timing.SLOW_FACTOR * median:
        notes.append(f"first step {first:.0f} ms")
    if fields["peak_warmup_gib"] > 1.1 * fields["peak_memory_gib"]:
        notes.append(f"peak in warm-up {fields['peak_warmup_gib']:.2f} GiB")
    if fields["slow_steps"]:
        slow = max(fields["samples_ms"][i] for i in fields["slow_steps"])
        notes.append(f"{len(fields['slow_steps'])} slow steps, up to {slow:.0f} ms")
    return "; ".join(notes)


def _build_step(
    row: Row,
    target: Any,
    model: nn.Module,
    hyper: Hyper,
    example: dict[str, Tensor],
    gradients: GradientMeter | None = None,
) -> tuple[Step, Any]:
    """The row's training step and the optimizer behind it, which ``gradients`` watches."""
    graph = "cuda_graph" in row.execution
    hyper = Hyper(**{**asdict(hyper), "capturable": graph and row.spec.capturable})
    optimizer = row.spec.build(target, model, hyper)
    if gradients:
        gradients.watch(optimizer)
    return build_step(model, optimizer, row.spec, hyper, row.execution, example), optimizer


def _reference(job: Job) -> checks.Trajectory:
    # FlashAttention has no fp32.
    common = _placement(job, "hf")
    model = build_model(_gate_config(job), **common, attention="sdpa", seed=job.seed).float()
    steps = checks.GATE_STEPS[job.device]
    return checks.reference_trajectory(model, _load_batches(job)[:2], steps)


def _placement(job: Job, kernels: str) -> dict[str, Any]:
    return dict(device=job.device, dtype=getattr(torch, job.dtype), kernels=kernels)


def _config(job: Job) -> Any:
    if job.weights:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(job.weights)
    return MODELS[job.model].hf_config()


def _gate_config(job: Job) -> Any:
    """The row's model; a large one keeps its first layers, so that the fp32 reference fits."""
    config = _config(job)
    if config.num_hidden_layers > GATE_LAYERS and _parameters(config) > GATE_PARAMS:
        config.num_hidden_layers = GATE_LAYERS
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:GATE_LAYERS]
    return config


def _parameters(config: Any) -> int:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).num_parameters()


def _load_batches(job: Job) -> list[dict[str, Tensor]]:
    ids = torch.from_numpy(np.load(job.data).astype(np.int64)).to(job.device)
    return [{"input_ids": batch, "labels": batch.clone()} for batch in ids]


def _free(device: str, execution: str) -> None:
    if execution.startswith("compile"):
        torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _allocated_gib(device: str) -> float:
    return torch.cuda.memory_allocated() / GIB if device == "cuda" else 0.0


def _die_with_parent() -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def work(job_path: str, result_path: str) -> None:
    """Read the job, run it, write the result."""
    _die_with_parent()
    job = Job(**json.loads(Path(job_path).read_text(encoding="utf-8")))
    try:
        result = run(job)
    except Leftovers as left:
        again = asdict(replace(job, gated=left.args[0]))
        write_atomically(Path(job_path), json.dumps(again))
        sys.stdout.flush()
        _become_fresh_worker(job_path, result_path)
    write_atomically(Path(result_path), json.dumps(_without_nan(asdict(result))))


def _become_fresh_worker(job_path: str, result_path: str) -> NoReturn:
    command = [sys.executable, "-P", "-m", "forge.harness.worker", job_path, result_path]
    os.execv(sys.executable, command)


def _without_nan(value: Any) -> Any:
    """JSON has no NaN or infinity: they become ``None``."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def serve(device: str) -> None:
    """Fork a worker for every request on standard input; answer its pid, then its exit code."""
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    import_transformers()
    # A driver that an import has opened is of no use to forks.
    opened = _has_opened_gpu()
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            _work_forked(**request, fresh=opened)
        print(child, file=answers, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _has_opened_gpu() -> bool:
    """Whether this process holds a file of NVIDIA's driver open."""
    folder = Path("/proc/self/fd")
    if not folder.exists():  # no Linux, where we can tell only what torch has done
        return torch.cuda.is_initialized()
    return any(os.path.realpath(fd).startswith("/dev/nvidia") for fd in folder.iterdir())


def _work_forked(job: str, result: str, output: str, fresh: bool) -> NoReturn:
    os.setsid()
    with open(os.devnull) as nothing, open(output, "wb") as text:
        os.dup2(nothing.fileno(), 0)
        os.dup2(text.fileno(), 1)
        os.dup2(text.fileno(), 2)
    if fresh:
        _become_fresh_worker(job, result)
    code = 1
    try:
        work(job, result)
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Entry point."""
    if sys.argv[1] == "--serve":
        serve(sys.argv[2])
    else:
        work(*sys.argv[1:3])


if __name__ == "__main__":
    main()
