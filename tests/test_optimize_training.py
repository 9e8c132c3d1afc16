"""``forge.optimize`` in training: gradients handed over, kept, checkpointed, refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import forge
import forge.qwen3
from forge import ForgeAdamW, ForgeSGD
from forge.deferred import AppliedGradient
from forge.tied import SplitUpdate
from small_qwen3 import VOCAB, batch, gradients, make, recompute, same


@pytest.mark.parametrize(
    ("optimizer", "tied"), [("forge", True), ("forge first", False), ("torch", True)]
)
def test_ten_steps(optimizer, tied):
    """Against the plain model with torch AdamW."""
    hyper = dict(lr=1e-2, weight_decay=0.1)
    plain, ours = make(tied=tied), make(tied=tied)
    theirs = torch.optim.AdamW(plain.parameters(), **hyper)
    if optimizer == "forge first":
        mine: Any = ForgeAdamW(ours, **hyper)
        forge.optimize(ours)
    else:
        forge.optimize(ours)
        mine = (
            ForgeAdamW(ours, **hyper)
            if optimizer == "forge"
            else torch.optim.AdamW(ours.parameters(), **hyper)
        )
    names = [name for name, _ in ours.named_parameters()]
    parameters = list(ours.parameters())
    for step in range(10):
        losses = []
        for model, opt in ((plain, theirs), (ours, mine)):
            loss = model(**batch(seed=step)).loss
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=2e-4), step
    assert names == [name for name, _ in plain.named_parameters()]
    assert all(a is b for a, b in zip(parameters, ours.parameters(), strict=True))
    for (name, a), b in zip(plain.named_parameters(), parameters, strict=True):
        assert (a - b).norm() <= 2e-3 * a.norm(), name


def test_no_weight_gradient_of_a_packed_layer_is_formed(monkeypatch):
    from forge import packed_linear as module

    def refuse(*_: Any) -> Tensor:
        raise AssertionError("a weight gradient was formed")

    model = forge.optimize(make(tied=False))
    optimizer = ForgeAdamW(model, lr=1e-3)
    monkeypatch.setattr(module, "_product", refuse)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model(**batch()).loss.backward()
    optimizer.step()
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_handed_over_head_in_the_interpreter(interpreter):
    """Untied, its gradient is never formed either; SGD's step shows the gradient itself."""
    plain, ours = make(tied=False, num_hidden_layers=1), make(tied=False, num_hidden_layers=1)
    inputs = batch(5)
    grads = gradients(plain, **inputs)
    optimizer = ForgeSGD(forge.optimize(ours), lr=0.5)
    seen = []
    weight = ours.lm_head.weight
    slot = optimizer._slots[[s.param is weight for s in optimizer._slots].index(True)]
    collect = slot.collect
    slot.collect = lambda x, dy, *rows: seen.append(dy.shape) or collect(x, dy)  # type: ignore[method-assign]
    before = {n: p.detach().clone() for n, p in ours.named_parameters()}
    (ours(**inputs).loss * 2).backward()
    assert seen == [(10, VOCAB)]
    moved = {n: (before[n] - p.detach()) for n, p in ours.named_parameters()}
    same({"loss": grads["loss"], **moved}, grads, tolerance=1e-4)


def test_gradients_of_norms_are_summed_in_one_launch(interpreter, monkeypatch):
    """Also of a weight that two layers share, and of one that the loss reads by itself."""
    from forge import queue
    from forge.kernels import qk_norm_rope, rms_norm

    def loss(model: Any) -> Tensor:
        return model(**batch(5)).loss + model.model.norm.weight.square().sum()

    plain, ours = make(), make()
    for model in (plain, ours):
        first, second = model.model.layers
        second.self_attn.k_norm.weight = first.self_attn.k_norm.weight
    loss(plain).backward()
    optimizer = ForgeSGD(forge.optimize(ours), lr=0.5)
    for module in (qk_norm_rope, rms_norm):
        monkeypatch.delattr(module, "column_sum")
    launches = []
    sums = queue.column_sums
    monkeypatch.setattr(queue, "column_sums", lambda parts: launches.append(parts) or sums(parts))
    before = {n: p.detach().clone() for n, p in ours.named_parameters()}
    loss(ours).backward()
    optimizer.step()
    # Two norms of C and q_norm a layer, and k_norm once; the last norm has a gradient already.
    assert [len(parts) for parts in launches] == [7]
    moved = {n: (before[n] - p.detach()) / 0.5 for n, p in ours.named_parameters()}
    same(moved, {n: p.grad for n, p in plain.named_parameters()}, tolerance=1e-4)


def test_tied_weight_in_the_interpreter(interpreter, monkeypatch):
    """Head and embedding hand over factors and rows; again SGD's step shows the gradient."""
    from forge.kernels import wgrad_auto

    monkeypatch.setattr(wgrad_auto, "SCRATCH_ELEMENTS", 64 * 48)
    plain, ours = make(num_hidden_layers=1), make(num_hidden_layers=1)
    inputs = batch(5)
    grads = gradients(plain, **inputs)
    before = {n: p.detach().clone() for n, p in ours.named_parameters()}
    optimizer = ForgeSGD(forge.optimize(ours), lr=1.0)
    weight = ours.lm_head.weight
    slot = optimizer._slots[[s.param is weight for s in optimizer._slots].index(True)]
    seen = []
    collect = slot.collect
    slot.collect = lambda x, dy, *rows: seen.append(tuple(dy.shape)) or collect(x, dy)  # type: ignore[method-assign]
    ours(**inputs).loss.backward()
    assert seen == [(10, VOCAB), (2, 5)] and isinstance(weight.grad, AppliedGradient)
    moved = {n: before[n] - p.detach() for n, p in ours.named_parameters()}
    same({"loss": grads["loss"], **moved}, grads, tolerance=1e-4)


def test_frozen_parts_get_no_gradient():
    models = [make(), forge.optimize(make())]
    for model in models:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in name or "up_proj" in name or "1.k_norm" in name)
    plain, ours = (gradients(model, **batch()) for model in models)
    same(ours, plain)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("optimizer", [None, ForgeAdamW])
def test_gradient_checkpointing(reentrant, optimizer):
    ours, plain = forge.optimize(make()), make()
    recompute(ours, {"use_reentrant": reentrant})
    if reentrant:
        ours.enable_input_require_grads()
    if optimizer is None:
        same(gradients(ours, **batch()), gradients(plain, **batch()))
        return
    opt, reference = ForgeAdamW(ours, lr=1e-2), torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for model, step in ((ours, opt), (plain, reference)):
        model(**batch()).loss.backward()
        step.step()
    for (name, a), b in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert (a - b).norm() <= 2e-3 * a.norm(), name


def test_checkpoint_in_the_interpreter(interpreter):
    """The gradient written over gate and up must not meet a recomputation."""
    ours = forge.optimize(make())
    recompute(ours, {"use_reentrant": False})
    same(gradients(ours, **batch(5)), gradients(make(), **batch(5)))


def test_kept_graph_in_the_interpreter(interpreter):
    model = forge.optimize(make(num_hidden_layers=1))
    loss = model(**batch(5)).loss
    loss.backward(retain_graph=True)
    first = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    loss.backward()
    same({n: p.grad for n, p in model.named_parameters()}, first)


def test_large_logits_are_formed_in_slices(interpreter, monkeypatch):
    monkeypatch.setattr(forge.qwen3, "LOGITS_BYTES", 1)
    monkeypatch.setattr(forge.qwen3, "SLICE_BYTES", 1)
    inputs = batch(5)
    changes = dict(num_hidden_layers=1)
    same(gradients(forge.optimize(make(**changes)), **inputs), gradients(make(**changes), **inputs))


def close_after(ours, plain, lr):
    """Adam divides small numbers by small ones."""
    for (name, p), q in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert (p - q[1]).abs().max() < 0.02 * lr and (p - q[1]).abs().mean() < 1e-3 * lr, name


def test_slices_are_handed_to_the_optimizer(interpreter, monkeypatch):
    """As a capture does it: rows of the tied weight are updated slice by slice."""
    monkeypatch.setattr(forge.qwen3, "CAPTURED_LOGITS_BYTES", 1)
    ours, plain = forge.optimize(make(num_hidden_layers=1)), make(num_hidden_layers=1)
    optimizer, reference = ForgeAdamW(ours, lr=1e-2), torch.optim.AdamW(plain.parameters(), lr=1e-2)
    (slot,) = [slot for slot in optimizer._slots if slot.shared]
    start, firsts = optimizer._queue.start_split, []

    def started(*args):
        firsts.append(args[3])
        return start(slot, *args)

    slot.split = SplitUpdate(slot.name, started)
    ours(**batch(5)).loss.backward()
    plain(**batch(5)).loss.backward()
    optimizer.step(), reference.step()
    assert firsts == [VOCAB - 128, 0]
    close_after(ours, plain, 1e-2)


@pytest.mark.gpu
def test_slices_in_a_captured_step(monkeypatch):
    monkeypatch.setattr(forge.qwen3, "CAPTURED_LOGITS_BYTES", 1)
    ours, plain = forge.optimize(make().cuda()), make().cuda()
    optimizer, reference = ForgeAdamW(ours, lr=1e-3), torch.optim.AdamW(plain.parameters(), lr=1e-3)
    step = forge.TrainStep(ours, optimizer)
    for seed in range(4):
        inputs = {name: t.cuda() for name, t in batch(seed=seed).items()}
        loss, found = plain(**inputs).loss, step(**inputs)
        torch.testing.assert_close(found, loss.detach(), rtol=1e-4, atol=1e-4)
        loss.backward()
        reference.step(), reference.zero_grad()
    close_after(ours, plain, 1e-3)


def test_forge_optimizer_survives_optimize_and_undo():
    """Between steps, in both directions: states stay with their parameters."""
    plain, ours = make(), make()
    theirs, mine = torch.optim.AdamW(plain.parameters(), lr=1e-2), ForgeAdamW(ours, lr=1e-2)
    for step in range(6):
        if step % 2:
            forge.optimize(ours, undo=step == 3)
        for model, opt in ((plain, theirs), (ours, mine)):
            model(**batch(seed=step)).loss.backward()
            opt.step()
            opt.zero_grad()
    for (name, a), b in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert (a - b).norm() <= 2e-3 * a.norm(), name


def test_weights_changed_before_backward_are_refused():
    model = forge.optimize(make())
    loss = model(**batch()).loss
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_create_graph_is_refused():
    model = forge.optimize(make())
    with pytest.raises(RuntimeError, match="create_graph"):
        model(**batch()).loss.backward(create_graph=True)


@pytest.mark.gpu
def test_forward_and_backward_can_be_captured():
    """Nothing synchronises, and a replay reads new tokens."""
    model = forge.optimize(make(torch.bfloat16).cuda())
    static = {name: t.cuda() for name, t in batch().items()}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            gradients(model, **static)
    torch.cuda.synchronize()
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        loss = model(**static).loss
        loss.backward()
    for name, t in batch(seed=9).items():
        static[name].copy_(t)
    graph.replay()
    found = {"loss": loss.detach().clone()}
    found |= {n: p.grad.clone() for n, p in model.named_parameters()}
    same(found, gradients(model, **static), tolerance=1e-3)


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_that_wait_for_the_step(tied):
    """``update="step"``: every gradient can be read, and all are clipped together."""
    plain, ours = make(tied=tied), forge.optimize(make(tied=tied))
    optimizer = ForgeAdamW(ours, lr=1e-2, update="step", max_grad_norm=0.5)
    same(gradients(ours, **batch()), gradients(plain, **batch()))
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    reference.step()
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-4, atol=0)
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (p - q).norm() <= 1e-3 * q.norm()
