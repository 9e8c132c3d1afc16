"""The cases of forge-bench kernels: what they are, and that what is wrong is not timed."""

from __future__ import annotations

import ast
import gc
import importlib
import json
import weakref
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from forge import ForgeAdamW
from forge.harness import hardware, kernel_timing, update_cases
from forge.harness.kernel_bench import COLUMNS, text_of
from forge.harness.kernel_cases import OPS, model_cases, relative_error
from forge.harness.kernel_timing import interleave, measure
from forge.harness.product_cases import product_cases
from forge.harness.roofline import parts
from forge.harness.update_cases import update_cases as cases_of_the_update
from forge.kernels import runtime, wgrad_auto
from forge.queue import UpdateQueue
from tiny_cases import NAME, ORIGIN, SHAPE, all_cases

CPU = torch.device("cpu")


def case_of(op, ending, on_gpu=False):
    return next(c for c in all_cases(on_gpu) if c.op == op and c.name.endswith(ending))


# -- the table of cases -----------------------------------------------------------------------


def public_kernels():
    """Public functions of the kernel files that hold an autograd function: the model's kernels."""
    found = set()
    for file in Path(wgrad_auto.__file__).parent.glob("*.py"):
        body = ast.parse(file.read_text()).body
        if any(isinstance(n, ast.ClassDef) and n.name.endswith("Function") for n in body):
            names = {n.name for n in body if isinstance(n, ast.FunctionDef)}
            module = importlib.import_module(f"forge.kernels.{file.stem}")
            parts = ("_reference", "_forward", "_backward")
            found |= {
                name
                for name in names
                if not name.startswith(("_", "check_"))
                and not name.endswith(parts)
                and hasattr(module, name)
            }
    return found


def test_every_kernel_of_the_model_has_an_entry():
    listed = [name for op in OPS for name in op.functions]
    assert len(listed) == len(set(listed))
    assert set(listed) == public_kernels(), "add it to OPS in harness/kernel_cases.py"


def test_the_cases_are_what_the_design_names():
    cases = [*cases_of_the_update("qwen3-0.6b", SHAPE, True), *model_cases("m", SHAPE, True)]
    update = {c.name: c for c in cases if c.op == "wgrad_update"}
    kinds = ("blocks-bf16", "blocks-int8", "head-bf16")
    assert list(update) == [f"qwen3-0.6b-{kind}" for kind in kinds]
    everyone = {"forge", "forge:tiles", "forge:scratch", "forge:hopper", "torch", "scratch"}
    assert set(update["qwen3-0.6b-blocks-bf16"].providers) == everyone
    assert "torch" not in update["qwen3-0.6b-blocks-int8"].providers
    assert {len(c.tokens) for c in update.values()} == {3}
    for op in OPS:
        forward, both = (c for c in cases if c.op == op.name)
        assert forward.name == "m-forward" and both.name == "m-forward-backward"
        assert {"forge", "torch", "torch.compile"} <= set(forward.providers)


@pytest.mark.parametrize("case", list(product_cases("m", SHAPE)), ids=lambda c: c.name)
def test_products_are_what_their_truth_says(case, monkeypatch):
    """Through the interpreter, where there is no GPU: the norm's backward has no other way."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(runtime, "interpret_cpu", True)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    work = case.prepare(5, CPU)
    assert max(work.errors) < 5e-3
    for provider in case.providers:
        run = work.run(provider)
        found = run.results(run())
        for one, exact, error in zip(found, work.exact, work.errors, strict=True):
            assert relative_error(one.detach(), exact) <= error + 1e-3
    rows = [g for g in SHAPE.gemms if g.name.replace("+", "-") in case.name]
    assert work.flops in [2 * 5 * g.weights for g in rows]


def test_bytes_and_operations():
    """Worked out by hand for one layer and 16 tokens; of the update, the roofline's."""
    work = case_of("add_rms_norm", "backward").prepare(16, CPU)
    assert work.bytes == 2 * 8 * 16 * SHAPE.hidden and work.flops == 0
    work = case_of("linear_cross_entropy", "forward").prepare(16, CPU)
    assert work.flops == 2 * 16 * SHAPE.hidden * SHAPE.vocab
    work = case_of("wgrad_update", "blocks-bf16").prepare(16, CPU)
    assert work.flops == 2 * 16 * SHAPE.layer_weights
    operands = sum(16 * (g.inputs + g.outputs) for g in SHAPE.gemms)
    assert work.bytes == 12 * SHAPE.layer_weights + 2 * operands
    known = hardware.find("H200")
    update = [p for p in parts(SHAPE, 1, 16, known, "bf16") if p.group == "update"]
    head = case_of("wgrad_update", "head-bf16").prepare(16, CPU)
    assert work.bytes + head.bytes == sum(p.bytes for p in update)


# -- the gate ---------------------------------------------------------------------------------


def rows_of(case, *providers):
    return {row.provider: row for row in measure(case, 16, providers, CPU, ORIGIN)}


def assert_failed(row):
    assert row.gate == "fail" and row.notes
    assert row.ms is None and row.samples_ms == [] and row.gb_per_s is None
    fields = dict(zip(COLUMNS, text_of([vars(row)]).splitlines()[1].split(","), strict=True))
    assert fields["ms"] == fields["p20_ms"] == fields["tflop_per_s"] == ""


def test_only_who_rounds_more_often_may_be_off_by_more():
    """4e-3 off, where torch is by 1e-3, and torch that rounds as Liger by 3.5e-3."""
    case = case_of("rms_norm", "forward")
    work = case.prepare(16, CPU)

    class Off:
        calls, capturing = 1, nullcontext

        def __call__(self):
            return None

        def reset(self):
            pass

        def results(self, kept):
            return [1.004 * t for t in work.exact]

    work = replace(work, run=lambda _: Off(), errors=[1e-3], errors_of={"liger": [3.5e-3]})
    rows = rows_of(replace(case, prepare=lambda *_: work), "forge", "torch", "liger")
    assert {name: row.gate for name, row in rows.items()} == {
        "forge": "fail", "torch": "fail", "liger": "pass"
    }  # fmt: skip


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_what_stands_for_liger_rounds_once_more(name):
    work = case_of(name, "backward").prepare(64, CPU)
    (found,) = work.errors_of.values()
    assert list(work.errors_of) == ["liger"] and len(found) == len(work.errors)
    assert found[0] > 1.1 * work.errors[0] and max(found) < 2 * max(work.errors)


@pytest.mark.parametrize("case", all_cases(), ids=lambda c: f"{c.op}-{c.name}")
def test_what_is_right_passes_and_is_timed(case):
    for name, row in rows_of(case, *case.providers).items():
        assert row.gate == "pass", f"{name}: {row.notes}"
        assert len(row.samples_ms) == kernel_timing.CPU_ROUNDS
        assert row.p20_ms <= row.ms <= row.p80_ms
        # H200's floor: found by the name that the row carries.
        assert row.floor_ms > 0 and row.gb_per_s > 0


@pytest.mark.parametrize(
    "wrong",
    [
        dict(lr=0.0),
        dict(lr=0.101),
        dict(weight_decay=0.0),
        dict(betas=(0.9, 0.999)),
        dict(betas=(0.8, 0.95)),
        dict(eps=0.1),
    ],
    ids=str,
)
def test_an_update_with_other_hyperparameters_fails(monkeypatch, wrong):
    monkeypatch.setattr(
        update_cases, "ForgeAdamW", lambda model, **options: ForgeAdamW(model, **(options | wrong))
    )
    rows = rows_of(case_of("wgrad_update", "head-bf16"), "forge", "torch")
    assert_failed(rows["forge"])
    assert rows["torch"].gate == "pass" and rows["torch"].ms


@pytest.mark.parametrize("states", ["bf16", "int8"])
def test_no_update_and_a_part_left_out_and_nan_fail(monkeypatch, states):
    case = case_of("wgrad_update", f"blocks-{states}")
    plain = update_cases.ForgeUpdate.__call__

    def nothing(self):
        if not self.optimizer.state[self.weights[0]]:
            plain(self)  # what creates the states

    def broken(rows, value):
        def call(self):
            old = self.weights[0].detach()[:rows].clone()
            plain(self)
            with torch.no_grad():
                self.weights[0][:rows] = old if value is None else value

        return call

    for call in (nothing, broken(1, None), broken(1, float("nan"))):
        monkeypatch.setattr(update_cases.ForgeUpdate, "__call__", call)
        row = rows_of(case, "forge")["forge"]
        assert_failed(row)
    assert row.max_rel_err is None and "result 0 is not finite" in row.notes
    json.dumps(asdict(row), allow_nan=False)


@pytest.mark.parametrize(
    ("op", "wrong", "forward_passes"),
    [
        ("rms_norm", lambda x, w: x * w, False),
        ("swiglu", lambda g, u: (g.sigmoid() * g).detach() * u, True),
        ("swiglu", lambda g, u: g * u / 0, False),
        (
            "linear_cross_entropy",
            lambda h, w, labels: (h @ w.t()).float().logsumexp(1).mean(),
            False,
        ),
    ],
)
def test_a_wrong_operation_fails(monkeypatch, op, wrong, forward_passes):
    """And a wrong gradient only where gradients are measured."""
    changed = tuple(replace(o, ours=wrong) if o.name == op else o for o in OPS)
    monkeypatch.setattr("forge.harness.kernel_cases.OPS", changed)
    forward, both = (c for c in model_cases(NAME, SHAPE, False) if c.op == op)
    assert (rows_of(forward, "forge")["forge"].gate == "pass") == forward_passes
    assert_failed(rows_of(both, "forge")["forge"])


def test_the_memory_of_a_case_is_free_after_it():
    """Five sets of weights of 440 M parameters: a single case more would not fit."""
    work = case_of("wgrad_update", "blocks-bf16").prepare(16, CPU)
    for provider in ("forge", "torch"):
        run = work.run(provider)
        run()
        alive = weakref.ref(run.weights[0])
        del run
        gc.collect()
        assert alive() is None


def test_who_raises_fails_and_who_cannot_is_skipped(monkeypatch):
    def crash(x, w):
        raise RuntimeError("no such kernel\nand a long trace")

    changed = tuple(replace(op, ours=crash) if op.name == "rms_norm" else op for op in OPS)
    monkeypatch.setattr("forge.harness.kernel_cases.OPS", changed)
    rows = rows_of(case_of("rms_norm", "forward"), "forge", "torch")
    assert_failed(rows["forge"])
    assert rows["forge"].notes == "RuntimeError: no such kernel" and rows["torch"].gate == "pass"
    row = rows_of(case_of("wgrad_update", "blocks-bf16"), "forge:hopper")["forge:hopper"]
    assert row.gate == "skipped" and "needs a CUDA device" in row.notes and row.ms is None


def test_inputs_that_a_rival_overwrites_are_put_back(monkeypatch):
    """Liger writes gradients over inputs: every sample must start from the same ones."""

    class Vandal(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate, up):
            ctx.save_for_backward(gate, up)
            return OPS[3].plain(gate, up)

        @staticmethod
        def backward(ctx, dy):
            gate, up = ctx.saved_tensors
            with torch.enable_grad():
                leaves = [t.detach().clone().requires_grad_() for t in (gate, up)]
                grads = torch.autograd.grad(OPS[3].plain(*leaves), leaves, dy)
            dy.data.zero_()
            return [t.data.copy_(g) for t, g in zip((gate, up), grads, strict=True)][0], grads[1]

    seen = []

    def ours(gate, up):
        seen.append((gate.sum().item(), up.sum().item()))
        return Vandal.apply(gate, up)

    changed = tuple(replace(op, ours=ours) if op.name == "swiglu" else op for op in OPS)
    monkeypatch.setattr("forge.harness.kernel_cases.OPS", changed)
    assert rows_of(case_of("swiglu", "backward"), "forge")["forge"].gate == "pass"
    # The first call is a warm-up; all others come behind a reset.
    assert len(seen) == 2 + kernel_timing.CPU_ROUNDS and len(set(seen)) == 1


def test_launches_are_those_of_the_queue(monkeypatch):
    """Up to QUEUE_BYTES of factors, last layer first."""
    launched = []

    def record(dys, xs, targets, *rest):
        launched.append([(dy.shape[1], x.shape[1]) for dy, x in zip(dys, xs, strict=True)])

    monkeypatch.setattr("forge.queue.wgrad_update_auto", record)
    shape = replace(SHAPE, windows=(None, None))
    work = next(cases_of_the_update(NAME, shape, False)).prepare(16, CPU)
    run = work.run("forge")
    run()
    (one,) = launched
    assert len(one) == 14 and one[0] == (SHAPE.hidden, SHAPE.intermediate)
    launched.clear()
    limit = 16 * 2 * (SHAPE.hidden + SHAPE.intermediate)  # bytes of down's factors
    monkeypatch.setattr("forge.queue.QUEUE_BYTES", limit)
    run()
    assert [matrix for launch in launched for matrix in launch] == one
    assert len(launched) > 3 and all(len(launch) > 1 for launch in launched[:-1])
    assert isinstance(run.optimizer._queue, UpdateQueue)


# -- time -------------------------------------------------------------------------------------


def test_providers_take_turns():
    calls = []

    def sampler(name):
        return lambda: calls.append(name) or float(len(calls))

    samples = interleave({name: sampler(name) for name in "abc"}, rounds=8)
    rounds = ["".join(calls[i : i + 3]) for i in range(0, 24, 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds) and len(set(rounds)) > 2
    assert {name: len(found) for name, found in samples.items()} == dict.fromkeys("abc", 8)
    assert sorted(sum(samples.values(), [])) == [float(i + 1) for i in range(24)]


def test_two_names_of_one_thing_are_measured_once(monkeypatch):
    made = []
    work = case_of("swiglu", "forward").prepare(16, CPU)
    counted = replace(work, run=lambda name: made.append(name) or work.run("torch"))
    case = replace(case_of("swiglu", "forward"), prepare=lambda tokens, device: counted)
    rows = rows_of(case, "forge:scratch", "scratch")
    assert made == ["forge:scratch"]
    assert rows["scratch"].samples_ms == rows["forge:scratch"].samples_ms != []
    assert list(rows_of(case, "scratch")) == ["scratch"]


# -- on a GPU ---------------------------------------------------------------------------------


# K of every matrix a multiple of 256, as the Hopper kernel wants it.
WIDE = replace(SHAPE, hidden=256, heads=4, intermediate=512)
ON_GPU = [
    *cases_of_the_update("wide", WIDE, True),
    *model_cases("wide", WIDE, True),
    *product_cases("wide", WIDE),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=lambda c: f"{c.op}-{c.name}")
def test_every_provider_passes_its_gate_on_a_gpu(case):
    left_out = [] if case.op == "swiglu" else ["torch.compile"]  # one is enough: it is slow
    providers = [name for name in case.providers if name not in left_out]
    may_be_skipped = ["liger"]
    if "int8" in case.name or torch.cuda.get_device_capability() != (9, 0):
        may_be_skipped.append("forge:hopper")
    for row in measure(case, 256, providers, torch.device("cuda"), ORIGIN):
        if row.gate == "skipped":
            assert row.provider in may_be_skipped, row.notes
        else:
            assert row.gate == "pass", f"{row.provider}: {row.notes}"
            assert len(row.samples_ms) == kernel_timing.ROUNDS and min(row.samples_ms) > 0
            assert (row.host_ms is not None) == (case.op == "wgrad_update")
