"""State bytes are exact: every tensor the optimizer holds, once, and nothing of the model."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from forge.harness.memory import GradientMeter, plain_tensors, state_bytes


def make_model(dtype=torch.bfloat16):
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 7)).to(dtype)
    model(torch.ones(3, 64, dtype=dtype)).sum().backward()
    return model


def counts(model):
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), len(parameters)


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 4), (torch.float32, 8)])
def test_torch_adamw(dtype, width):
    model = make_model(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    assert state_bytes(optimizer, model) == 0
    optimizer.step()
    elements, tensors = counts(model)
    step_counters = 4 * tensors
    assert state_bytes(optimizer, model) == width * elements + step_counters


def test_parameters_gradients_and_buffers_are_not_state():
    model = nn.Sequential(make_model(), nn.BatchNorm1d(7))
    everything = [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]
    aliases = [p.detach().view(-1)[1:] for p in model.parameters()]
    assert state_bytes({"held": everything, "alias": aliases, "model": model}, model) == 0


class Projector:
    """State in an object, as GaLore keeps it."""

    __slots__ = ("basis", "inner")

    def __init__(self):
        self.basis = torch.zeros(10)
        self.inner = {"q": [torch.zeros(4, dtype=torch.int8)]}


def test_objects_sequences_closures_and_shared_storage():
    model = make_model()
    shared = torch.zeros(100)
    hidden = torch.zeros(6)

    def hook():
        return hidden

    held = {"a": shared, "b": shared[10:20], "p": Projector(), "t": (hook,), 3: {torch.zeros(2)}}
    assert state_bytes(held, model) == 4 * (100 + 10 + 6 + 2) + 4


def test_state_on_a_parameter_attribute():
    model = make_model()
    weight = model[0].weight
    weight.moment = torch.zeros(5)
    assert state_bytes([weight], model) == 20


def test_tensor_subclasses_count_their_inner_tensors():
    subclass = pytest.importorskip("torchao.optim.subclass_8bit")
    model = make_model()
    state = subclass.OptimState8bit.zeros((64, 32), signed=True, block_size=256)
    inner = list(plain_tensors(state))
    assert len(inner) == 3
    expected = sum(t.untyped_storage().nbytes() for t in inner)
    assert state_bytes({"exp_avg": state}, model) == expected
    assert 64 * 32 < expected < 64 * 32 * 2


def test_peak_meter_sees_memory_that_is_freed_again():
    """In a process of its own: what other tests have left is freed at any moment."""
    code = (
        "import torch\n"
        "from forge.harness.memory import PeakMeter\n"
        "meter, peaks = PeakMeter('cpu'), []\n"
        "for size in (256, 64):\n"
        "    meter.reset()\n"
        "    before, reserved = meter.read()\n"
        "    block = torch.ones(size * 2**20 // 4)\n"
        "    del block\n"
        "    peaks.append(meter.read()[0] - before)\n"
        "print(*peaks, reserved, meter.kind, sep='|')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    large, small, reserved, kind = done.stdout.strip().split("|")
    assert 0.2 < float(large) < 0.3
    if kind == "process peak RSS":  # and not since start
        assert 0.05 < float(small) < 0.1
    assert reserved == "None" and "RSS" in kind


def step_with_meter(model, optimizer):
    meter = GradientMeter(model)
    meter.watch(optimizer)
    model(torch.ones(3, 64, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    held = meter.stop()
    optimizer.step()
    assert meter.stop() == held, "still looking"
    return held


def test_gradients_that_exist_when_the_step_begins():
    model = make_model()
    everything = sum(p.nbytes for p in model.parameters())
    assert step_with_meter(model, torch.optim.AdamW(model.parameters())) == everything


def test_gradients_of_a_fused_update_do_not_exist():
    from forge import ForgeAdamW

    model = make_model()
    model.zero_grad()
    assert step_with_meter(model, ForgeAdamW(model, lr=1e-3)) == 0


def test_gradients_of_two_optimizers_in_one_exist_when_the_first_begins():
    model = make_model()
    parameters = list(model.parameters())

    class Pair:
        def __init__(self):
            self.first = torch.optim.AdamW(parameters[:1])
            self.second = torch.optim.SGD(parameters[1:])

        def step(self):
            self.first.step()
            self.first.zero_grad()
            self.second.step()

    assert step_with_meter(model, Pair()) == sum(p.nbytes for p in parameters)


def test_gradients_of_an_unknown_optimizer_are_unknown():
    meter = GradientMeter(make_model())
    meter.watch(object())
    assert meter.stop() is None
