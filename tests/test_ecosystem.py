"""What people put around an optimizer: schedulers, averaged weights, copies, compiler, wrappers.

The loops of other libraries are in test_examples.py.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler as S
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from forge import ForgeAdamW, ForgeSGD

LR = 1e-2
UPDATES = ("backward", "step")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def make_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), Block(8), Block(8), nn.Linear(8, 3))


def batches(count: int):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(10, 6, generator=generator) for _ in range(count)]


def backward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = (net(x).float() - x[:, :3].cumsum(1)).square().mean()
    loss.backward()
    return loss.detach()


def distance(a: nn.Module, b: nn.Module) -> float:
    named = dict(b.named_parameters())
    return max((p - named[name]).abs().max().item() for name, p in a.named_parameters())


def train(optimizer: Any, net: nn.Module, scheduler: Any = None, steps: int = 5) -> list[tuple]:
    """What the group held at each step."""
    seen = []
    for x in batches(steps):
        group = optimizer.param_groups[0]
        seen.append((float(group["lr"]), group.get("betas"), group.get("momentum")))
        loss = backward(net, x)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            needs_loss = "metrics" in inspect.signature(scheduler.step).parameters
            scheduler.step(*[loss] * needs_loss)
    return seen


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: S.LambdaLR(o, lambda t: 1 / (1 + t)),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: S.StepLR(o, 2),
    "MultiStepLR": lambda o: S.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: S.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: S.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.8),
    "SequentialLR": lambda o: S.SequentialLR(
        o, [S.ConstantLR(o, total_iters=1), S.ExponentialLR(o, 0.8)], [2]
    ),
    "ChainedScheduler": lambda o: S.ChainedScheduler([S.StepLR(o, 2), S.ExponentialLR(o, 0.8)]),
    "PolynomialLR": lambda o: S.PolynomialLR(o, 6),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: S.CyclicLR(o, 1e-3, 1e-2, step_size_up=2),
    "OneCycleLR": lambda o: S.OneCycleLR(o, 1e-2, total_steps=6),
    "ReduceLROnPlateau": lambda o: S.ReduceLROnPlateau(o, patience=0, threshold=0.9),
    "SWALR": lambda o: SWALR(o, 1e-3, anneal_epochs=3),
}


def test_these_are_all_schedulers_of_torch():
    assert set(S.__all__) - {"LRScheduler"} <= set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_torch(name):
    ours, plain = make_net(), make_net()
    optimizer = ForgeAdamW(ours, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    found = train(optimizer, ours, SCHEDULERS[name](optimizer))
    expected = train(reference, plain, SCHEDULERS[name](reference))
    assert found == expected and len(set(found)) > 1
    if name in ("OneCycleLR", "CyclicLR"):
        assert len({betas for _, betas, _ in found}) > 1
    assert distance(ours, plain) < 2e-3 * LR


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_cycled_momentum(name):
    ours, plain = make_net(), make_net()
    optimizer = ForgeSGD(ours, lr=LR, momentum=0.9, update="step")
    reference = torch.optim.SGD(plain.parameters(), lr=LR, momentum=0.9)
    found = train(optimizer, ours, SCHEDULERS[name](optimizer))
    assert found == train(reference, plain, SCHEDULERS[name](reference))
    assert len({momentum for *_, momentum in found}) > 1
    assert distance(ours, plain) < 1e-6


@pytest.mark.parametrize("update", UPDATES)
def test_averaged_models(update):
    ours, plain = make_net(), make_net()
    average = get_ema_multi_avg_fn(0.8)
    averaged = []
    for net, optimizer in (
        (ours, ForgeAdamW(ours, lr=LR, update=update)),
        (plain, torch.optim.AdamW(plain.parameters(), lr=LR)),
    ):
        ema = AveragedModel(net, multi_avg_fn=average)
        for x in batches(4):
            backward(net, x)
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters(net)
        averaged.append(ema)
    assert distance(ours, plain) < 2e-3 * LR
    assert distance(*averaged) < 2e-3 * LR
    assert distance(averaged[0].module, ours) > LR / 4
    torch.testing.assert_close(averaged[0](x), averaged[1](x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("update", UPDATES)
def test_a_copy_made_while_gradients_wait(update):
    """It has no gradients, as torch's has none, and lives on its own."""
    ours, plain = make_net(), make_net()
    optimizer = ForgeAdamW(ours, lr=LR, update=update)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    first, second, third = batches(3)
    backward(ours, first)
    before = copy.deepcopy(ours.state_dict())
    twin = copy.deepcopy(ours)
    assert all(p.grad is None for p in twin.parameters())
    assert type(twin[0]) is nn.Linear
    backward(twin, second)
    torch.testing.assert_close(ours.state_dict(), before, rtol=0, atol=0)
    optimizer.step()
    backward(ours, third)
    optimizer.step()
    for x in (first, third):
        reference.zero_grad()
        backward(plain, x)
        reference.step()
    assert distance(ours, plain) < 2e-3 * LR
    torch.testing.assert_close(
        twin.state_dict(), before if update == "backward" else make_net().state_dict()
    )


@pytest.mark.parametrize(
    ("update", "autocast"), [("backward", False), ("step", False), ("step", True)]
)
def test_compiled_models(update, autocast):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    nets = [make_net() for _ in range(3)]  # ours compiled, plain compiled, the truth
    ours = ForgeAdamW(nets[0], lr=LR, update=update)
    optimizers = [ours, *(torch.optim.AdamW(n.parameters(), lr=LR) for n in nets[1:])]
    called = [torch.compile(nets[0], backend="aot_eager"), *nets[1:]]
    graphs = []
    for x in batches(4):
        for i, (net, optimizer) in enumerate(zip(called, optimizers, strict=True)):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast and i < 2):
                loss = (net(x).float() - x[:, :3].cumsum(1)).square().mean()
            loss.backward()
            if update == "step":
                nn.utils.clip_grad_norm_(nets[i].parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 1 and len(set(graphs)) == 1  # the first step compiled everything
    # bf16 products may cost what they cost plain torch, and the rounding of clipped factors.
    error, allowed = rms(nets[0], nets[2]), rms(nets[1], nets[2])
    assert error < (1.5 * allowed if autocast else 1e-6)


def rms(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    squares = [(p - q).square().flatten() for p, q in pairs]
    return torch.cat(squares).mean().sqrt().item()


def test_wrappers_of_several_copies_are_refused():
    with pytest.raises(NotImplementedError, match="DataParallel.*pass the module inside"):
        ForgeAdamW(nn.DataParallel(make_net()))
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)  # without processes
    nn.Module.__init__(wrapped)
    wrapped.module = make_net()
    with pytest.raises(NotImplementedError, match="DistributedDataParallel.*module inside"):
        ForgeAdamW(wrapped)


@pytest.mark.parametrize("update", UPDATES)
def test_a_wrapper_put_around_the_model_later_is_refused(update):
    """Its reducer copies gradients to and from its buckets, in a single process too."""
    net = make_net()
    optimizer = ForgeAdamW(net, update=update)
    backward(net, batches(1)[0])
    for copied in (
        lambda grad: grad.copy_(torch.zeros(grad.shape)),
        lambda grad: torch.mul(grad, 1.0, out=grad),
    ):
        with pytest.raises(RuntimeError, match="DistributedDataParallel needs torch.optim.AdamW"):
            copied(net[0].weight.grad)
    optimizer.step()
