"""``update="step"``: clipping, accumulation, scaling, skipping, as in plain torch; and what
``update="backward"`` says to code that asks for gradients it has applied."""

from __future__ import annotations

import copy
import weakref
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from forge import ForgeAdamW, ForgeSGD, TrainStep, queue
from forge.deferred import AppliedGradient, DeferredGradient

LR = 1e-2


class Net(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 12)
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 20)
        self.mix = nn.Linear(20, 20, bias=False)
        self.down = nn.Linear(20, 12, bias=False)
        self.head = nn.Linear(12, 29, bias=False)
        self.head.weight = self.embed.weight
        self.reentrant = reentrant

    def block(self, h):
        h = F.gelu(self.up(self.norm(h)))
        h = self.mix(torch.tanh(self.mix(h)))
        return self.down(h) + 0.1 * h @ self.down.weight.t()  # a use outside the layer

    def forward(self, ids):
        h = self.embed(ids)
        if self.reentrant is None:
            h = h + self.block(h)
        else:
            h = h + checkpoint(self.block, h, use_reentrant=self.reentrant)
        return F.cross_entropy(self.head(h).flatten(0, 1), ids.flatten())


def pair(**kwargs):
    torch.manual_seed(2)
    ours = Net(**kwargs)
    return ours, copy.deepcopy(ours)


def batches(count):
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 29, (2, 5), generator=generator) for _ in range(count)]


def assert_same(ours, plain, steps=1):
    plain_params = dict(plain.named_parameters())
    for name, p in ours.named_parameters():
        error = (p - plain_params[name]).abs().max().item()
        assert error < 2e-3 * LR * steps**0.5, f"{name}: off by {error:.2e}"


def both(ours, plain, **kwargs):
    return (
        ForgeAdamW(ours, lr=LR, weight_decay=0.1, update="step", **kwargs),
        torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=0.1),
    )


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("micro", [1, 3])
def test_clipping_and_accumulation_by_the_option(reentrant, micro):
    ours, plain = pair(reentrant=reentrant)
    optimizer, reference = both(ours, plain, max_grad_norm=0.1)
    for step in range(4):
        for ids in batches(4 * micro)[step * micro : (step + 1) * micro]:
            (ours(ids) / micro).backward()
            (plain(ids) / micro).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        reference.step(), reference.zero_grad()
        optimizer.step(), optimizer.zero_grad()
        torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-5, atol=0)
        assert norm > 0.1  # it did clip
    assert_same(ours, plain, 4)
    assert all(p.grad is None for p in ours.parameters())


def test_torchs_own_clipping_is_exact():
    ours, plain = pair()
    optimizer, reference = both(ours, plain)
    for ids in batches(4):
        for net, opt in ((ours, optimizer), (plain, reference)):
            net(ids).backward()
            net.seen = nn.utils.clip_grad_norm_(net.parameters(), 0.2)
            opt.step(), opt.zero_grad()
        torch.testing.assert_close(ours.seen, plain.seen, rtol=1e-5, atol=0)
    assert_same(ours, plain, 4)


def test_no_gradient_of_a_fused_layer_is_stored():
    ours, plain = pair()
    _optimizer, _ = both(ours, plain)  # lives as long as its layers are to be fused
    ids = batches(1)[0]
    for _ in range(2):
        ours(ids).backward()
    plain(ids).backward()
    for name in ("up", "mix"):
        weight = getattr(ours, name).weight
        assert isinstance(weight.grad, DeferredGradient)
        # Reading forms a copy.
        truth = 2 * getattr(plain, name).weight.grad
        torch.testing.assert_close(weight.grad.clone(), truth)
        torch.testing.assert_close(weight.grad.abs().max(), truth.abs().max())
    # What waits: tokens * (N + K) elements a weight, use and micro-batch.
    kept = sum(x.nbytes + dy.nbytes for x, dy, _ in ours.mix.weight.grad.factors)
    assert kept == 2 * 2 * 10 * (20 + 20) * 4
    assert "up.weight" in repr(ours.up.weight.grad)


def peak_bytes(run):
    """Most bytes that ``run`` has allocated at one time, on a CPU."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    sizes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return max(accumulate(size for _, size in sorted(sizes, key=lambda pair: pair[0])))


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("queue_bytes", [0, 2**27])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_beyond_backward_mode_is_the_documented_formula(
    dtype, queue_bytes, clip, monkeypatch
):
    monkeypatch.setattr(queue, "QUEUE_BYTES", queue_bytes)
    tokens, wide, narrow, layers, micro = 16, 192, 96, 8, 4
    x = torch.randn(tokens, narrow, dtype=dtype)

    def peak(update):
        parts = [(nn.Linear(narrow, wide), nn.Linear(wide, narrow)) for _ in range(layers // 2)]
        net = nn.Sequential(*[layer for pair in parts for layer in pair]).to(dtype)
        optimizer = ForgeAdamW(net, update=update)

        def run(backwards):
            for _ in range(backwards):
                net(x).square().mean().backward()
            if update == "step" and clip:
                nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            optimizer.step(), optimizer.zero_grad()

        run(1)  # makes the states
        return peak_bytes(lambda: run(micro if update == "step" else 1))

    # Of each weight [N, K] and micro-batch tokens * (N + K) elements, of one weight as much again
    # while its micro-batches are joined, or the gradient that clipping forms; and biases'.
    waiting = layers * micro * tokens * (wide + narrow)
    once = max(micro * tokens * (wide + narrow), wide * narrow)
    formula = (waiting + once + layers * wide) * dtype.itemsize
    extra = peak("step") - peak("backward")
    assert waiting * dtype.itemsize / 3 < extra <= formula


def test_discarded_and_zeroed_gradients():
    ours, plain = pair()
    optimizer, reference = both(ours, plain)
    first, second, third = batches(3)
    for net, opt in ((ours, optimizer), (plain, reference)):
        net(first).backward()
        opt.zero_grad()
        net(second).backward()
        opt.zero_grad(set_to_none=False)
        net(third).backward()
        opt.step()
        opt.zero_grad()
        net(first).backward()
        opt.zero_grad(set_to_none=False)
        opt.step()  # on zeros: decay and momentum
    assert_same(ours, plain, 2)


def test_gradients_dropped_without_the_optimizer():
    """``model.zero_grad()``, as Trainer and many loops call it, and ``grad = None``."""
    ours, plain = pair()
    optimizer, reference = both(ours, plain)
    first, second = batches(2)
    for net, opt in ((ours, optimizer), (plain, reference)):
        for _ in range(2):
            net(first).backward()
            net.zero_grad()
            net(first).backward()
            net.mix.weight.grad = None
            net(second).backward()
            opt.step()
            net.zero_grad()
    assert_same(ours, plain, 2)
    ours(first).backward()
    kept = [weakref.ref(t) for t in ours.mix.weight.grad.factors[0][:2]]
    ours.zero_grad()
    assert [ref() for ref in kept] == [None, None]  # and so is their memory


def test_scaling_does_not_reach_what_a_later_backward_adds():
    ours, plain = pair()
    optimizer, reference = both(ours, plain)
    first, second = batches(2)
    for net, opt in ((ours, optimizer), (plain, reference)):
        net(first).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        net(second).backward()
        opt.step()
    assert_same(ours, plain)


def test_scaled_by_hand_and_by_a_gradient_scaler():
    ours, plain = pair()
    optimizer, reference = both(ours, plain)
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in range(2)]
    for i, ids in enumerate(batches(5)):
        for net, opt, scaler in zip((ours, plain), (optimizer, reference), scalers, strict=True):
            scaler.scale(net(ids) * (float("inf") if i == 2 else 1.0)).backward()
            if i % 2:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(net.parameters(), 0.2)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert_same(ours, plain, 5)


def test_half_precision_under_a_scaler():
    """Unscaled gradients of 1e-8 are below what fp16 can hold."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    plain, start = copy.deepcopy(ours), ours[0].weight.detach().clone()
    optimizer = ForgeSGD(ours, lr=1e4, update="step")
    reference = torch.optim.SGD(plain.parameters(), lr=1e4)
    x = torch.randn(32, 8)
    for net, opt in ((ours, optimizer), (plain, reference)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = 1e-6 * net(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    assert (plain[0].weight - start).abs().max() > 1e-4
    torch.testing.assert_close(ours[0].weight, plain[0].weight, rtol=0, atol=2e-6)


def test_nonfinite_norms():
    for mode in ("skip", "raise"):
        ours, plain = pair()
        optimizer, reference = both(ours, plain, on_nonfinite=mode)
        first, bad, last = batches(3)
        for ids in (first, last):
            ours(ids).backward()
            optimizer.step(), optimizer.zero_grad()
            plain(ids).backward()
            reference.step(), reference.zero_grad()
            if ids is first:
                before = copy.deepcopy(ours.state_dict())
                (ours(bad) * float("nan")).backward()
                if mode == "raise":
                    with pytest.raises(RuntimeError, match="is nan; nothing was updated"):
                        optimizer.step()
                    optimizer.zero_grad()
                else:
                    optimizer.step()
                torch.testing.assert_close(ours.state_dict(), before, rtol=0, atol=0)
        assert_same(ours, plain, 2)
        assert {float(s["step"]) for s in optimizer.state.values()} == {2.0}


@pytest.mark.parametrize("scale", [2e19, 1e30])
def test_a_gradient_whose_square_is_beyond_fp32_shows_and_is_skipped(scale):
    x = torch.ones(1, 2)
    for options in ({}, dict(update="step", on_nonfinite="skip")):
        net = nn.Linear(2, 2, bias=False)
        before = net.weight.detach().clone()
        optimizer = ForgeAdamW(net, lr=LR, **options)
        (net(x).sum() * scale).backward()
        optimizer.step(), optimizer.zero_grad()
        if options:
            assert optimizer.grad_norm.isinf() and torch.equal(net.weight, before)
        net(x).sum().backward()
        optimizer.step()
        assert bool(net.weight.isnan().all()) == (not options)


@pytest.mark.parametrize("reduction", ["mean", "sum over 0 items"])
def test_ignored_labels_leave_weights_untouched(reduction):
    """Their loss is NaN and their gradients are zeros, on which AdamW decays and keeps moving."""

    def ignored(net, ids):
        labels = torch.full_like(ids, -100).flatten()
        logits = net.head(net.embed(ids) + net.block(net.embed(ids))).flatten(0, 1)
        if reduction == "mean":
            return F.cross_entropy(logits, labels)
        return F.cross_entropy(logits, labels, reduction="sum") / torch.tensor(0)

    first, empty, last = batches(3)
    for mode in ("skip", "raise", "propagate"):
        ours, plain = pair()
        optimizer, reference = both(ours, plain, on_nonfinite=mode)
        for net, opt in ((ours, optimizer), (plain, reference)):
            net(first).backward()
            opt.step(), opt.zero_grad()
        before = copy.deepcopy((ours.state_dict(), optimizer.state_dict()["state"]))
        loss = ignored(ours, empty)
        assert loss.isnan()
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        after = ours.state_dict(), optimizer.state_dict()["state"]
        if mode == "propagate":  # as torch
            assert any(not torch.equal(v, after[0][k]) for k, v in before[0].items())
            ignored(plain, empty).backward()
            reference.step(), reference.zero_grad()
        else:
            torch.testing.assert_close(after, before, rtol=0, atol=0)
        # A micro-batch that counts makes the step count, and a gradient whose square underflows.
        for net, opt in ((ours, optimizer), (plain, reference)):
            net(last).backward()
            ignored(net, empty).backward()
            opt.step(), opt.zero_grad()
            (net(first) * 1e-30).backward()
            opt.step(), opt.zero_grad()
        assert_same(ours, plain, 3)
        counts = [{float(s["step"]) for s in opt.state.values()} for opt in (optimizer, reference)]
        assert counts[0] == counts[1]


def test_changes_that_need_the_elements_are_refused():
    ours, plain = pair()
    optimizer, _ = both(ours, plain)
    ours(batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match="clamp_.*'up.weight'.*clipping by value"):
        nn.utils.clip_grad_value_([ours.up.weight], 0.1)
    with pytest.raises(RuntimeError, match="more than one number"):
        ours.up.weight.grad.mul_(torch.ones(12))
    with pytest.raises(RuntimeError, match="_foreach_mul_.*'up.weight'"):
        torch._foreach_mul_([ours.norm.weight.grad, ours.up.weight.grad], 0.5)
    with pytest.raises(RuntimeError, match="mul.out.*'up.weight'"):
        torch.mul(ours.up.weight.grad, 2.0, out=ours.up.weight.grad)


def test_applied_gradients_are_not_silently_missing():
    ours, _ = pair()
    optimizer = ForgeAdamW(ours, lr=LR)
    ours(batches(1)[0]).backward()
    assert isinstance(ours.up.weight.grad, AppliedGradient)
    with pytest.raises(RuntimeError, match="applied inside backward.*update='step'"):
        nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="applied inside backward"):
        ours.norm.weight.grad.abs()
    optimizer.step()
    assert all(p.grad is None for p in ours.parameters())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(update="later"), "update='later': choose one of backward, step"),
        (dict(on_nonfinite="warn"), "on_nonfinite='warn'"),
        (dict(update="step", max_grad_norm=0.0), "max_grad_norm=0.0: must be positive"),
        (dict(max_grad_norm=1.0), "max_grad_norm= needs all gradients .* update='step'"),
        (dict(on_nonfinite="skip"), "on_nonfinite= needs all gradients .* update='step'"),
    ],
)
def test_settings_that_do_not_go_together(kwargs, message):
    net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=message):
        ForgeAdamW(net, **kwargs)
    ForgeAdamW(net)


def test_train_step_and_other_rules(device="cpu"):
    ours, plain = pair()
    optimizer = ForgeSGD(ours, lr=LR, momentum=0.9, update="step", max_grad_norm=0.3)
    reference = torch.optim.SGD(plain.parameters(), lr=LR, momentum=0.9)
    step = TrainStep(ours, optimizer)
    for ids in batches(4):
        step(ids=ids)
        plain(ids).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        reference.step(), reference.zero_grad()
    assert_same(ours, plain, 4)


@pytest.mark.gpu
def test_captured_clipping_follows_the_eager_one():
    ours, other = (net.cuda() for net in pair())
    kwargs = dict(lr=LR, update="step", max_grad_norm=0.3, path="tiles")
    steps = [
        TrainStep(ours, ForgeAdamW(ours, **kwargs)),
        TrainStep(other, ForgeAdamW(other, **kwargs), graph=False),
    ]
    for ids in batches(5):
        losses = [step(ids=ids.cuda()).item() for step in steps]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert_same(ours, other, 5)


def test_the_sign_of_an_applied_gradient_follows_the_parameter():
    net = nn.Linear(3, 3)
    optimizer = ForgeAdamW(net, lr=LR)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        net.to(dtype)
        net(torch.ones(2, 3, dtype=dtype)).sum().backward()
        assert net.weight.grad.dtype == dtype
        optimizer.step()
        assert net.weight.grad is None
