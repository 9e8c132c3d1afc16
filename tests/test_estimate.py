"""Predicted memory: the committed measurements, and what autograd really saves."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from command_line import forge_bench
from forge.harness.estimate import predictions
from forge.harness.leaderboard import load_runs
from forge.harness.memory_model import LOGIT_BYTES, estimate, saved_bytes
from forge.harness.shapes import load_shape, shape_of
from forge.harness.workloads import MODELS, build_model
from forge.optim.registry import REGISTRY

RUNS = Path(__file__).parent.parent / "results" / "runs"
KEYS = {model.name: key for key, model in MODELS.items()}


def newest(found):
    """Of the rows that are predicted, the record measured last: it replaces all before it."""
    rows = {}
    for record in sorted(found, key=lambda record: record.date):
        if record.status != "ok" or not record.gpu_count or record.model not in KEYS:
            continue
        if record.key in REGISTRY and record.kernels in LOGIT_BYTES:
            what = (record.method, record.kernels, record.execution, record.states)
            rows[what, record.model, record.batch, record.seq, record.hardware] = record
    return list(rows.values())


def measured():
    return [
        pytest.param(
            record,
            id=f"{record.row}-{record.model}-{record.batch}x{record.seq}-{record.hardware}",
        )
        for record in newest(load_runs(RUNS)[0])
    ]


def predicted(record):
    shape = load_shape(KEYS[record.model])[1]
    work = (record.batch, record.seq, [record.key], record.kernels, record.execution)
    return predictions(shape, *work)[0]


def test_there_is_something_to_compare_with():
    rows = {param.values[0].key for param in measured()}
    assert len(rows) >= 12


def test_the_last_measured_record_of_a_row_counts_whatever_the_order_and_name_of_its_run():
    found = load_runs(RUNS)[0]
    old = newest(found)[0]
    fresh = replace(old, date="2999-01-01T00:00:00Z", run_id="0", environment={"commit": "f" * 9})
    failed = replace(fresh, date="2999-01-02T00:00:00Z", status="oom", latency_ms=None)
    for order in ([failed, fresh, *found], [*found, fresh, failed]):
        rows = newest(order)
        assert fresh in rows and old not in rows and failed not in rows
        assert len(rows) == len(newest(found))
    both = newest([*found, replace(fresh, hardware="B200")])
    assert old in both and len(both) == len(newest(found)) + 1


@pytest.mark.parametrize("record", measured())
def test_close_to_the_measured_peak(record):
    """A tenth is the promise. Eager rows are held to half: smaller terms would not show."""
    row, tolerance = predicted(record), 0.05 if record.execution == "eager" else 0.10
    assert row["peak_gib"] == pytest.approx(record.peak_memory_gib, rel=tolerance)
    assert row["states"] * 2**30 == pytest.approx(record.state_bytes, rel=0.002)


def test_saved_bytes_are_what_autograd_saves():
    """Of a layer, with transformers' own kernels: the difference of two layers and one."""

    def saved(layers):
        config = MODELS["qwen3-tiny"].hf_config(layers=layers)
        common = dict(device="cpu", dtype=torch.bfloat16, attention="sdpa", seed=0)
        model = build_model(config, **common, kernels="hf")
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        sizes = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                sizes[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        ids = torch.zeros(1, 128, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(input_ids=ids, labels=ids)
        return sum(size for size, _ in sizes.values())

    shape = shape_of(MODELS["qwen3-tiny"].hf_config())
    real = (saved(2) - saved(1)) / 128
    # The model leaves out 4 bytes a token for each norm and head.
    assert saved_bytes(shape, "hf") == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("key", REGISTRY)
def test_the_peak_is_the_sum_of_its_parts_and_grows(key):
    shape = load_shape("qwen3-0.6b")[1]
    footprint = REGISTRY[key].footprint
    if footprint is None:
        pytest.skip("no footprint: not predicted")
    peaks = []
    for seq in (64, 512, 4096, 32_768):
        for kernels in ("liger", "hf"):
            found = estimate(shape, 1, seq, footprint, kernels, "eager")
            assert found.peak > found.weights + found.states > 2 * shape.numel
            assert math.isfinite(found.peak)
            peaks.append(found.peak)
    assert peaks == sorted(peaks)


def test_long_sequences_peak_in_the_loss_and_short_ones_at_the_end_of_backward():
    shape, footprint = load_shape("qwen3-0.6b")[1], REGISTRY["adamw-fused"].footprint
    assert estimate(shape, 1, 128, footprint, "liger", "eager").moment == "backward"
    assert estimate(shape, 1, 8192, footprint, "liger", "eager").moment == "loss"


def test_an_untied_model_has_no_sum_of_gradients():
    shape, footprint = load_shape("qwen3-8b")[1], REGISTRY["adamw-fused"].footprint
    found = estimate(shape, 1, 128, footprint, "liger", "eager")
    assert found.gradients == 2 * shape.numel and found.temporaries == 0


def test_a_method_without_footprint_is_not_predicted(monkeypatch, capsys):
    import dataclasses

    spec = dataclasses.replace(REGISTRY["adamw"], footprint=None)
    monkeypatch.setitem(REGISTRY, "adamw", spec)
    options = ["--optimizers", "adamw,adamw-fused"]
    assert forge_bench(monkeypatch, "estimate", "qwen3-0.6b", *options) == 0
    assert "its spec has no footprint" in capsys.readouterr().out
    assert forge_bench(monkeypatch, "estimate", "qwen3-0.6b", *options, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["methods"]
    assert [row["key"] for row in rows] == ["adamw-fused", "adamw"]
    assert rows[1]["peak_gib"] is None


def test_command(monkeypatch, capsys):
    options = "--seq 512 --optimizers forge-bf16,adamw-fused --json".split()
    assert forge_bench(monkeypatch, "estimate", "qwen3-0.6b", *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["key"] for row in found["methods"]] == ["forge-bf16", "adamw-fused"]
    assert found["methods"][0]["gradients"] == 0
    assert forge_bench(monkeypatch, "estimate", "qwen3-0.6b") == 0
    shown = capsys.readouterr().out
    assert all(key in shown for key in REGISTRY)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nope", "model 'nope'"),
        ("qwen3-tiny --optimizers nope", "--optimizers: unknown nope; valid: all, adamw"),
        ("qwen3-tiny --optimizers ,", "--optimizers: empty; valid: all, adamw"),
        ("qwen3-tiny --kernels x", "--kernels: unknown 'x'; valid: liger"),
        ("qwen3-tiny --execution x", "--execution: unknown 'x'; valid: eager"),
    ],
)
def test_refusals(arguments, message, monkeypatch, capsys):
    assert forge_bench(monkeypatch, "estimate", *arguments.split()) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""
