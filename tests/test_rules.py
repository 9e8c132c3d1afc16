"""Every update rule: against its torch twin, the fp64 truth, and numbers worked out by hand."""

from __future__ import annotations

import copy
import inspect
import io

import pytest
import torch
from torch import nn

import forge
from forge.kernels.apply_rule import apply_rule
from forge.kernels.target import Target
from forge.kernels.wgrad_update import wgrad_update
from forge.optim import rules
from forge.optim.clock import Clock, hyper_value

SMALL = dict(BLOCK_M=16, BLOCK_N=32, BLOCK_K=16, GROUP=2, num_warps=4, num_stages=2)


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 2302.06675, line by line. torch has none."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].get("exp_avg", torch.zeros_like(p))
                c = beta1 * m + (1 - beta1) * p.grad
                p.copy_(p - lr * (c.sign() + decay * p))
                self.state[p]["exp_avg"] = beta2 * m + (1 - beta2) * p.grad


T = torch.optim
CASES = {
    "adamw": (forge.ForgeAdamW, T.AdamW, dict(lr=0.01, weight_decay=0.1, betas=(0.8, 0.9))),
    "adam": (forge.ForgeAdam, T.Adam, dict(lr=0.01, weight_decay=0.1, eps=1e-3)),
    "nadam": (forge.ForgeNAdam, T.NAdam, dict(lr=0.01, weight_decay=0.1)),
    "nadam decoupled": (
        forge.ForgeNAdam,
        T.NAdam,
        dict(lr=0.01, weight_decay=0.1, momentum_decay=0.3, decoupled_weight_decay=True),
    ),
    # The variance is rectified from the 6th step on.
    "radam": (forge.ForgeRAdam, T.RAdam, dict(lr=0.03, weight_decay=0.1)),
    "radam decoupled": (
        forge.ForgeRAdam,
        T.RAdam,
        dict(lr=0.01, weight_decay=0.1, betas=(0.8, 0.9), decoupled_weight_decay=True),
    ),
    # Not 0.8: a bf16 gradient of -4 times the momentum would cancel it, and 0 has no sign.
    "lion": (forge.ForgeLion, Lion, dict(lr=0.01, weight_decay=0.1, betas=(0.83, 0.9))),
    "sgd": (forge.ForgeSGD, T.SGD, dict(lr=0.1, weight_decay=0.1)),
    "sgd momentum": (
        forge.ForgeSGD,
        T.SGD,
        dict(lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    ),
    "sgd nesterov": (forge.ForgeSGD, T.SGD, dict(lr=0.05, momentum=0.8, nesterov=True)),
    "rmsprop": (forge.ForgeRMSprop, T.RMSprop, dict(lr=0.01, alpha=0.9, weight_decay=0.1)),
    "adagrad": (
        forge.ForgeAdagrad,
        T.Adagrad,
        dict(lr=0.1, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.2),
    ),
}
each_case = pytest.mark.parametrize("case", CASES)


def build_net(device="cpu"):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)).to(device)


def train(net, optimizer, x):
    net(x).sub(1).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_same(ours, plain):
    """fp32 accuracy: the weights are about 1 and have moved by 0.03 to 1."""
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-6)


def example(case):
    """The case's rule and a complete param group."""
    ours, _, kwargs = CASES[case]
    optimizer = ours(nn.Linear(1, 1), **kwargs)
    return optimizer.rule, optimizer.param_groups[0]


def test_no_rule_is_left_out():
    written = {r.name for r in vars(rules).values() if isinstance(r, rules.Rule)}
    assert written == {example(case)[0].name for case in CASES}
    classes = {name for name in vars(forge.optimizers) if name.startswith("Forge")}
    assert classes <= set(forge.__all__)
    assert classes - {"ForgeOptimizer"} == {ours.__name__ for ours, _, _ in CASES.values()}


@each_case
def test_follows_its_twin_through_save_and_reload(device, case):
    make, make_twin, kwargs = CASES[case]
    ours, plain, start = (build_net(device) for _ in range(3))
    optimizer, twin = make(ours, **kwargs), make_twin(plain.parameters(), **kwargs)
    for step in range(20):
        x = torch.randn(7, 6, device=device)
        train(ours, optimizer, x), train(plain, twin, x)
        if step == 9:
            buffer = io.BytesIO()
            torch.save(optimizer.state_dict(), buffer)
            buffer.seek(0)
            optimizer.release()
            optimizer = make(ours, **{**kwargs, "lr": 1.0})
            optimizer.load_state_dict(torch.load(buffer, weights_only=True))
    assert_same(ours, plain)
    for p, q in zip(plain.parameters(), start.parameters(), strict=True):
        assert (p - q).abs().max() > 0.02
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert optimizer.state[p]["step"] == 20
        for key, value in twin.state.get(q, {}).items():
            torch.testing.assert_close(
                optimizer.state[p][key].cpu().float(), value.cpu(), rtol=1e-4, atol=1e-6
            )


@each_case
def test_loads_its_twin_and_is_loaded_by_it(case):
    make, make_twin, kwargs = CASES[case]
    ours, plain = build_net(), build_net()
    twin = make_twin(plain.parameters(), **kwargs)
    batches = torch.randn(6, 7, 6)
    for x in batches[:2]:
        train(plain, twin, x)
    ours.load_state_dict(plain.state_dict())
    optimizer = make(ours, **{**kwargs, "lr": 1.0})
    optimizer.load_state_dict(copy.deepcopy(twin.state_dict()))
    for x in batches[2:4]:
        train(ours, optimizer, x), train(plain, twin, x)
    assert_same(ours, plain)
    back = make_twin(plain.parameters(), lr=1.0)
    back.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for x in batches[4:]:
        train(ours, optimizer, x), train(plain, back, x)
    assert_same(ours, plain)


@each_case
def test_layers_left_out_of_a_step_follow_the_twin(case):
    make, make_twin, kwargs = CASES[case]
    torch.manual_seed(3)
    ours = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    plain = copy.deepcopy(ours)
    optimizer, twin = make(ours, **kwargs), make_twin(plain.parameters(), **kwargs)
    for used in ([0, 1], [0], [0, 2], [1], [0, 1, 2], [2], [0, 1, 2]):
        x = torch.randn(3, 4)
        for layers, opt in ((ours, optimizer), (plain, twin)):
            h = x
            for i in used:
                h = torch.tanh(layers[i](h))
            h.sub(2).square().sum().backward()
            opt.step()
            opt.zero_grad()
    assert_same(ours, plain)


def truth(rule, group, step, carried):
    """The rule's values at ``step`` in fp64."""
    hyper = [hyper_value(group, name) for name in rule.hyper] + carried
    tensors = [torch.tensor(float(v), dtype=torch.float64) for v in (step, *hyper)]
    return rule.scalars.torch(tensors[0], tuple(tensors[1:]))


@each_case
@pytest.mark.parametrize("start", [0, 1, 5, 9_999])
def test_scalars_follow_the_truth(device, case, start):
    rule, group = example(case)
    carried = [0.3] * len(rule.carried)
    clock = Clock(rule, group, device, seed=0, step=start, carried=carried)
    clock.begin()
    want = truth(rule, group, start + 1, carried)
    assert len(want) == rule.scalar_count + len(rule.carried)
    got = torch.cat([clock.scalars.double(), *(clock.counts()[k][None] for k in rule.carried)])
    torch.testing.assert_close(got.cpu(), torch.stack(want).double(), rtol=2e-7, atol=0)
    behind = clock.behind().counts()
    assert behind["step"] == start and all(behind[name] == 0.3 for name in rule.carried)


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["apply_rule", "wgrad_update"])
def test_kernels_follow_the_truth(device, case, dtype, kernel):
    rule, group = example(case)
    exact = truth(rule, group, 3, [0.3] * len(rule.carried))[: rule.scalar_count]
    scalars = torch.stack(exact).float().to(device)
    w, *states = [
        t.to(device, dtype) for t in (torch.randn(33, 17), *torch.rand(len(rule.states), 33, 17))
    ]
    target = Target(w, states, salt=5)
    dy, x = (torch.randn(9, n).to(device, dtype) for n in (33, 17))
    grad = dy.double().t() @ x.double()
    before = [t.double().cpu() for t in (w, *states)]
    seed = torch.tensor(7, dtype=torch.int32, device=device)
    if kernel == "apply_rule":
        grad = grad.to(dtype)
        apply_rule([grad], [target], scalars, seed, rule.update)
    else:
        wgrad_update([dy], [x], [target], scalars, seed, rule.update, tile=SMALL)
    want, new_states = rule.update.torch(
        before[0], grad.double().cpu(), tuple(before[1:]), tuple(exact)
    )
    # Stochastic rounding goes to one of the two neighbours: at most 2^-7 away.
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (2**-7, 1e-6)
    for got, value in zip((w, *states), (want, *new_states), strict=True):
        torch.testing.assert_close(got.double().cpu(), value, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "make, kwargs, want",
    [
        (forge.ForgeAdamW, dict(weight_decay=0.1, eps=1.0), 0.5 - 0.005 - 0.1 * 2 / (2 + 1)),
        (forge.ForgeAdam, dict(weight_decay=0.1, eps=1.0), 0.5 - 0.1 * 2.05 / (2.05 + 1)),
        (
            forge.ForgeNAdam,  # mu = 0.26, then 0.2696; exp_avg = 1
            dict(betas=(0.5, 0.75), eps=1.0, momentum_decay=1.0),
            0.5 - 0.1 * 2 / 3 - 0.1 * 0.2696 / (1 - 0.26 * 0.2696) / 3,
        ),
        (forge.ForgeRAdam, dict(weight_decay=0.1), 0.5 - 0.1 * 2.05),
        (forge.ForgeLion, dict(weight_decay=0.1), 0.5 - 0.1 * (1 + 0.05)),
        (forge.ForgeSGD, dict(weight_decay=0.1), 0.5 - 0.1 * 2.05),
        (forge.ForgeSGD, dict(momentum=0.9, dampening=0.5), 0.5 - 0.1 * 2),
        (forge.ForgeSGD, dict(momentum=0.9, nesterov=True), 0.5 - 0.1 * (2 + 0.9 * 2)),
        (forge.ForgeRMSprop, dict(alpha=0.75, eps=1.0), 0.5 - 0.1 * 2 / (1 + 1)),
        (forge.ForgeAdagrad, dict(initial_accumulator_value=5.0), 0.5 - 0.1 * 2 / 3),
    ],
)
def test_one_step_by_hand(device, make, kwargs, want):
    """Weight 0.5, gradient 2, learning rate 0.1."""
    net = nn.Linear(1, 1, bias=False, device=device)
    nn.init.constant_(net.weight, 0.5)
    optimizer = make(net, lr=0.1, **kwargs)
    net(torch.full((1, 1), 2.0, device=device)).sum().backward()
    optimizer.step()
    assert net.weight.item() == pytest.approx(want, rel=1e-6)


def test_rectified_step_of_radam_by_hand():
    """beta2 = 3/4: the longest average is 7; at step 8 it is 5.22, enough for the variance."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 0.5)
    optimizer = forge.ForgeRAdam(net, lr=0.1, betas=(0.5, 0.75), eps=1.0)
    zero = torch.zeros(1, 1)
    state = {"step": torch.tensor(7.0), "exp_avg": zero, "exp_avg_sq": zero}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": {0: state}, "param_groups": groups})
    net(torch.full((1, 1), 2.0)).sum().backward()  # exp_avg = 1, exp_avg_sq = 1
    bias1, bias2 = 255 / 256, 1 - 6561 / 65536
    length = 7 - 16 * (6561 / 65536) / bias2
    assert length == pytest.approx(5.22, abs=1e-3)
    rectifier = ((length - 4) * (length - 2) * 7 / (3 * 5 * length)) ** 0.5
    want = 0.5 - 0.1 / bias1 * rectifier * bias2**0.5 / (1 + 1)
    assert net.weight.item() == pytest.approx(want, rel=1e-6)


UNIQUE = {make: make_twin for make, make_twin, _ in CASES.values()}
each_class = pytest.mark.parametrize("make, make_twin", UNIQUE.items(), ids=lambda c: c.__name__)


def hyper_names(make):
    names = inspect.signature(make).parameters
    return {n: p.default for n, p in names.items() if n not in ("params", "options")}


@each_class
def test_constructor_is_the_twins(make, make_twin):
    mine, theirs = hyper_names(make), hyper_names(make_twin)
    assert list(theirs.items())[: len(mine)] == list(mine.items())
    net = nn.Linear(2, 2)
    for name in [*theirs, "nonsense"][len(mine) :]:
        with pytest.raises(TypeError, match=name):
            make(net, **{name: True})
    assert type(net) is nn.Linear


@each_class
def test_bad_hyperparameters_raise_in_torchs_words(make, make_twin):
    names = hyper_names(make).keys() - {"betas", "dampening", "nesterov", "decoupled_weight_decay"}
    bad = [("lr", torch.ones(2)), *((name, -0.5) for name in sorted(names))]
    if "betas" in hyper_names(make):
        bad += [("betas", (1.0, 0.9)), ("betas", (0.9, -0.5))]
    for name, value in bad:
        net = nn.Linear(2, 2)
        with pytest.raises(ValueError) as ours:
            make(net, **{name: value})
        if make_twin is not Lion:
            with pytest.raises(ValueError) as theirs:
                make_twin(net.parameters(), **{name: value})
            assert str(ours.value) == str(theirs.value)
        with pytest.raises(ValueError, match="Invalid|Tensor lr"):
            make([{"params": net.parameters(), name: value}])
        assert type(net) is nn.Linear


@pytest.mark.parametrize("kwargs", [dict(), dict(momentum=0.9, dampening=0.1)])
def test_nesterov_needs_momentum_without_dampening(kwargs):
    with pytest.raises(ValueError, match="Nesterov momentum requires a momentum and zero damp"):
        forge.ForgeSGD(nn.Linear(2, 2), nesterov=True, **kwargs)


@pytest.mark.parametrize(
    "make, make_twin, setting",
    [
        (forge.ForgeAdamW, T.AdamW, dict(amsgrad=True)),
        (forge.ForgeAdamW, T.Adam, dict(decoupled_weight_decay=False)),
        (forge.ForgeAdam, T.Adam, dict(decoupled_weight_decay=True)),
        (forge.ForgeNAdam, T.NAdam, dict(maximize=True)),
        (forge.ForgeRMSprop, T.RMSprop, dict(centered=True)),
        (forge.ForgeRMSprop, T.RMSprop, dict(momentum=0.5)),
        (forge.ForgeSGD, T.SGD, dict(momentum=0.5)),
    ],
)
def test_settings_that_the_rule_does_not_follow_are_refused(make, make_twin, setting):
    (name,) = setting
    net = nn.Linear(2, 2)
    foreign = make_twin(net.parameters(), lr=0.5, **setting).state_dict()
    with pytest.raises(ValueError, match=f"param group 0: {name}="):
        make([{"params": net.parameters(), **setting}])
    optimizer = make(net, lr=0.25)
    with pytest.raises(ValueError, match=f"param group 0: {name}=.*{make.__name__} was built"):
        optimizer.load_state_dict(foreign)
    assert optimizer.param_groups[0]["lr"] == 0.25
    make_twin(net.parameters()).load_state_dict(optimizer.state_dict())


def test_momentum_of_a_schedule_and_of_a_group_follow_torch():
    ours, plain = build_net(), build_net()

    def groups(net):
        first, *others = net.parameters()
        return [{"params": [first], "momentum": 0}, {"params": others}]

    kwargs = dict(lr=0.1, momentum=0.9, dampening=0.5)
    optimizer = forge.ForgeSGD(groups(ours), model=ours, **kwargs)
    twin = T.SGD(groups(plain), **kwargs)
    for _ in range(4):
        x = torch.randn(7, 6)
        train(ours, optimizer, x), train(plain, twin, x)
    schedules = [
        T.lr_scheduler.OneCycleLR(opt, max_lr=0.2, total_steps=6) for opt in (optimizer, twin)
    ]
    for group in (*optimizer.param_groups[:1], *twin.param_groups[:1]):
        group["momentum"] = 0
    for _ in range(4):
        x = torch.randn(7, 6)
        train(ours, optimizer, x), train(plain, twin, x)
        for schedule, opt in zip(schedules, (optimizer, twin), strict=True):
            schedule.step()
            opt.param_groups[0]["momentum"] = 0
    assert_same(ours, plain)
    plain_sgd = forge.ForgeSGD(build_net(), lr=0.1)
    with pytest.raises(ValueError, match="momentum"):
        T.lr_scheduler.OneCycleLR(plain_sgd, max_lr=0.2, total_steps=6)


def test_states_without_a_step_count():
    """What a rule cannot do without is missed; what torch's SGD never saves is not."""
    net = build_net()
    adamw = forge.ForgeAdamW(net)
    zero = torch.zeros_like(net[0].weight)
    groups = adamw.state_dict()["param_groups"]
    state = {0: {"exp_avg": zero, "exp_avg_sq": zero}}
    with pytest.raises(KeyError, match="'0.weight'.*'step', which adamw needs"):
        adamw.load_state_dict({"state": state, "param_groups": groups})
    adamw.release()
    sgd = forge.ForgeSGD(net, momentum=0.5)
    groups = sgd.state_dict()["param_groups"]
    state = {0: {"momentum_buffer": zero}, 1: {"momentum_buffer": None}}
    sgd.load_state_dict({"state": state, "param_groups": groups})
    assert sgd.state[net[0].weight]["step"] == 1
    assert net[0].bias not in sgd.state


def test_adagrad_of_torch_saved_before_the_first_step():
    ours, plain = build_net(), build_net()
    kwargs = dict(lr=0.1, initial_accumulator_value=0.5)
    twin = T.Adagrad(plain.parameters(), **kwargs)
    optimizer = forge.ForgeAdagrad(ours)
    optimizer.load_state_dict(copy.deepcopy(twin.state_dict()))
    for _ in range(3):
        x = torch.randn(7, 6)
        train(ours, optimizer, x), train(plain, twin, x)
    assert_same(ours, plain)


KEEP_NOTHING = [
    (forge.ForgeAdamW, torch.optim.AdamW, dict(betas=(0.0, 0.0))),
    (forge.ForgeAdamW, torch.optim.AdamW, dict(betas=(0.9, 0.0))),
    (forge.ForgeAdamW, torch.optim.AdamW, dict(betas=(0.0, 0.999))),
    (forge.ForgeAdam, torch.optim.Adam, dict(betas=(0.9, 0.0))),
    (forge.ForgeNAdam, torch.optim.NAdam, dict(betas=(0.9, 0.0))),
    (forge.ForgeRMSprop, torch.optim.RMSprop, dict(alpha=0.0)),
]


@pytest.mark.parametrize(
    "make, make_twin, kwargs, states",
    [(*case, "fp32") for case in KEEP_NOTHING]
    # What these two read of their states is zero, in any format.
    + [(*case, "int8") for case in (KEEP_NOTHING[0], KEEP_NOTHING[-1])],
)
def test_averages_that_keep_nothing_follow_torch(device, make, make_twin, kwargs, states):
    """A small gradient after a large one: the rounding of what the large one left is larger."""
    ours, plain = (nn.Parameter(torch.ones(4, 130, device=device)) for _ in range(2))
    optimizer = make([ours], lr=1e-2, states=states, **kwargs)
    reference = make_twin([plain], lr=1e-2, **kwargs)
    for scale in (1.0, 1e-6, 1e-3):
        gradient = scale * (1 + torch.rand(4, 130, device=device))
        for param, opt in ((ours, optimizer), (plain, reference)):
            param.grad = gradient.clone()
            opt.step()
            opt.zero_grad()
        torch.testing.assert_close(ours, plain, rtol=2e-5, atol=2e-6)
