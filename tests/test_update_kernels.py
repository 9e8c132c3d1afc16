"""The update kernels against the rule in fp64: the truth is what rules.py says, exactly."""

from __future__ import annotations

import itertools

import pytest
import torch

from forge.kernels.advance import advance
from forge.kernels.apply_rule import apply_rule
from forge.kernels.rounding import (
    hash32_reference,
    random_bits_reference,
    stochastic_bf16_reference,
)
from forge.kernels.target import CAPACITY, Target
from forge.kernels.wgrad_update import wgrad_update
from forge.optim.rules import ADAMW

HYPER = (1e-3, 0.9, 0.99, 1e-8, 0.1)
STEP = 3
SMALL = dict(BLOCK_M=16, BLOCK_N=32, BLOCK_K=16, GROUP=2, num_warps=4, num_stages=2)


def scalars64():
    values = [torch.tensor(v, dtype=torch.float64) for v in HYPER]
    return ADAMW.scalars.torch(torch.tensor(float(STEP), dtype=torch.float64), tuple(values))


def scalars(device):
    return torch.stack(scalars64()).float().to(device)


def make_target(shape, dtype, state_dtype, device, salt=0):
    w = torch.randn(shape).to(device, dtype)
    m = (torch.randn(shape) * 0.1).to(device, state_dtype)
    v = (torch.rand(shape) * 0.1).to(device, state_dtype)
    return Target(w, [m, v], salt)


def stored(target):
    return [t.double().cpu() for t in (target.param, *target.states)]


def truth(before, grad):
    w, states = ADAMW.update.torch(before[0], grad.double().cpu(), tuple(before[1:]), scalars64())
    return [w, *states]


def assert_rounded(ours, exact, dtype, what):
    """fp32: 1e-5 of the largest; bf16: within one unit in the last place of the truth.

    One unit, not half: stochastic rounding may go either way, and the interpreter truncates.
    """
    if dtype == torch.float32:
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5, msg=lambda m: f"{what}: {m}")
        return
    ulp = 2.0 ** (torch.floor(torch.log2(exact.abs().clamp_min(1e-30))) - 7)
    excess = (ours - exact).abs() - 1.01 * ulp - 1e-6
    assert (excess <= 0).all(), f"{what}: off by {excess.max():.3g} more than one ulp"


@pytest.mark.parametrize("tokens", [0, 1, 3, 127, 129, 513])
@pytest.mark.parametrize("n, k", [(32, 16), (33, 17), (1, 50), (48, 1)])
@pytest.mark.parametrize(
    "dtype, state_dtype, stochastic",
    [
        (torch.float32, torch.float32, False),
        (torch.bfloat16, torch.bfloat16, True),
        (torch.bfloat16, torch.float32, False),
    ],
)
def test_weight_gradient_and_update_follow_the_truth(
    device, tokens, n, k, dtype, state_dtype, stochastic
):
    dy = torch.randn(tokens, n).to(device, dtype)
    x = torch.randn(tokens, k).to(device, dtype)
    target = make_target((n, k), dtype, state_dtype, device)
    before = stored(target)
    seed = torch.tensor(7, dtype=torch.int32, device=device) if stochastic else None
    wgrad_update([dy], [x], [target], scalars(device), seed, ADAMW.update, tile=SMALL)
    exact = truth(before, dy.double().cpu().t() @ x.double().cpu())
    for ours, want, name, kind in zip(
        stored(target), exact, "wmv", (dtype, state_dtype, state_dtype), strict=True
    ):
        assert_rounded(ours, want, kind, name)


def test_strided_and_expanded_operands(device):
    wide = torch.randn(9, 80).to(device)
    cases = {
        "row pitch": (wide[:, :33], wide[:, 40:57]),
        "transposed": (torch.randn(33, 9).to(device).t(), torch.randn(17, 9).to(device).t()),
        "expanded rows": (
            torch.randn(1, 33).to(device).expand(9, 33),
            torch.randn(1, 17).to(device).expand(9, 17),
        ),
        "expanded scalar": (torch.ones((), device=device).expand(9, 33), wide[:, :17]),
        "three dimensions": (
            torch.randn(3, 3, 33).to(device),
            torch.randn(3, 3, 17).to(device).transpose(0, 1),
        ),
    }
    for name, (dy, x) in cases.items():
        target = make_target((33, 17), torch.float32, torch.float32, device)
        before = stored(target)
        wgrad_update([dy], [x], [target], scalars(device), None, ADAMW.update, tile=SMALL)
        grad = dy.double().cpu().reshape(-1, 33).t() @ x.double().cpu().reshape(-1, 17)
        for ours, want in zip(stored(target), truth(before, grad), strict=True):
            assert_rounded(ours, want, torch.float32, name)


def test_many_weights_in_one_call(device):
    """More weights than one launch takes, of different shapes and token counts, some empty."""
    shapes = itertools.islice(itertools.cycle([(16, 8), (5, 3), (0, 4), (33, 20)]), CAPACITY + 3)
    targets = [
        make_target(s, torch.float32, torch.float32, device, salt=i) for i, s in enumerate(shapes)
    ]
    dys = [torch.randn(i % 5, t.param.shape[0]).to(device) for i, t in enumerate(targets)]
    xs = [torch.randn(i % 5, t.param.shape[1]).to(device) for i, t in enumerate(targets)]
    before = [stored(t) for t in targets]
    wgrad_update(dys, xs, targets, scalars(device), None, ADAMW.update, tile=SMALL)
    for dy, x, target, old in zip(dys, xs, targets, before, strict=True):
        exact = truth(old, dy.double().cpu().t() @ x.double().cpu())
        for ours, want in zip(stored(target), exact, strict=True):
            assert_rounded(ours, want, torch.float32, tuple(target.param.shape))


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_element_wise_update_follows_the_truth(device, grad_dtype):
    shapes = [(1,), (1023,), (1025,), (3, 7, 11), (), (0,)] + [(2,)] * CAPACITY
    targets = [make_target(s, torch.bfloat16, torch.float32, device) for s in shapes]
    grads = [torch.randn(s).to(device, grad_dtype) for s in shapes]
    before = [stored(t) for t in targets]
    apply_rule(grads, targets, scalars(device), None, ADAMW.update)
    for grad, target, old in zip(grads, targets, before, strict=True):
        for ours, want, kind in zip(
            stored(target),
            truth(old, grad),
            (torch.bfloat16, torch.float32, torch.float32),
            strict=True,
        ):
            assert_rounded(ours, want, kind, tuple(grad.shape))


def test_transposed_parameter_and_gradient_of_other_layout(device):
    w = torch.randn(7, 5).to(device).t()
    target = Target(w, [torch.zeros_like(w), torch.zeros_like(w)], salt=0)
    grad = torch.randn(5, 7).to(device)
    before = stored(target)
    apply_rule([grad], [target], scalars(device), None, ADAMW.update)
    for ours, want in zip(stored(target), truth(before, grad), strict=True):
        assert_rounded(ours, want, torch.float32, "transposed")


def test_unaligned_parameter(device):
    w = torch.randn(41).to(device, torch.bfloat16)[1:]
    target = Target(w, [torch.zeros_like(w), torch.zeros_like(w)], salt=0)
    grad = torch.randn(40).to(device, torch.bfloat16)
    before = stored(target)
    apply_rule([grad], [target], scalars(device), None, ADAMW.update)
    for ours, want in zip(stored(target), truth(before, grad), strict=True):
        assert_rounded(ours, want, torch.bfloat16, "unaligned")


def test_kernel_and_reference_draw_the_same_bits(device):
    """The reference path is the documentation of the random bits: kernels must not differ."""
    target = make_target((200, 30), torch.bfloat16, torch.bfloat16, device, salt=12345)
    twin = Target(target.param.cpu().clone(), [s.cpu().clone() for s in target.states], 12345)
    grad = torch.randn(200, 30)
    seed = torch.tensor(-987654321, dtype=torch.int32)
    apply_rule([grad.to(device)], [target], scalars(device), seed.to(device), ADAMW.update)
    from forge.kernels.apply_rule import apply_rule_reference

    apply_rule_reference(grad, twin, scalars("cpu"), seed, ADAMW.update)
    for ours, want, name in zip(stored(target), stored(twin), "wmv", strict=True):
        # fp32 arithmetic may differ in the last bit, which moves a rounding now and then.
        assert (ours != want).float().mean() < 2e-3, name


def test_zero_gradient_and_zero_state_stay_zero(device):
    w = torch.zeros(300, device=device, dtype=torch.bfloat16)
    target = Target(w, [torch.zeros_like(w), torch.zeros_like(w)], salt=0)
    seed = torch.tensor(1, dtype=torch.int32, device=device)
    apply_rule([torch.zeros_like(w)], [target], scalars(device), seed, ADAMW.update)
    assert all((t == 0).all() for t in stored(target))


def test_nan_and_infinity_survive_stochastic_rounding():
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.0e38, 0.0, -0.0])
    # The NaN that a GPU produces: adding to it would carry into the sign.
    x[0] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    for bits in (0, 1 << 16, -1):
        y = stochastic_bf16_reference(x, torch.full(x.shape, bits, dtype=torch.int32))
        assert y[0].isnan() and y[1] == float("inf") and y[2] == -float("inf")
        assert (y[4:] == 0).all()


def test_stochastic_rounding_is_unbiased():
    n = 200_000
    seed = torch.tensor(42, dtype=torch.int32)
    h = random_bits_reference(torch.arange(n, dtype=torch.int32), seed)
    for value in [1.001, -0.37, 1e-6, 255.3]:
        x = torch.full((n,), value)
        y = stochastic_bf16_reference(x, h).double()
        ulp = (y.max() - y.min()).item()
        assert ulp > 0
        # The mean of n draws has a standard error of at most ulp / (2 sqrt(n)).
        assert abs(y.mean().item() - x[0].item()) < 4 * ulp / (2 * n**0.5), value


@pytest.mark.parametrize("seed", [0, 1, 3, -1, 123456789])
def test_random_bits_are_uniform_and_uncorrelated(seed):
    n = 2**18
    numbers = torch.arange(n, dtype=torch.int32)
    h = random_bits_reference(numbers, torch.tensor(seed, dtype=torch.int32))
    draws = ((h >> 16) & 0xFFFF).double()
    for part in (draws[::2], draws[1::2]):  # these come by two ways from one hash
        counts = torch.bincount((part / 256).long(), minlength=256)
        chi2 = ((counts - part.numel() / 256) ** 2).sum() / (part.numel() / 256)
        assert abs(chi2 - 255) < 5 * (2 * 255) ** 0.5
    for distance in (1, 2, 256, 1024, 3072):
        pairs = torch.stack([draws[distance:], draws[:-distance]])
        for kind in (pairs[:, ::2], pairs[:, 1::2]):
            assert torch.corrcoef(kind)[0, 1].abs() < 5 / kind.shape[1] ** 0.5
    other = random_bits_reference(numbers, torch.tensor(seed ^ 8, dtype=torch.int32))
    pairs = torch.stack([draws, ((other >> 16) & 0xFFFF).double()])
    assert torch.corrcoef(pairs)[0, 1].abs() < 5 / n**0.5


@pytest.mark.parametrize("start", [0, 9, 99_999])
def test_advance_is_exact(device, start):
    def tensor(v, dtype):
        return torch.tensor(v, dtype=dtype, device=device)

    step = tensor(float(start), torch.float32)
    hyper = tensor(HYPER, torch.float64)
    out = torch.full((ADAMW.scalar_count,), float("nan"), device=device)
    seed, base = tensor(0, torch.int32), tensor(-5, torch.int32)
    advance(step, hyper, out, seed, base, ADAMW.scalars)
    lr, beta1, beta2, eps, weight_decay = HYPER
    t = start + 1
    want = [
        lr * weight_decay,
        lr / (1 - beta1**t),
        1 - beta1,
        1 - beta2,
        (1 - beta2**t) ** -0.5,
        eps,
    ]
    assert step.item() == t
    torch.testing.assert_close(out.cpu().double(), torch.tensor(want).double(), rtol=2e-7, atol=0)
    want_seed = hash32_reference(torch.tensor(t, dtype=torch.int32), base.cpu())
    assert seed.item() == want_seed.item()
