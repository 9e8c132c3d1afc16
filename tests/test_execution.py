"""Every execution trains the same; what cannot run says why."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from forge.harness.execution import (
    EXECUTIONS,
    GraphStep,
    UnsupportedExecution,
    build_split_step,
    build_step,
    restored,
)
from forge.harness.torch_qwen3 import from_hf
from forge.optim.registry import REGISTRY
from forge.optim.spec import Hyper

VOCAB = 131
HYPER = Hyper(lr=1e-3)


def make_model(device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return from_hf(Qwen3ForCausalLM(config).to(device, dtype))


def make_batches(count: int, device: str = "cpu") -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (count, 2, 40), generator=generator).to(device)
    return [{"input_ids": row, "labels": row} for row in ids]


def train(
    key: str, execution: str, model: nn.Module, hyper: Hyper, batches: list[dict[str, Tensor]]
) -> tuple[list[float], nn.Module]:
    spec = REGISTRY[key]
    optimizer = spec.build(spec.resolve(), model, hyper)
    step = build_step(model, optimizer, spec, hyper, execution, batches[0])
    return [step(batch).item() for batch in batches], model


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max((x - y).abs().max().item() for x, y in pairs)


def test_eager_is_the_plain_loop() -> None:
    batches = make_batches(4)
    losses, trained = train("adamw", "eager", make_model(), HYPER, batches)
    model = make_model()
    adamw = torch.optim.AdamW(model.parameters(), **HYPER.adamw, foreach=False, fused=False)
    expected = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        expected.append(loss.item())
    assert losses == expected
    assert largest_difference(trained, model) == 0.0


def test_compile_trains_like_eager() -> None:
    batches = make_batches(3)
    losses, model = train("adamw-fused", "eager", make_model(), HYPER, batches)
    compiled_losses, compiled = train("adamw-fused", "compile", make_model(), HYPER, batches)
    assert compiled_losses == pytest.approx(losses, rel=1e-5)
    # A weight moves by about lr a step; the first, sign-like steps amplify rounding differences.
    assert largest_difference(model, compiled) < 0.05 * HYPER.lr


def test_the_loss_is_detached_and_gradients_are_dropped() -> None:
    spec, model = REGISTRY["adamw-fused"], make_model()
    step = build_step(
        model, spec.build(spec.resolve(), model, HYPER), spec, HYPER, "eager", make_batches(1)[0]
    )
    assert not step(make_batches(1)[0]).requires_grad
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("steps_before", [0, 2])
def test_restored_leaves_no_trace_of_the_warm_up(steps_before: int) -> None:
    batches = make_batches(steps_before + 3)

    def train_with_warm_up(warm_up: int) -> nn.Module:
        spec, model = REGISTRY["adamw-fused"], make_model()
        optimizer = spec.build(spec.resolve(), model, HYPER)
        step = build_step(model, optimizer, spec, HYPER, "eager", batches[0])
        for batch in batches[:steps_before]:
            step(batch)
        with restored(model, optimizer):
            for _ in range(warm_up):
                step(batches[-1])
        for batch in batches[steps_before:]:
            step(batch)
        return model

    assert largest_difference(train_with_warm_up(3), train_with_warm_up(0)) == 0.0


def refuse(key: str, execution: str, hyper: Hyper, model: nn.Module, match: str) -> None:
    spec = REGISTRY[key]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=match) as info:
        build_step(model, None, spec, hyper, execution, {})
    assert info.type is (ValueError if execution not in EXECUTIONS else UnsupportedExecution)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_unknown_execution_is_refused() -> None:
    refuse("adamw", "graph", HYPER, make_model(), "execution must be one of eager, compile")


@pytest.mark.parametrize("execution", ["cuda_graph", "compile+cuda_graph"])
def test_graphs_need_a_cuda_device(execution: str) -> None:
    hyper = replace(HYPER, capturable=True)
    refuse("adamw-fused", execution, hyper, make_model(), "the model is on cpu")


def cuda_only(test: Any) -> Any:
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(skip(test))


@cuda_only
def test_graphs_need_a_capturable_method() -> None:
    model = make_model("cuda")
    refuse("adamw", "cuda_graph", replace(HYPER, capturable=True), model, "vanilla AdamW cannot")
    refuse("adamw-fused", "cuda_graph", HYPER, model, "capturable=True")
    refuse(
        "forge-bf16", "compile+cuda_graph", replace(HYPER, capturable=True), model, "in backward"
    )


@cuda_only
@pytest.mark.parametrize(
    ("key", "execution"),
    [
        ("adamw-fused", "cuda_graph"),
        ("adamw-fused", "compile+cuda_graph"),
        ("forge-fp32", "cuda_graph"),
    ],
)
def test_graph_trains_like_eager_from_step_one(key: str, execution: str) -> None:
    hyper = replace(HYPER, capturable=True)
    batches = make_batches(6, "cuda")
    losses, model = train(key, "eager", make_model("cuda"), hyper, batches)
    graph_losses, graphed = train(key, execution, make_model("cuda"), hyper, batches)
    # Step 1 starts from the given weights: warm-up left no trace.
    assert graph_losses == pytest.approx(losses, rel=1e-4)
    assert largest_difference(model, graphed) < 0.2 * HYPER.lr


def test_a_split_step_needs_a_cuda_device() -> None:
    with pytest.raises(UnsupportedExecution, match="needs a CUDA device; use execution=eager"):
        build_split_step(make_model(), None, REGISTRY["adamw"], make_batches(1)[0])


@cuda_only
def test_a_split_step_trains_like_eager_from_step_one() -> None:
    batches = make_batches(6, "cuda")
    losses, model = train("adamw", "eager", make_model("cuda"), HYPER, batches)
    spec, split = REGISTRY["adamw"], make_model("cuda")
    optimizer = spec.build(spec.resolve(), split, HYPER)
    step = build_split_step(split, optimizer, spec, batches[0])
    assert [step(batch).item() for batch in batches] == pytest.approx(losses, rel=1e-4)
    assert largest_difference(model, split) < 0.2 * HYPER.lr


@cuda_only
@pytest.mark.parametrize("key", ["forge-bf16", "flashoptim-release"])
def test_what_updates_in_backward_has_no_step_to_split_off(key: str) -> None:
    spec, model = REGISTRY[key], make_model("cuda")
    optimizer = spec.build(spec.resolve(), model, HYPER) if key == "forge-bf16" else None
    with pytest.raises(UnsupportedExecution, match="updates inside backward"):
        build_split_step(model, optimizer, spec, make_batches(1, "cuda")[0])


@cuda_only
def test_graph_step_reports_its_peak_and_refuses_other_shapes() -> None:
    hyper = replace(HYPER, capturable=True)
    spec, model = REGISTRY["adamw-fused"], make_model("cuda", torch.bfloat16)
    optimizer = spec.build(spec.resolve(), model, hyper)
    batch = make_batches(1, "cuda")[0]
    step = build_step(model, optimizer, spec, hyper, "cuda_graph", batch)
    assert isinstance(step, GraphStep)
    weights = sum(p.nbytes for p in model.parameters())
    assert step.peak_bytes > 3 * weights
    assert [float(s["step"]) for s in optimizer.state.values()] == [0.0] * len(optimizer.state)
    step(batch)
    assert [float(s["step"]) for s in optimizer.state.values()] == [1.0] * len(optimizer.state)
    with pytest.raises(ValueError, match="captured for"):
        step({name: tensor[:, :8] for name, tensor in batch.items()})


@cuda_only
def test_failed_capture_names_the_method_and_the_cause() -> None:
    class Synchronizing(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, **batch: Tensor) -> Any:
            output = self.inner(**batch)
            output.loss.item()
            return output

    hyper = replace(HYPER, capturable=True)
    spec, model = REGISTRY["adamw-fused"], Synchronizing(make_model("cuda"))
    optimizer = spec.build(spec.resolve(), model, hyper)
    with pytest.raises(RuntimeError, match="fused AdamW: CUDA graph capture failed"):
        build_step(model, optimizer, spec, hyper, "cuda_graph", make_batches(1, "cuda")[0])
    assert torch.rand(1, device="cuda").isfinite()  # the generator is out of the capture
