"""The fused updates for Hopper without a GPU, in every layout: who waits, and what goes where.

gluon_on_cpu.py runs the kernels. What is inline PTX is replaced: numbers are widened by torch, and
a unit of 8-bit states is updated by a formula that shows where each of its numbers came from.
"""

from __future__ import annotations

import types
from contextlib import nullcontext

import pytest
import torch

from forge.kernels.target import BLOCK, Target
from forge.kernels.wgrad_update import wgrad_update_reference
from forge.optim.rules import ADAMW

from .gluon_on_cpu import OnCPU
from .gluon_values import Int, Tile, bare, real

# Tokens, shapes, whether copies are late, multiprocessors: one token, ragged heights, more matrices
# than a launch takes, programs of one tile and of many.
CASES = [
    (1, [(8, 256)], True, 3),
    (33, [(136, 256), (8, 512), (264, 256), (24, 256), (128, 256)], True, 3),
    (70, [(200, 512)], False, 2),
    (100, [(304, 256), (64, 256)], True, 1),
    (250, [(8, 256), (136, 512)], True, 5),
]
cases = pytest.mark.parametrize(("tokens", "shapes", "late", "sms"), CASES)


def place_of(it, slots):
    return Int(it % slots), Int(it // slots & 1)


def as_torch(rule):
    """A rule for the interpreter's tensors."""

    def update(w, g, states, scalars):
        w, states = rule.torch(
            bare(w), bare(g), [bare(s) for s in states], [bare(s) for s in scalars]
        )
        return Tile(w), tuple(map(Tile, states))

    return update


def nothing(*_):
    return None


INSTEAD = dict(
    place_of=place_of,
    widen=lambda x: x.to(real.float32),
    WORKER_WARPS=[4, 1, 1, 1],
    _chunk_layout=nothing,
    rows_layout=nothing,
    _sleep=nothing,
)


@pytest.fixture
def on_cpu(monkeypatch):
    """Replaces a kernel of wgrad_update_hopper.py and says how it is launched."""
    module = pytest.importorskip("forge.kernels.wgrad_update_hopper")

    def replace(name, late, sms, **instead):
        kernel = OnCPU(getattr(module, name), late, INSTEAD | instead)
        monkeypatch.setattr(module, name, kernel)
        monkeypatch.setattr(module, "gluon_function", as_torch)
        monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
        properties = types.SimpleNamespace(multi_processor_count=sms)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        return module.wgrad_update_hopper

    return replace


def whole_numbers(tokens, shapes, side):
    return [torch.randint(-4, 5, (tokens, shape[side])).bfloat16() for shape in shapes]


@pytest.mark.parametrize("layout", ["wide", "pair"])
@cases
def test_bf16_states_are_those_of_the_reference(on_cpu, tokens, shapes, late, sms, layout):
    ours, wanted = [], []
    for i, shape in enumerate(shapes):
        w, m, v = (torch.randn(shape).bfloat16() for _ in range(3))
        ours.append(Target(w, [m, v.abs()], 256 * i))
        wanted.append(Target(w.clone(), [m.clone(), v.abs()], 256 * i))
    dys, xs = whole_numbers(tokens, shapes, 0), whole_numbers(tokens, shapes, 1)
    scalars = torch.tensor([1e-4, 1e-2, 0.1, 1e-3, 1.0, 1e-8])
    update = on_cpu("_wgrad_update_hopper_kernel", late, sms)
    update(dys, xs, ours, scalars, None, ADAMW.update, layout)
    for dy, x, mine, theirs in zip(dys, xs, ours, wanted, strict=True):
        wgrad_update_reference(dy, x, theirs, scalars, None, ADAMW.update)
        pairs = zip((mine.param, *mine.states), (theirs.param, *theirs.states), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def update_unit(g, m, v, left, right, unit, exponents, column, base, pitch, *_):
    """In place of the update: sums of what belongs to each element, its number modulo 251 too."""
    assert unit == 0 and column == 0
    e0, e1 = (bare(e)[:, None] for e in exponents)
    number = (torch.arange(64)[:, None] * pitch + base + torch.arange(128)) % 251
    w = torch.cat((left.tensor, right.tensor), 1).float() + number + bare(g)
    left.tensor.copy_(w[:, :64].bfloat16())
    right.tensor.copy_(w[:, 64:].bfloat16())
    for codes, e in ((m.bytes.view(64, 128), e0), (v.bytes.view(64, 128), e1)):
        codes.copy_((codes.int() + e & 255).to(torch.uint8))
    return Tile(e0[:, 0] + 1 & 255), Tile(e1[:, 0] + 2 & 255)


@cases
def test_codes_meet_their_gradient_number_and_exponent(on_cpu, tokens, shapes, late, sms):
    def numbers(*shape):
        return torch.randint(0, 256, shape, dtype=torch.uint8)

    ours, before = [], []
    for i, (n, k) in enumerate(shapes):
        w, m, v = torch.randint(-100, 100, (n, k)).bfloat16(), numbers(n, k), numbers(n, k)
        scales = [numbers(n, k // BLOCK), numbers(n, k // BLOCK)]
        ours.append(Target(w, [m.view(torch.int8), v], 256 * (i + 3), scales))
        before.append([x.clone() for x in (w, m, v, *scales)])
    dys, xs = whole_numbers(tokens, shapes, 0), whole_numbers(tokens, shapes, 1)
    update = on_cpu(
        "_wgrad_update_hopper_int8_kernel",
        late,
        sms,
        update_unit=update_unit,
        unit_rows=lambda *_: Tile(torch.arange(64)),
        constants=nothing,
        _again=lambda x: x,
    )
    update(dys, xs, ours, torch.zeros(6), None, ADAMW.update, "apart")
    for dy, x, t, (w, m, v, e0, e1) in zip(dys, xs, ours, before, strict=True):
        n, k = t.param.shape
        number = (torch.arange(n * k).view(n, k) + t.salt) % 251
        assert torch.equal(t.param, (w.float() + number + dy.float().t() @ x.float()).bfloat16())
        for code, old, e in zip(t.states, (m, v), (e0, e1), strict=True):
            assert torch.equal(code.view(torch.uint8), old + e.repeat_interleave(BLOCK, 1))
        assert torch.equal(t.scales[0], e0 + 1) and torch.equal(t.scales[1], e1 + 2)
