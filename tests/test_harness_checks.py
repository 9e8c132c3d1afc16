"""The gate passes AdamW and catches methods that are broken in one way each."""

from __future__ import annotations

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from forge.harness import checks

STEPS = 8


class TinyModel(nn.Module):
    """Embedding, a normalised residual matrix, and a tied head."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Parameter(torch.empty(512, 32).normal_(0, 0.02, generator=generator))
        self.norm = nn.Parameter(torch.ones(32))
        self.matrix = nn.Parameter(torch.empty(32, 32).normal_(0, 0.02, generator=generator))
        self.to(torch.bfloat16)
        self.to(dtype)

    def forward(self, input_ids, labels):
        x = self.embed[input_ids]
        x = F.rms_norm(x + x @ self.matrix, (32,), self.norm)
        logits = (x @ self.embed.T).float()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return types.SimpleNamespace(loss=loss)


def batches():
    ids = torch.randint(0, 16, (2, 1, 256), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": b, "labels": b} for b in ids]


@pytest.fixture(scope="module")
def reference():
    return checks.reference_trajectory(TinyModel(torch.float32), batches(), STEPS)


def trajectory(make_step, dtype=torch.bfloat16):
    """Train with ``make_step(model, AdamW)``: a function of the model after its backward."""
    model = TinyModel(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), **checks.GATE_HYPER.adamw)
    update = make_step(model, optimizer)

    def step(batch):
        loss = model(**batch).loss
        loss.backward()
        update()
        optimizer.zero_grad()
        return loss.detach()

    return checks.run_trajectory(model, step, batches(), STEPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_passes(reference, dtype):
    run = trajectory(lambda model, optimizer: optimizer.step, dtype)
    assert checks.judge(run, reference, exact=True) == []
    assert checks.judge(run, reference, exact=False) == []


def test_the_reference_learns(reference):
    assert reference.losses[0] - reference.losses[-1] > 10 * checks.LOSS_FLOOR
    assert reference.unmoved == []


def _nothing(model, optimizer):
    return lambda: None


def _twice(model, optimizer):
    return lambda: (optimizer.step(), optimizer.step())


def _no_decay(model, optimizer):
    optimizer.param_groups[0]["weight_decay"] = 0.0
    return optimizer.step


def _no_bias_correction(model, optimizer):
    def update():
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        t = next(iter(optimizer.state.values()))["step"].item()
        factor = (1 - 0.9**t) / (1 - 0.999**t) ** 0.5
        with torch.no_grad():
            for p, old in zip(model.parameters(), before, strict=True):
                p.copy_(old + factor * (p - old))

    return update


def _one_frozen(model, optimizer):
    def update():
        model.norm.grad = None
        optimizer.step()

    return update


def _wrong_sign(model, optimizer):
    def update():
        for p in model.parameters():
            p.grad.neg_()
        optimizer.step()

    return update


def _noise(model, optimizer):
    def update():
        for p in model.parameters():
            p.grad = torch.randn_like(p.grad)
        optimizer.step()

    return update


def _drowned(model, optimizer):
    def update():
        for p in model.parameters():
            p.grad += 10 * p.grad.square().mean().sqrt() * torch.randn_like(p.grad)
        optimizer.step()

    return update


def _explodes(model, optimizer):
    def update():
        optimizer.step()
        with torch.no_grad():
            model.matrix.mul_(float("inf"))

    return update


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (_nothing, "never moved"),
        (_twice, "x the reference's distance"),
        (_no_decay, "weight decay is not AdamW's"),
        (_no_bias_correction, "x the reference's distance"),
        (_one_frozen, "1 parameters never moved: norm"),
        (_wrong_sign, "loss is"),
        (_explodes, "loss is not finite"),
    ],
)
def test_broken_methods_fail(reference, broken, reason):
    reasons = checks.judge(trajectory(broken), reference, exact=True)
    assert any(reason in text for text in reasons), reasons


@pytest.mark.parametrize("broken", [_noise, _drowned])
def test_a_method_that_ignores_its_gradients_is_no_lossy_method(reference, broken):
    reasons = checks.judge(trajectory(broken), reference, exact=False)
    assert any("loss fell by" in text for text in reasons), reasons


@pytest.mark.parametrize("broken", [_nothing, _no_decay, _one_frozen, _wrong_sign, _explodes])
def test_lossy_methods_are_held_to_these_too(reference, broken):
    assert checks.judge(trajectory(broken), reference, exact=False)


def test_trajectory_survives_json(reference):
    assert checks.Trajectory.from_json(reference.to_json()) == reference


def test_packing_matrices_does_not_change_the_kinds():
    separate = [torch.zeros(64, 32), torch.zeros(32, 32)]
    assert {checks._kind(t) for t in (*separate, torch.cat(separate))} == {"matrices"}
    assert checks._kind(torch.zeros(8192, 256)) == "embeddings"
    assert checks._kind(torch.zeros(8)) == "vectors"


def test_reference_needs_fp32():
    with pytest.raises(ValueError, match="fp32"):
        checks.reference_trajectory(TinyModel(torch.bfloat16), batches(), 1)
