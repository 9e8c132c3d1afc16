"""Settings and states that users change, or that something around them changes."""

from __future__ import annotations

import copy
import sys
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import forge
from forge import ForgeAdamW, ForgeNAdam

LR = 1e-2
RULES = [name for name in forge.__all__ if name.startswith("Forge") and name != "ForgeOptimizer"]


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3))


def pair(build=ForgeAdamW, **kwargs):
    net = make_net()
    plain = copy.deepcopy(net)
    theirs = getattr(torch.optim, build.__name__.removeprefix("Forge"))
    return net, build(net, lr=LR, **kwargs), plain, theirs(plain.parameters(), lr=LR)


def train(net, optimizer, steps=1):
    for _ in range(steps):
        x = torch.linspace(-1, 1, 32, dtype=torch.float32).reshape(4, 8)
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(net, plain):
    for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert ((p - q).abs() > 0.05 * LR).float().mean() < 0.01, name


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(rule, dtype):
    def run(default):
        net = make_net()
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            optimizer = getattr(forge, rule)(net, lr=LR)
            train(net, optimizer, 3)
            saved = copy.deepcopy(optimizer.state_dict())
            train(net, optimizer)
            optimizer.load_state_dict(saved)
            train(net, optimizer, 2)
        finally:
            torch.set_default_dtype(before)
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    assert torch.equal(run(dtype), run(torch.float32))


@pytest.mark.parametrize("states", ["auto", "int8"])
def test_the_default_device_changes_nothing(device, states):
    def run(default):
        net = make_net().to(device)
        with torch.device(default):
            optimizer = ForgeAdamW(net, lr=LR, states=states)
            for _ in range(3):
                net(torch.ones(2, 8, device=device)).square().mean().backward()
                optimizer.step()
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    assert torch.equal(run("meta"), run("cpu"))


@pytest.mark.parametrize("build", [ForgeAdamW, ForgeNAdam])
@pytest.mark.parametrize("which", ["all", "one"])
def test_replaced_step_counts_are_followed(build, which):
    net, optimizer, plain, reference = pair(build)
    train(net, optimizer, 2), train(plain, reference, 2)
    for model, opt in ((net, optimizer), (plain, reference)):
        chosen = list(model.parameters())[: None if which == "all" else 1]
        for p in chosen:
            opt.state[p]["step"] = torch.tensor(500.0)
            if build is ForgeNAdam:
                opt.state[p]["mu_product"] = torch.tensor(0.25)
    train(net, optimizer, 2), train(plain, reference, 2)
    assert_same(net, plain)
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert optimizer.state[p]["step"] == reference.state[q]["step"]


def test_a_count_replaced_after_loading_and_of_a_parameter_left_out_of_the_step():
    net, optimizer, _, _ = pair()
    train(net, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.state[net[0].weight]["step"] = torch.tensor(10.0)
    train(net, optimizer)
    assert optimizer.state[net[0].weight]["step"] == 11
    net[0](torch.ones(1, 8)).sum().backward()
    optimizer.state[net[3].weight]["step"] = torch.tensor(30.0)
    optimizer.step()
    train(net, optimizer)
    assert optimizer.state[net[3].weight]["step"] == 31
    assert optimizer.state[net[0].weight]["step"] == 13


@pytest.mark.parametrize("name", ["step", "mu_product"])
def test_counts_written_in_place_are_refused(name):
    net, optimizer, plain, reference = pair(ForgeNAdam)
    train(net, optimizer)
    weight = net[0].weight
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.state[weight][name].fill_(0.5)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(RuntimeError, match=f"'0.weight': .*'{name}'.* written in place"):
        train(net, optimizer)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    optimizer.zero_grad()
    optimizer.load_state_dict(saved)  # the way out
    train(net, optimizer)
    assert optimizer.state[weight]["step"] == 2


@pytest.mark.parametrize("value", [torch.tensor(-1.0), None, torch.tensor([1.0, 2.0])])
def test_counts_that_are_none_are_refused(value):
    net, optimizer, _, _ = pair()
    train(net, optimizer)
    optimizer.state[net[0].bias]["step"] = value
    with pytest.raises(ValueError, match="'0.bias': .*'step' in it is .*must be a number"):
        optimizer.step()


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize(
    "states, name, change, message",
    [
        ("bf16", "exp_avg_sq", torch.Tensor.float, "all bfloat16 or all float32"),
        ("fp32", "exp_avg", torch.Tensor.half, "all bfloat16 or all float32"),
        ("fp32", "exp_avg", lambda t: t[:2, :2].clone(), "exp_avg has shape"),
        ("int8", "exp_avg_code", torch.Tensor.float, "codes must not be cast"),
        ("int8", "exp_avg_scale", lambda t: t[:2].clone(), "exp_avg_scale has shape"),
    ],
)
def test_states_that_no_kernel_can_update_are_refused(states, name, change, message, loaded):
    net, optimizer, _, _ = pair(states=states)
    train(net, optimizer)
    if loaded:
        optimizer.load_state_dict(optimizer.state_dict())
    state = optimizer.state[net[3].weight]
    good, state[name] = state[name], change(state[name])
    before = copy.deepcopy(net.state_dict())
    for _ in range(2):
        with pytest.raises(ValueError, match=f"'3.weight': .*{message}"):
            train(net, optimizer)
        optimizer.zero_grad()
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    state[name] = good
    train(net, optimizer)


def test_what_users_keep_in_a_state_is_left_alone():
    net, optimizer, _, _ = pair()
    train(net, optimizer)
    optimizer.state[net[0].weight]["mine"] = "note"
    train(net, optimizer, 2)
    assert optimizer.state_dict()["state"][0]["mine"] == "note"
    assert optimizer.state[net[0].weight]["step"] == 3


def test_a_weight_inside_and_outside_of_a_reentrant_checkpoint_names_the_way_out():
    net = nn.Linear(4, 4)
    optimizer = ForgeAdamW(net, lr=LR)
    inside = checkpoint(net, torch.ones(2, 4, requires_grad=True), use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        net(inside).sum().backward()
    optimizer.zero_grad()


def test_both_states_in_another_dtype_are_followed():
    net, optimizer, _, _ = pair(states="bf16")
    train(net, optimizer)
    for state in optimizer.state.values():
        state.update({k: state[k].float() for k in ("exp_avg", "exp_avg_sq")})
    train(net, optimizer)
    assert optimizer.state[net[0].weight]["exp_avg"].dtype == torch.float32


def test_zero_gradients_are_refused_before_anything_changes():
    net, optimizer, _, _ = pair()
    net(torch.ones(1, 8)).sum().backward()
    with pytest.raises(ValueError, match="set_to_none=False.*use zero_grad"):
        optimizer.zero_grad(set_to_none=False)
    optimizer.step()


def test_a_model_of_other_parameters_is_refused():
    net, other = make_net(), make_net()
    with pytest.raises(ValueError, match="model= has none of the parameters"):
        ForgeAdamW(net.parameters(), model=other)
    ForgeAdamW(net.parameters(), model=net)  # nothing was left attached


def test_backwards_in_several_threads_count_as_one_step():
    nets = nn.ModuleList(make_net() for _ in range(4))
    optimizer = ForgeAdamW(nets, lr=LR)
    before = [p.detach().clone() for p in nets.parameters()]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(60):
            threads = [
                threading.Thread(target=lambda net=net: net(torch.ones(2, 8)).sum().backward())
                for net in nets
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            optimizer.step()
            assert not optimizer._queue.queued()
    finally:
        sys.setswitchinterval(interval)
    assert {float(s["step"]) for s in optimizer.state.values()} == {60.0}
    assert not any(torch.equal(p, old) for p, old in zip(nets.parameters(), before, strict=True))


def test_loading_between_backward_and_step_is_refused():
    net, optimizer, _, _ = pair()
    train(net, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    net(torch.ones(1, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="between backward.* and step.*call step.* first"):
        optimizer.load_state_dict(saved)
    optimizer.step()
    assert optimizer.state[net[0].weight]["step"] == 2
    optimizer.load_state_dict(saved)
    assert optimizer.state[net[0].weight]["step"] == 1


@pytest.mark.parametrize(
    "error, message, kwargs",
    [
        (ValueError, "Invalid learning rate: -1.0", {"lr": torch.tensor(-1.0)}),
        (ValueError, "Tensor lr must be 1-element", {"lr": torch.ones(2)}),
        (TypeError, "lr='1e-3': must be a number", {"lr": "1e-3"}),
        (TypeError, "weight_decay=None: must be a number", {"weight_decay": None}),
        (ValueError, "must be two numbers", {"betas": (0.9,)}),
        (ValueError, "must be two numbers", {"betas": (0.9, 0.99, 0.999)}),
        (ValueError, "must be two numbers", {"betas": 0.9}),
        (TypeError, "seed=1.5: must be an integer", {"seed": 1.5}),
    ],
)
def test_settings_that_are_wrong(error, message, kwargs):
    net = make_net()
    with pytest.raises(error, match=message):
        ForgeAdamW(net, **kwargs)
    if "seed" not in kwargs:
        with pytest.raises(error, match=message):
            ForgeAdamW([{"params": list(net.parameters()), **kwargs}], model=net)
    assert type(net[0]) is nn.Linear


def test_settings_of_groups_that_torch_alone_understands():
    net, plain = make_net(), make_net()
    choices = {"foreach": True, "fused": None, "capturable": False}
    optimizer = ForgeAdamW([{"params": list(net.parameters()), **choices}], model=net, lr=LR)
    reference = torch.optim.AdamW([{"params": list(plain.parameters()), **choices}], lr=LR)
    train(net, optimizer, 2), train(plain, reference, 2)
    assert_same(net, plain)
    for key in ("maximize", "differentiable", "amsgrad"):
        with pytest.raises(ValueError, match=f"param group 0: {key}=True"):
            ForgeAdamW([{"params": list(make_net().parameters()), key: True}])
        optimizer.param_groups[0][key] = True
        with pytest.raises(ValueError, match=f"param group 0: {key}=True"):
            train(net, optimizer)
        optimizer.zero_grad()
        optimizer.param_groups[0][key] = False
    train(net, optimizer), train(plain, reference)
    assert_same(net, plain)


@pytest.mark.parametrize("first, second", [(True, False), (False, True), (True, True)])
def test_groups_with_and_without_names_can_be_added(first, second):
    net, extra = make_net(), nn.Linear(3, 3)
    optimizer = ForgeAdamW(net if first else net.parameters(), lr=LR)
    params = extra.named_parameters() if second else extra.parameters()
    optimizer.add_param_group({"params": params, "lr": 2 * LR})
    optimizer.add_param_group({"params": nn.Parameter(torch.ones(3))})
    before = extra.weight.detach().clone()
    extra(net(torch.ones(1, 8))).sum().backward()
    optimizer.step()
    assert not torch.equal(extra.weight, before) and extra.weight.grad is None
    with pytest.raises(RuntimeError, match="'bias'" if second else "'group1.1'|'parameter 1"):
        extra.bias.sum().backward()
        extra.bias.sum().backward()


def test_what_a_failed_backward_left_queued_names_the_way_out():
    net, optimizer, _, _ = pair()
    before = copy.deepcopy(net.state_dict())
    h = net[0](torch.ones(1, 8))
    h.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        net[1:](h).sum().backward()
    net.zero_grad()
    with pytest.raises(RuntimeError, match="did not finish.*'3.*queued.*optimizer.zero_grad"):
        net(torch.ones(1, 8)).sum().backward()
    optimizer.zero_grad()
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    train(net, optimizer)


def test_gradscaler_is_refused_and_a_disabled_one_is_not():
    net, optimizer, _, _ = pair()
    for enabled in (False, True):
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        scaler.scale(net(torch.ones(1, 8)).sum()).backward()
        if enabled:
            with pytest.raises(NotImplementedError, match="GradScaler: .*bfloat16"):
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
            scaler.update()


def test_parameters_that_cannot_be_trained_are_named():
    with torch.inference_mode():
        net = make_net()
    with pytest.raises(ValueError, match="'0.weight' was made under inference_mode"):
        ForgeAdamW(net)
    with pytest.raises(ValueError, match="'weight' has no shape yet"):
        ForgeAdamW(nn.LazyLinear(3))
