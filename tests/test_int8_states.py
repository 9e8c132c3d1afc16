"""States in 8 bits: the codes, the kernels that use them, and training with them."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from forge import ForgeAdagrad, ForgeAdamW, ForgeLion, ForgeSGD
from forge.kernels.apply_rule import apply_rule, apply_rule_reference
from forge.kernels.block_code import decode_reference, encode_reference, scale_shape
from forge.kernels.runtime import runs_triton
from forge.kernels.target import BLOCK, CAPACITY, Target
from forge.kernels.wgrad_update import wgrad_update, wgrad_update_reference
from forge.optim import rules
from forge.optim.states import new_states

TILE = dict(BLOCK_M=16, BLOCK_N=32, BLOCK_K=BLOCK, GROUP=2, num_warps=4, num_stages=2)
HYPER = {
    **{"lr": 1e-2, "betas.0": 0.8, "betas.1": 0.99, "alpha": 0.9, "eps": 1e-8, "momentum": 0.9},
    **{"weight_decay": 0.1, "momentum_decay": 4e-3, "initial_accumulator_value": 0.1},
}
RULES = [r for r in vars(rules).values() if isinstance(r, rules.Rule) and r.states]
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
each_code = pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=["signed", "unsigned"])
WIDTHS = [(33, 1), (5, 127), (3, 128), (4, 129), (2, 200), (7, 384)]


def encoded(x, dtype, random=None):
    codes = torch.full_like(x, 99, dtype=dtype)
    scales = torch.full(scale_shape(codes), 99, dtype=torch.uint8)
    encode_reference(x, codes, scales, random)
    return codes, scales


def round_trip(x, dtype, random=None):
    return decode_reference(*encoded(x, dtype, random))


def steps_apart(x, scales, dtype):
    """The distance of neighbouring codes around ``x``: an eighth of its value, at most."""
    per_value = scales.double().repeat_interleave(BLOCK, dim=1)[:, : x.shape[1]]
    smallest = 2.0 ** (per_value - 127 - (15 if dtype == torch.int8 else 31))
    return (x.double().abs() + smallest) / 8


def random_bits(shape):
    return torch.randint(0, 2**16, shape, dtype=torch.int32)


# -- the codes --------------------------------------------------------------------------------


@each_code
def test_golden_values(dtype):
    """Worked out from the formula of the module, in exact arithmetic."""
    segments = 16 if dtype == torch.int8 else 32
    f = [(8 + c % 8) * 2.0 ** (c // 8) / 8 for c in range(8 * segments)]
    want = torch.tensor([(v - 1) / 2.0 ** (segments - 1) for v in f], dtype=torch.float64)
    codes = torch.arange(8 * segments).to(dtype)[None]
    scales = torch.full(scale_shape(codes), 127 + 3, dtype=torch.uint8)
    got = decode_reference(codes, scales)
    assert torch.equal(got, (8 * want).float()[None])
    named = {0: 0.0, 1: 8 * 2.0**-18, 8: 8 * 2.0**-15, 127: 8 * (1.875 - 2.0**-15)}
    if dtype == torch.uint8:
        named = {0: 0.0, 1: 8 * 2.0**-34, 248: 8.0 - 8 * 2.0**-31, 255: 15.0}
    for code, value in named.items():
        assert got[0, code] == torch.tensor(value, dtype=torch.float32), code
    if dtype == torch.int8:
        assert torch.equal(decode_reference(-codes, scales), -got)


@each_code
@pytest.mark.parametrize("exponent", [45, 127, 250])
def test_what_a_code_stands_for_keeps_it_whatever_is_drawn(dtype, exponent):
    """Codes of the top of the range, too: those that set the block's scale."""
    codes = torch.arange(128 if dtype == torch.int8 else 256).to(dtype).view(-1, BLOCK)[-1:]
    scales = torch.full((1, 1), exponent, dtype=torch.uint8)
    x = decode_reference(codes, scales)
    for bits in (0, 1, 0x7FFF, 0xFFFF):
        drawn = torch.full(codes.shape, bits, dtype=torch.int32)
        again = encoded(x, dtype, drawn)
        assert torch.equal(again[0], codes) and torch.equal(again[1], scales)


@each_code
@pytest.mark.parametrize("spread", [0.0, 3.0, 30.0])
def test_neighbours_on_both_sides_and_right_on_average(dtype, spread):
    torch.manual_seed(1)
    x = torch.randn(1, 200) * 10 ** (torch.rand(1, 200) * spread - spread / 2)
    x = x if dtype == torch.int8 else x.square()
    n = 20_000
    repeated = x.repeat(n, 1)
    codes, scales = encoded(repeated, dtype, random_bits(repeated.shape))
    y = decode_reference(codes, scales).double()
    gap = steps_apart(x, scales[:1], dtype)[0]
    assert ((y - x.double()).abs() <= 1.001 * gap).all()
    floor = y.min(dim=0).values if dtype == torch.uint8 else torch.zeros(200)
    free = x[0].double() > 1.01 * floor if dtype == torch.uint8 else torch.ones(200).bool()
    assert free.any()
    # 16 bits leave the mean half of 2^-16 of a step; n draws have an error of gap / 2 sqrt(n).
    error = (y.mean(dim=0) - x[0].double()).abs()
    assert (error[free] <= 5 * gap[free] / (2 * n**0.5)).all()


@each_code
def test_zeros_denormals_and_one_huge_value(dtype):
    x = torch.zeros(4, 130)
    x[1] = 1e-42
    x[2, 5], x[2, 7], x[2, 129] = 1e30, 1e-30, 1.0
    x[3] = 2.0**126 * 0.99
    codes, scales = encoded(x, dtype, random_bits(x.shape))
    y = decode_reference(codes, scales)
    assert (codes[x == 0] == 0).all() and (y[x == 0] == 0).all()
    assert (y[1] <= 2.0**-100).all()
    assert abs(y[2, 5] / 1e30 - 1) < 0.125 and abs(y[2, 129] - 1) < 0.125
    assert abs(y[3] / x[3] - 1).max() < 0.125
    if dtype == torch.uint8:
        assert (codes[x > 0] > 0).all(), "a variance of zero under a momentum is an explosion"


@each_code
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 2.0**126, "all ones"])
def test_nan_and_infinity_show(dtype, bad):
    x = torch.rand(3, 200)
    x[1, 150] = 0.0 if bad == "all ones" else bad
    if bad == "all ones":  # the NaN that a GPU produces
        x.view(torch.int32)[1, 150] = 0x7FFFFFFF
    y = round_trip(x, dtype, random_bits(x.shape))
    assert y[1, BLOCK:].isnan().all()
    y[1, BLOCK:] = 0
    assert y.isfinite().all()


def test_a_slow_decay_is_followed_and_nearest_rounding_would_stand_still():
    """0.1 % a step with codes 6 to 12 % apart, and the largest value of a block decays with it."""
    torch.manual_seed(0)
    start = torch.rand(32, BLOCK) + 0.1
    slow, stuck = start, start
    for _ in range(1000):
        slow = round_trip(slow * 0.999, torch.uint8, random_bits(start.shape))
        stuck = round_trip(stuck * 0.999, torch.uint8)
    ratio = (slow / start).double()
    # Rounding walks: one value is off by about 30 % after 1000 steps, the mean of 4096 by 0.5 %.
    assert abs(ratio.mean() / 0.999**1000 - 1) < 0.02
    assert ratio.log().std() < 0.5
    assert (stuck / start).min() > 0.8


# -- the kernels ------------------------------------------------------------------------------


def scalars64(rule, step=3):
    hyper = [HYPER.get(name, 0.0) for name in rule.hyper] + [0.5] * len(rule.carried)
    tensors = [torch.tensor(float(v), dtype=torch.float64) for v in (step, *hyper)]
    return rule.scalars.torch(tensors[0], tuple(tensors[1:]))[: rule.scalar_count]


def make_target(rule, w, salt=256):
    """Filled as after some steps: magnitudes of four decades."""
    states = list(new_states(rule, "int8", w).values())
    count = len(rule.states)
    for codes, scales in zip(states[:count], states[count:], strict=True):
        x = torch.randn(w.shape) * 10 ** (-4 * torch.rand(w.shape))
        x = x.to(w.device)
        encode_reference(x.square() if codes.dtype == torch.uint8 else x, codes, scales, None)
    return Target(w, states[:count], salt, states[count:])


def clone(target, device):
    tensors = [[t.to(device, copy=True) for t in ts] for ts in (target.states, target.scales)]
    return Target(target.param.to(device, copy=True), tensors[0], target.salt, tensors[1])


def assert_same_bits(ours, wanted, share):
    pairs = zip((*ours.states, *ours.scales), (*wanted.states, *wanted.scales), strict=True)
    for a, b in pairs:
        assert (a.cpu() != b.cpu()).sum() <= share * a.numel()
    torch.testing.assert_close(ours.param.cpu(), wanted.param.cpu(), rtol=1e-2, atol=1e-5)


@each_rule
@pytest.mark.parametrize("kernel", ["apply_rule", "wgrad_update"])
def test_kernels_follow_the_truth(device, rule, kernel):
    """What is stored lies within one step of the code from the rule in fp64."""
    target = make_target(rule, torch.randn(9, 200).to(device))
    before = [t.double().cpu() for t in map(decode_reference, target.states, target.scales)]
    w = target.param.double().cpu()
    exact = scalars64(rule)
    scalars = torch.stack(exact).float().to(device)
    seed = torch.tensor(-77, dtype=torch.int32, device=device)
    dy, x = (torch.randn(5, n).to(device) for n in (9, 200))
    grad = dy.double().cpu().t() @ x.double().cpu()
    if kernel == "apply_rule":
        apply_rule([grad.float().to(device)], [target], scalars, seed, rule.update)
    else:
        wgrad_update([dy], [x], [target], scalars, seed, rule.update, tile=TILE)
    want, states = rule.update.torch(w, grad, tuple(before), tuple(exact))
    assert ((target.param.cpu() - want).abs() <= 1e-5 * (1 + want.abs())).double().mean() > 0.999
    for codes, scales, value in zip(target.states, target.scales, states, strict=True):
        error = (decode_reference(codes, scales).double().cpu() - value).abs()
        allowed = 1.001 * steps_apart(value, scales.cpu(), codes.dtype) + 1e-6 * value.abs().max()
        assert (error <= allowed).all()


@pytest.mark.parametrize("shape", [*WIDTHS, (1000,), (), (3, 4, 50), (0, 4), (4, 0)])
@pytest.mark.parametrize("seed", [-987654321, None])
def test_kernel_and_reference_store_the_same_bits(device, shape, seed):
    w = torch.randn(shape)
    ours = make_target(rules.ADAMW, w.to(device))
    wanted = clone(ours, "cpu")
    scalars = torch.stack(scalars64(rules.ADAMW)).float()
    seed = None if seed is None else torch.tensor(seed, dtype=torch.int32)
    grad = torch.randn(shape)
    there = None if seed is None else seed.to(device)
    apply_rule([grad.to(device)], [ours], scalars.to(device), there, rules.ADAMW.update)
    apply_rule_reference(grad, wanted, scalars, seed, rules.ADAMW.update)
    # A GPU contracts products and sums, which moves a rounding now and then.
    assert_same_bits(ours, wanted, 2e-3 if device.type == "cuda" and w.numel() > 1 else 0.0)


def test_fused_kernel_and_reference_store_the_same_bits(device):
    """More weights than a launch takes; whole numbers, whose sums are exact in any order."""
    shapes = (WIDTHS + [(2, 1), (1, 3)] * CAPACITY)[: CAPACITY + 2]
    ours = [
        make_target(rules.ADAMW, torch.randn(s).to(device), 256 * i) for i, s in enumerate(shapes)
    ]
    wanted = [clone(t, "cpu") for t in ours]
    scalars = torch.stack(scalars64(rules.ADAMW)).float()
    seed = torch.tensor(5, dtype=torch.int32)
    dys, xs = (
        [torch.randint(-4, 5, (i % 5, s[k])).float() for i, s in enumerate(shapes)] for k in (0, 1)
    )
    wgrad_update(
        [dy.to(device) for dy in dys], [x.to(device) for x in xs], ours,
        scalars.to(device), seed.to(device), rules.ADAMW.update, tile=TILE,
    )  # fmt: skip
    for dy, x, mine, theirs in zip(dys, xs, ours, wanted, strict=True):
        wgrad_update_reference(dy, x, theirs, scalars, seed, rules.ADAMW.update)
        assert_same_bits(mine, theirs, 2e-2 if device.type == "cuda" else 0.0)


def test_transposed_parameter_is_one_row_of_memory(device):
    w = torch.randn(7, 50).to(device).t()
    ours = make_target(rules.ADAMW, w)
    assert ours.scales[0].shape == (1, 3)
    wanted = clone(ours, "cpu")
    assert wanted.states[0].stride() == w.stride()
    scalars = torch.stack(scalars64(rules.ADAMW)).float()
    seed = torch.tensor(5, dtype=torch.int32)
    grad = torch.randn(50, 7)
    apply_rule([grad.to(device)], [ours], scalars.to(device), seed.to(device), rules.ADAMW.update)
    apply_rule_reference(grad, wanted, scalars, seed, rules.ADAMW.update)
    assert_same_bits(ours, wanted, 2e-2 if device.type == "cuda" else 0.0)


def test_a_tile_that_splits_blocks_is_refused(device):
    target = make_target(rules.ADAMW, torch.randn(4, 8).to(device))
    if not runs_triton(target.param):
        pytest.skip("the reference has no tiles")
    x, dy = torch.randn(2, 8).to(device), torch.randn(2, 4).to(device)
    scalars, tile = torch.stack(scalars64(rules.ADAMW)).float().to(device), TILE | {"BLOCK_K": 64}
    with pytest.raises(ValueError, match="tile: 8-bit states need BLOCK_K=128"):
        wgrad_update([dy], [x], [target], scalars, None, rules.ADAMW.update, tile=tile)


# -- training ---------------------------------------------------------------------------------


class Net(nn.Module):
    """The last two of a sequence's tokens give the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        self.up = nn.Linear(48, 100, bias=False)
        self.head = nn.Linear(100, 40, bias=False)

    def forward(self, ids):
        h = self.embed(ids[:, :-1]).flatten(1)
        return F.cross_entropy(self.head(F.gelu(self.up(h))), ids[:, -1])


def batches(seed, steps, size=64):
    """Token triples [steps, size, 3] of a fixed random language; tokens follow Zipf's law."""
    language = torch.Generator().manual_seed(9)
    follow = torch.rand(40, 40, 40, generator=language).pow(30) / torch.arange(1, 41)
    drawn = torch.Generator().manual_seed(seed)
    first = (torch.rand(steps * size, 2, generator=drawn).pow(2) * 40).long()
    last = torch.multinomial(follow[first[:, 0], first[:, 1]], 1, generator=drawn)
    return torch.cat([first, last], dim=1).view(steps, size, 3)


def train(net, optimizer, ids):
    loss = net(ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def small(seed=0, make=ForgeAdamW, states="int8", **kwargs):
    torch.manual_seed(seed)
    net = Net()
    return net, make(net, states=states, **{"lr": 3e-3, **kwargs})


def test_500_steps_end_where_fp32_states_end():
    finals = {}
    for states in ("fp32", "int8"):
        for seed in range(3):
            net, optimizer = small(seed, states=states)
            losses = [train(net, optimizer, ids) for ids in batches(seed, 500)]
            finals[states, seed] = sum(losses[-100:]) / 100
            assert finals[states, seed] < 0.8 * losses[0]
    for seed in range(3):
        assert finals["int8", seed] == pytest.approx(finals["fp32", seed], rel=5e-3), seed


def test_coordinates_without_gradient_stay_exactly_still():
    """Rows of an embedding that is never read, also in a block with others that move."""
    net, optimizer = small(weight_decay=0.0)
    idle, before = net.embed.weight[30:].detach().clone(), net.up.weight.detach().clone()
    with torch.no_grad():
        net.up.weight[:, 24:30] = 0
        net.embed.weight[:, :6] = 0  # columns 0-5 and 24-29 of `up` have no gradient at first
    for ids in batches(1, 20):
        train(net, optimizer, ids.clamp(max=29))
    assert torch.equal(net.embed.weight[30:, 6:], idle[:, 6:])
    assert not torch.equal(net.up.weight, before)
    state = optimizer.state[net.embed.weight]
    assert (state["exp_avg_code"][30:] == 0).all() and (state["exp_avg_sq_code"][30:] == 0).all()


def test_no_update_explodes_beside_a_gradient_a_million_times_larger():
    """Linear codes fail here: their rounded momentum is thousands of times the root of v."""
    torch.manual_seed(0)
    w = nn.Parameter(torch.zeros(4, BLOCK))
    optimizer = ForgeAdamW([w], lr=1.0, weight_decay=0.0, states="int8")
    size = 10 ** (-6 * torch.arange(BLOCK) / (BLOCK - 1))
    largest = torch.zeros(BLOCK)
    for _ in range(300):
        before = w.detach().clone()
        w.grad = torch.randn(4, BLOCK) * size
        optimizer.step()
        largest = torch.maximum(largest, (w.detach() - before).abs().amax(dim=0))
    assert largest.max() < 5
    assert largest.min() > 0.05, "nor does one stand still"


def test_bytes_per_parameter():
    net = nn.Sequential(nn.Linear(1024, 256), nn.Linear(256, 200), nn.Linear(200, 129)).bfloat16()
    optimizer = ForgeAdamW(net, states="int8")
    net(torch.randn(2, 1024).bfloat16()).sum().backward()
    optimizer.step()
    states = [optimizer.state[p] for p in net.parameters()]
    used = sum(t.nbytes for s in states for name, t in s.items() if name != "step")
    assert used <= 2.1 * sum(p.numel() for p in net.parameters())


# -- saving, loading, converting --------------------------------------------------------------


def saved(optimizer):
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("make", [ForgeAdamW, ForgeLion, ForgeAdagrad, ForgeSGD])
def test_saved_and_loaded_it_goes_on_bit_for_bit(make):
    kwargs = {"momentum": 0.9} if make is ForgeSGD else {}
    net, optimizer = small(make=make, **kwargs)
    ids = batches(0, 6)
    for batch in ids[:3]:
        train(net, optimizer, batch)
    twin = copy.deepcopy(net)
    other = make(twin, states="int8", lr=1.0, **kwargs)
    other.load_state_dict(saved(optimizer))
    for batch in ids[3:]:
        train(net, optimizer, batch), train(twin, other, batch)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
        for name, value in optimizer.state[p].items():
            assert torch.equal(value, other.state[q][name]), name


def test_loads_torchs_states_and_is_loaded_by_fp32():
    net = Net()
    reference = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for ids in batches(0, 5):
        train(net, reference, ids)
    twin, last = copy.deepcopy(net), copy.deepcopy(net)
    ours = ForgeAdamW(twin, states="int8")
    ours.load_state_dict(copy.deepcopy(reference.state_dict()))
    back = ForgeAdamW(last, states="fp32")
    back.load_state_dict(saved(ours))
    for p, q, r in zip(net.parameters(), twin.parameters(), last.parameters(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            codes, scales = (ours.state[q][f"{name}_{part}"] for part in ("code", "scale"))
            got, want = back.state[r][name], reference.state[p][name]
            assert torch.equal(got, decode_reference(codes, scales))
            # To nearest: half a step.
            assert ((got - want).abs() <= want.abs() / 15 + want.abs().max() * 2.0**-18).all()
    assert ours.state[next(twin.parameters())]["step"] == 5


def test_torch_refuses_codes_rather_than_take_them_for_values():
    net, optimizer = small()
    ids = batches(0, 1)[0]
    train(net, optimizer, ids)
    plain = copy.deepcopy(net)
    other = torch.optim.AdamW(plain.parameters())
    other.load_state_dict(saved(optimizer))
    with pytest.raises(KeyError, match="exp_avg"):
        plain(ids).backward()
        other.step()


def test_bad_states_name_the_parameter_and_change_nothing():
    net, optimizer = small()
    train(net, optimizer, batches(0, 1)[0])
    good = saved(optimizer)
    bad = {
        "exp_avg_scale has shape": ("exp_avg_scale", torch.zeros(3, 3, dtype=torch.uint8)),
        "exp_avg_code has shape": ("exp_avg_code", torch.zeros(3, dtype=torch.int8)),
        "exp_avg_sq_code is torch.int8": ("exp_avg_sq_code", good["state"][1]["exp_avg_code"]),
        "exp_avg_code is torch.float32": ("exp_avg_code", torch.zeros(100, 48)),
        "no 'exp_avg_sq_scale'": ("exp_avg_sq_scale", None),
        "no 'exp_avg'": ("exp_avg_code", None),
    }
    for message, (name, value) in bad.items():
        wrong = copy.deepcopy(good)
        wrong["param_groups"][0]["lr"] = 5.0
        wrong["state"][1][name] = value
        if value is None:
            del wrong["state"][1][name]
        with pytest.raises((ValueError, KeyError), match=f"up.weight'.*{message}"):
            optimizer.load_state_dict(wrong)
    negative = torch.optim.AdamW(net.parameters()).state_dict()
    zero = torch.zeros_like(net.embed.weight)
    negative["state"][0] = dict(step=torch.tensor(1.0), exp_avg=zero, exp_avg_sq=zero - 1)
    with pytest.raises(ValueError, match="'embed.weight': exp_avg_sq has negative values"):
        optimizer.load_state_dict(negative)
    assert optimizer.param_groups[0]["lr"] == 3e-3
    for key, state in good["state"].items():
        for name, value in state.items():
            assert torch.equal(value, optimizer.state_dict()["state"][key][name])


def test_nearest_rounding_is_refused():
    net = Net()
    with pytest.raises(ValueError, match="rounding='nearest'.*states='bf16'"):
        ForgeAdamW(net, states="int8", rounding="nearest")
    assert type(net.up) is nn.Linear


def test_weight_laid_out_anew_keeps_its_states(device):
    net, optimizer = small()
    net.to(device)
    ids = batches(0, 4).to(device)
    for batch in ids[:3]:
        train(net, optimizer, batch)
    weight, state = net.up.weight, optimizer.state[net.up.weight]
    values = decode_reference(state["exp_avg_code"], state["exp_avg_scale"])
    assert state["exp_avg_scale"].shape == (100, 1)
    weight.data = weight.data.t().contiguous().t()
    # A step that leaves the states as they are but for their rounding.
    optimizer.param_groups[0].update(lr=0.0, betas=(1 - 1e-12, 1 - 1e-12))
    train(net, optimizer, ids[3])
    state = optimizer.state[weight]
    assert state["exp_avg_scale"].shape == (1, 38)
    moved = decode_reference(state["exp_avg_code"], state["exp_avg_scale"])
    error = (moved - values).abs()
    assert (error <= 0.2 * values.abs() + values.abs().max() * 2.0**-17).all()
