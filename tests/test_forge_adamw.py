"""ForgeAdamW against torch.optim.AdamW on a plain copy of the same model."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from adamw_net import LR, assert_same, batch, pair, train
from forge import ForgeAdamW
from forge.kernels import runtime
from forge.linear import ForgeLinear


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("checkpointed", [None, False])
def test_follows_torch_through_save_and_reload(device, tied, checkpointed):
    ours, plain = pair(device, tied=tied, checkpointed=checkpointed)
    optimizer = ForgeAdamW(ours, lr=LR, weight_decay=0.1)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=0.1)
    for step in range(12):
        ids = batch(device, (1 + step % 3, 5 + step))
        loss, want = train(ours, optimizer, ids), train(plain, reference, ids)
        assert abs(loss - want) < 1e-4
        if step == 5:
            buffer = io.BytesIO()
            torch.save(optimizer.state_dict(), buffer)
            buffer.seek(0)
            optimizer.release()
            optimizer = ForgeAdamW(ours, lr=1.0)  # every setting comes from the checkpoint
            optimizer.load_state_dict(torch.load(buffer, weights_only=True))
    assert_same(ours, plain, 12)
    assert all(p.grad is None for p in ours.parameters())


class _NewTensors(TorchDispatchMode):
    """Records the shapes of tensors that torch operations return, views of ``known`` left out."""

    def __init__(self, known):
        super().__init__()
        self.known = {t.untyped_storage().data_ptr() for t in known}
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in self.known:
                self.shapes.add(tuple(t.shape))
        return out


def test_no_weight_gradient_is_ever_formed(device):
    if not runtime.runs_triton(torch.empty(0, device=device)):
        pytest.skip("the torch reference forms it")
    net = nn.Sequential(nn.Linear(11, 13, bias=False), nn.Tanh(), nn.Linear(13, 17)).to(device)
    optimizer = ForgeAdamW(net, lr=LR)
    x = torch.randn(5, 11, device=device, requires_grad=True)
    net(x).square().mean().backward()  # creates the states, which have the weights' shape
    optimizer.step()
    loss = net(x).square().mean()
    states = [t for state in optimizer.state.values() for t in state.values()]
    with _NewTensors([*net.parameters(), *states]) as new:
        loss.backward()
        optimizer.step()
    assert not new.shapes & {(13, 11), (11, 13), (17, 13), (13, 17)}
    assert (17,) in new.shapes, "the bias gradient is formed: the recorder works"


def test_weight_used_outside_its_layer(device):
    ours, plain = pair(device, tied=False)
    optimizer = ForgeAdamW(ours, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    ids = batch(device)
    for net, opt in ((ours, optimizer), (plain, reference)):
        (
            net(ids) + F.linear(torch.ones(2, 40, device=device), net.mix.weight).square().mean()
        ).backward()
        opt.step()
        opt.zero_grad()
    assert_same(ours, plain)


def test_groups_schedulers_and_tensor_lr_follow_torch():
    ours, plain = pair("cpu")

    def groups(net):
        vectors = [p for p in net.parameters() if p.dim() < 2]
        matrices = [p for p in net.parameters() if p.dim() >= 2]
        return [
            {"params": matrices, "weight_decay": 0.3, "betas": (0.8, 0.95)},
            {"params": vectors, "weight_decay": 0.0, "lr": torch.tensor(LR / 2), "eps": 1e-6},
        ]

    optimizer = ForgeAdamW(groups(ours), lr=LR, model=ours)
    reference = torch.optim.AdamW(groups(plain), lr=LR)
    assert sum(type(m) is ForgeLinear for m in ours.modules()) == 4
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 1 / (1 + t))
        for opt in (optimizer, reference)
    ]
    for _ in range(6):
        ids = batch("cpu")
        train(ours, optimizer, ids), train(plain, reference, ids)
        for schedule in schedules:
            schedule.step()
    assert_same(ours, plain, 6)


def test_add_param_group_and_parameters_without_model():
    ours, plain = pair("cpu")
    first = list(ours.parameters())[:4]
    optimizer = ForgeAdamW(first, lr=LR)
    reference = torch.optim.AdamW(list(plain.parameters())[:4], lr=LR)
    assert not any(type(m) is ForgeLinear for m in ours.modules())
    ids = batch("cpu")
    train(ours, optimizer, ids), train(plain, reference, ids)
    for net, opt in ((ours, optimizer), (plain, reference)):
        net.zero_grad()
        opt.add_param_group({"params": list(net.parameters())[4:], "lr": LR / 3})
    for _ in range(3):
        train(ours, optimizer, ids), train(plain, reference, ids)
    assert_same(ours, plain, 4)


def test_closure_and_gradients_assigned_by_hand():
    ours, plain = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    ids = batch("cpu")
    for net, opt in ((ours, optimizer), (plain, reference)):

        def closure(net=net, opt=opt):
            opt.zero_grad()
            loss = net(ids)
            loss.backward()
            return loss

        assert opt.step(closure).item() > 0
        for p in net.parameters():
            p.grad = torch.full_like(p, 0.01)
        opt.step()
        opt.zero_grad()
    assert_same(ours, plain, 2)


def test_autocast_trains_fp32_weights_as_torch_does():
    ours, plain = pair("cpu", tied=False)
    optimizer = ForgeAdamW(ours, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    for _ in range(3):
        ids = batch("cpu")
        for net, opt in ((ours, optimizer), (plain, reference)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = net(ids)
            loss.backward()
            opt.step()
            opt.zero_grad()
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        # torch rounds the weight gradient to bf16 on the way; Adam's first steps are +-lr.
        assert (p - q).abs().mean() < 0.05 * LR and p.dtype == torch.float32


def test_same_seed_same_bits_other_seed_other_bits():
    def run(seed):
        ours, _ = pair("cpu")
        ours.to(torch.bfloat16)
        optimizer = ForgeAdamW(ours, lr=LR, seed=seed)
        torch.manual_seed(5)
        for _ in range(3):
            train(ours, optimizer, batch("cpu"))
        return torch.cat([p.detach().flatten() for p in ours.parameters()])

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))


@pytest.mark.parametrize("rounding, follows", [("stochastic", True), ("nearest", False)])
def test_tiny_updates_survive_in_bf16_only_with_stochastic_rounding(rounding, follows):
    torch.manual_seed(0)
    net = nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    nn.init.constant_(net.weight, 1.0)  # half a unit in the last place: 2^-9
    optimizer = ForgeAdamW(net, lr=1e-5, weight_decay=0.0, rounding=rounding)
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    for _ in range(100):
        net(x).sum().backward()
        optimizer.step()
    drift = (1.0 - net.weight.double()).mean().item()
    if follows:
        assert abs(drift / (100 * 1e-5) - 1) < 0.05  # fp32 drifts by lr a step
    else:
        assert drift == 0.0


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"lr": -1.0}, "Invalid learning rate"),
        ({"eps": -1.0}, "Invalid epsilon"),
        ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0"),
        ({"weight_decay": -0.1}, "Invalid weight_decay"),
        ({"states": "int4"}, "states='int4': choose one of auto, bf16, fp32"),
        ({"rounding": "up"}, "rounding='up': choose one of stochastic, nearest"),
        ({"seed": 2**40}, "seed"),
        ({"model": nn.Linear(1, 1)}, "model="),
    ],
)
def test_bad_arguments(kwargs, message):
    net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=message):
        ForgeAdamW(net, **kwargs)
    assert type(net) is nn.Linear


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"lr": "1e-3"}, "lr='1e-3': must be a number"),
        ({"betas": (0.9, None)}, r"betas\[1\]=None: must be a number"),
        ({"update": "step", "max_grad_norm": "1"}, "max_grad_norm='1': must be a number"),
    ],
)
def test_arguments_that_are_no_numbers(kwargs, message):
    with pytest.raises(TypeError, match=message):
        ForgeAdamW(nn.Linear(2, 2), **kwargs)


def test_settings_of_the_whole_optimizer_are_not_ignored_in_a_group():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    group = {"params": net[1].parameters(), "states": "int8"}
    with pytest.raises(ValueError, match="param group 1: states= is one setting of the whole"):
        ForgeAdamW([{"params": net[0].parameters()}, group])
    optimizer = ForgeAdamW(net[0])
    with pytest.raises(ValueError, match="param group 1: update= is one setting of the whole"):
        optimizer.add_param_group({"params": net[1].parameters(), "update": "step"})
    assert len(optimizer.param_groups) == 1


def test_unsupported_parameters_are_named_before_anything_changes():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    with pytest.raises(TypeError, match="'1.weight' is torch.float16"):
        ForgeAdamW(net)
    assert all(type(m) is nn.Linear for m in net)
    ForgeAdamW(net[0])  # the first layer was not left half-registered
    sparse = nn.Embedding(5, 3, sparse=True)
    optimizer = ForgeAdamW(sparse)
    with pytest.raises(RuntimeError, match="sparse"):
        sparse(torch.tensor([1])).sum().backward()
    del optimizer


@pytest.mark.parametrize(
    "kwargs", [{"lr": 0.0}, {"betas": (0.0, 0.0)}, {"betas": (0.0, 0.999)}, {"eps": 0.0}]
)
def test_extreme_hyperparameters_follow_torch(kwargs):
    ours, plain = pair("cpu")
    kwargs = {"lr": LR, **kwargs}
    optimizer = ForgeAdamW(ours, **kwargs)
    reference = torch.optim.AdamW(plain.parameters(), **kwargs)
    ids = torch.arange(53).reshape(1, -1)  # every row gets a gradient: 0 / 0 otherwise
    train(ours, optimizer, ids), train(plain, reference, ids)
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        # g / |g| turns round-off in a tiny gradient into a flipped sign, so not every element.
        assert ((p - q).abs() > 1e-3 * LR).float().mean() < 0.01


def test_late_hyperparameters_and_edited_groups_raise():
    ours, _ = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    ours(batch("cpu")).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match="changed between backward"):
        optimizer.step()
    train(ours, optimizer, batch("cpu"))  # usable, with the new rate
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(RuntimeError, match="param_groups was edited"):
        optimizer.step()


@pytest.mark.gpu
def test_steps_neither_synchronise_nor_recompile():
    from forge.kernels.wgrad_update import _wgrad_update_kernel

    ours, _ = pair("cuda", tied=False)
    optimizer = ForgeAdamW(ours, lr=LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    batches = [batch("cuda", (2, 3 + i % 5)) for i in range(20)]
    for i, ids in enumerate(batches):
        if i == 4:
            torch.cuda.synchronize()
            compiled = len(_wgrad_update_kernel.device_caches[0][0])
            torch.cuda.set_sync_debug_mode("error")
        ours(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    torch.cuda.set_sync_debug_mode("default")
    assert len(_wgrad_update_kernel.device_caches[0][0]) == compiled


@pytest.mark.gpu
def test_side_stream():
    """The factors belong to the stream of the forward pass, not to that of the constructor."""
    ours, plain = pair("cuda", tied=False)
    optimizer = ForgeAdamW(ours, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        ids = batch("cuda", (64, 64))
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(10_000_000)
            train(ours, optimizer, ids)
        torch.cuda.current_stream().wait_stream(side)
        train(plain, reference, ids)
    assert_same(ours, plain, 5)
