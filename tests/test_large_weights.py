"""Weights of more than 2^31 elements: offsets need 64 bits. On a GPU with 48 GB or more."""

from __future__ import annotations

import pytest
import torch

from forge.kernels.apply_rule import apply_rule, apply_rule_reference
from forge.kernels.target import Target
from forge.kernels.wgrad_auto import wgrad_update_auto
from forge.optim.rules import ADAMW

ROWS, COLUMNS, TOKENS = 2**16 + 64, 2**15, 16
CHECKED = 64  # rows at either end
SCALARS = [1e-4, 1e-2, 0.1, 1e-3, 1.0, 1e-8]

pytestmark = pytest.mark.gpu


@pytest.fixture
def large():
    """A target of 2.1 billion elements, made of copies of a few rows."""
    free, _ = torch.cuda.mem_get_info()
    if free < 40e9:
        pytest.skip(f"{free / 1e9:.0f} GB of GPU memory are free, 40 are needed")
    rows = torch.randn(2**8, COLUMNS, device="cuda").bfloat16()

    def tensor(scale):
        part = (rows.abs() if scale < 1 else rows) * scale
        return part.repeat(-(-ROWS // 2**8), 1)[:ROWS].contiguous()

    made = Target(tensor(1.0), [tensor(0.1), tensor(0.01)], 0)
    assert made.param.numel() > 2**31
    return made


def ends(t):
    return torch.cat([t[:CHECKED], t[-CHECKED:]])


def check(large, before, grad):
    """The first and last rows against the reference."""
    wanted = Target(before[0], before[1:], 0)
    scalars = torch.tensor(SCALARS, device="cuda")
    apply_rule_reference(grad, wanted, scalars, None, ADAMW.update)
    for found, theirs in zip(
        (large.param, *large.states), (wanted.param, *wanted.states), strict=True
    ):
        a, b = ends(found).float(), theirs.float()
        assert (a - b).abs().max() <= 2**-6 * b.abs().max()
        assert (a != b).float().mean() < 5e-3


def test_elements(large):
    grad = large.param.roll(1, 0) * 0.5
    before = [ends(t) for t in (large.param, *large.states)]
    apply_rule([grad], [large], torch.tensor(SCALARS, device="cuda"), None, ADAMW.update)
    check(large, before, ends(grad))


@pytest.mark.parametrize("path", ["tiles", "scratch", "hopper"])
def test_products(large, path):
    if path == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for Hopper")
    dy = torch.randn(TOKENS, ROWS, device="cuda").bfloat16()
    x = torch.randn(TOKENS, COLUMNS, device="cuda").bfloat16()
    before = [ends(t) for t in (large.param, *large.states)]
    scalars = torch.tensor(SCALARS, device="cuda")
    wgrad_update_auto([dy], [x], [large], scalars, None, ADAMW.update, path)
    grad = ends(dy.t()).float() @ x.float()
    check(large, before, grad.bfloat16() if path == "scratch" else grad)
