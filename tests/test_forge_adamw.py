"""ForgeAdamW against torch.optim.AdamW on a plain copy of the same model."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from forge import ForgeAdamW
from forge.kernels import runtime
from forge.linear import ForgeLinear

LR = 1e-2


class Net(nn.Module):
    """A small transformer-like net: embedding, norms, biases, a tied head, a layer used twice."""

    def __init__(self, tied: bool = True, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(53, 24)
        self.up = nn.Linear(24, 40)
        self.norm = nn.LayerNorm(40)
        self.mix = nn.Linear(40, 40, bias=False)
        self.down = nn.Linear(40, 24, bias=False)
        self.head = nn.Linear(24, 53, bias=False)
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.embed.weight

    def block(self, h):
        h = self.norm(F.gelu(self.up(h)))
        h = self.mix(torch.tanh(self.mix(h)))  # one weight, two uses in one graph
        return self.down(h)

    def forward(self, ids):
        h = self.embed(ids)
        if self.checkpointed is None:
            h = h + self.block(h)
        else:
            h = h + checkpoint(self.block, h, use_reentrant=self.checkpointed)
        return F.cross_entropy(self.head(h).flatten(0, -2), ids.flatten())


def pair(device, **kwargs):
    torch.manual_seed(1)
    ours = Net(**kwargs).to(device)
    return ours, copy.deepcopy(ours)


def batch(device, shape=(3, 7)):
    return torch.randint(0, 53, shape, device=device)


def assert_same(ours, plain, steps=1):
    """fp32 accuracy, scaled to how far a weight moves: Adam divides small numbers by small ones."""
    plain_params = dict(plain.named_parameters())
    for name, p in ours.named_parameters():
        error = (p - plain_params[name]).abs().max().item()
        assert error < 2e-3 * LR * steps**0.5, f"{name}: off by {error:.2e}"


def train(model, optimizer, ids):
    loss = model(ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


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


def test_layer_in_two_reentrant_checkpoints_is_an_error_not_two_updates():
    """Reentrant checkpointing runs a backward of its own for each segment."""
    net = nn.Linear(4, 4)
    optimizer = ForgeAdamW(net, lr=LR)
    before = net.weight.detach().clone()
    h = torch.randn(2, 4, requires_grad=True)
    for _ in range(2):
        h = checkpoint(net, h, use_reentrant=True)
    with pytest.raises(RuntimeError, match="second backward before step"):
        h.sum().backward()
    optimizer.step()
    assert (net.weight - before).abs().max() < 1.1 * LR


def test_reentrant_checkpoint_follows_torch():
    ours, plain = pair("cpu")
    ours.checkpointed = plain.checkpointed = True
    optimizer = ForgeAdamW(ours, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    for _ in range(3):
        ids = batch("cpu")
        train(ours, optimizer, ids), train(plain, reference, ids)
    assert_same(ours, plain, 3)


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


def test_frozen_weight_is_untouched_and_has_no_state():
    ours, _ = pair("cpu")
    ours.up.weight.requires_grad_(False)
    before = ours.up.weight.detach().clone()
    optimizer = ForgeAdamW(ours, lr=LR)
    train(ours, optimizer, batch("cpu"))
    assert torch.equal(ours.up.weight, before)
    assert ours.up.weight not in optimizer.state
    assert ours.up.bias in optimizer.state


def test_freezing_and_unfreezing_follows_torch():
    ours, plain = pair("cpu")
    for net in (ours, plain):
        net.up.weight.requires_grad_(False)
    optimizer = ForgeAdamW(ours, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    for step in range(8):
        for net in (ours, plain):
            net.up.weight.requires_grad_(step >= 2)
            net.mix.weight.requires_grad_(step != 4)
        ids = batch("cpu")
        train(ours, optimizer, ids), train(plain, reference, ids)
    assert_same(ours, plain, 8)
    assert optimizer.state[ours.up.weight]["step"] == 6
    assert optimizer.state[ours.mix.weight]["step"] == 7


def test_layers_left_out_of_a_step_keep_their_own_count():
    def build():
        torch.manual_seed(3)
        return nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    ours, plain = build(), build()
    optimizer = ForgeAdamW(ours, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    for used in ([0, 1, 2], [0], [0, 2], [1], [0, 1, 2]):
        x = torch.randn(4, 6)
        for layers, opt in ((ours, optimizer), (plain, reference)):
            h = x
            for i in used:
                h = torch.tanh(layers[i](h))
            h.square().sum().backward()
            opt.step()
            opt.zero_grad()
    assert_same(ours, plain, 5)
    assert [optimizer.state[layer.weight]["step"].item() for layer in ours] == [4, 3, 3]


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


def test_autograd_grad_does_not_train():
    ours, plain = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    ids = batch("cpu")
    before = copy.deepcopy(ours.state_dict())
    h = torch.randn(2, 24, requires_grad=True)
    (dh,) = torch.autograd.grad(ours.block(h).sum(), h)
    (dw,) = torch.autograd.grad(ours.block(h).sum(), ours.mix.weight)
    (want,) = torch.autograd.grad(plain.block(h).sum(), plain.mix.weight)
    torch.testing.assert_close(dw, want)
    assert dh.abs().sum() > 0
    optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in ours.state_dict().items())
    # What it collected must not leak into the next real step.
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    train(ours, optimizer, ids), train(plain, reference, ids)
    assert_same(ours, plain)


def test_functional_transforms_see_a_plain_layer():
    net = nn.Linear(3, 2)
    optimizer = ForgeAdamW(net, lr=LR)
    params = dict(net.named_parameters())
    grads = torch.func.grad(lambda p: torch.func.functional_call(net, p, torch.ones(1, 3)).sum())(
        params
    )
    assert torch.equal(grads["weight"], torch.ones(2, 3))
    optimizer.step()


def test_second_backward_before_step_raises_and_changes_nothing_more():
    ours, _ = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    ours(batch("cpu")).backward()
    after_first = copy.deepcopy(ours.state_dict())
    with pytest.raises(RuntimeError, match="second backward before step.*optimizer.step"):
        ours(batch("cpu")).backward()
    assert all(torch.equal(v, after_first[k]) for k, v in ours.state_dict().items())
    optimizer.step()
    optimizer.zero_grad()
    ours(batch("cpu")).backward()


def test_disjoint_graphs_in_one_step():
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = ForgeAdamW(nn.ModuleList([a, b]), lr=LR)
    before = [a.weight.detach().clone(), b.weight.detach().clone()]
    a(torch.ones(1, 3)).sum().backward()
    b(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for layer, old in zip((a, b), before, strict=True):
        assert (layer.weight - old).abs().max() < 1.1 * LR
        assert not torch.equal(layer.weight, old)


def test_create_graph_and_stale_retained_graph_raise():
    ours, _ = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    with pytest.raises(RuntimeError, match="create_graph"):
        ours(batch("cpu")).backward(create_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    loss = ours(batch("cpu"))
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradient_hooks_on_a_weight_are_called():
    ours, _ = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    seen = []
    ours.up.weight.register_hook(lambda g: seen.append(tuple(g.shape)))
    ours.down.weight.register_post_accumulate_grad_hook(lambda p: seen.append(tuple(p.grad.shape)))
    train(ours, optimizer, batch("cpu"))
    assert set(seen) == {(40, 24), (24, 40)}
    assert ours.up.weight in optimizer.state and ours.down.weight in optimizer.state


def test_copies_and_evaluation_are_plain_models():
    ours, _ = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    twin = copy.deepcopy(ours)
    before = copy.deepcopy(twin.state_dict())
    twin(batch("cpu")).backward()
    assert twin.up.weight.grad is not None
    assert all(torch.equal(v, before[k]) for k, v in twin.state_dict().items())
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    with torch.no_grad():
        ids = batch("cpu")
        assert torch.equal(loaded(ids), ours(ids))
    assert isinstance(ours.up, nn.Linear) and set(ours.state_dict()) == set(before)
    ours.eval()
    old = ours.up.weight.detach().clone()
    train(ours, optimizer, ids)  # eval() changes layers' behaviour, not whether they train
    assert not torch.equal(old, ours.up.weight)
    with pytest.raises(TypeError, match="load_state_dict"):
        copy.deepcopy(optimizer)


def test_release_and_garbage_collection_give_plain_layers_back():
    ours, _ = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    with pytest.raises(ValueError, match="'embed.weight' already belongs.*release"):
        ForgeAdamW(ours)
    optimizer.release()
    assert not any(type(m) is ForgeLinear for m in ours.modules())
    ours(batch("cpu")).backward()
    assert all(p.grad is not None for p in ours.parameters())
    ours.zero_grad()
    optimizer = ForgeAdamW(ours)
    del optimizer
    ours(batch("cpu")).backward()
    assert all(p.grad is not None for p in ours.parameters())


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


@pytest.mark.parametrize("states, kept", [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_state_format_is_kept_through_save_and_load(states, kept):
    ours, _ = pair("cpu")
    ours.to(torch.bfloat16)
    optimizer = ForgeAdamW(ours, lr=LR, states=states)
    train(ours, optimizer, batch("cpu"))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.release()
    other = ForgeAdamW(ours, lr=LR, states=states)
    other.load_state_dict(saved)
    for p in ours.parameters():
        for name in ("exp_avg", "exp_avg_sq"):
            assert other.state[p][name].dtype == kept
    again = other.state_dict()
    for key, state in saved["state"].items():
        for name, value in state.items():
            assert torch.equal(value, again["state"][key][name])


def test_loads_torch_adamw_and_torch_adamw_loads_it():
    ours, plain = pair("cpu")
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    ids = batch("cpu")
    for _ in range(3):
        train(plain, reference, ids)
    ours.load_state_dict(plain.state_dict())
    optimizer = ForgeAdamW(ours, lr=1.0)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    train(ours, optimizer, ids), train(plain, reference, ids)
    assert_same(ours, plain)
    back = torch.optim.AdamW(plain.parameters(), lr=1.0)
    back.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(ours, optimizer, ids), train(plain, back, ids)
    assert_same(ours, plain, 2)


def test_bad_state_dicts_name_the_parameter_and_change_nothing():
    ours, _ = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    train(ours, optimizer, batch("cpu"))
    good = copy.deepcopy(optimizer.state_dict())

    wrong = copy.deepcopy(good)
    wrong["state"][1]["exp_avg"] = torch.zeros(3)
    wrong["param_groups"][0]["lr"] = 5.0
    with pytest.raises(ValueError, match="'up.weight': exp_avg has shape"):
        optimizer.load_state_dict(wrong)
    missing = copy.deepcopy(good)
    del missing["state"][1]["exp_avg_sq"]
    with pytest.raises(KeyError, match="up.weight.*exp_avg_sq"):
        optimizer.load_state_dict(missing)
    shorter = copy.deepcopy(good)
    shorter["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="param group 0: state_dict has"):
        optimizer.load_state_dict(shorter)
    assert optimizer.param_groups[0]["lr"] == LR
    for key, state in good["state"].items():
        for name, value in state.items():
            assert torch.equal(value, optimizer.state_dict()["state"][key][name])


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


def test_a_model_converted_after_the_optimizer_was_built_still_trains():
    ours, plain = pair("cpu")
    ours.to(torch.bfloat16), plain.to(torch.bfloat16)
    optimizer = ForgeAdamW(ours, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    ours.float(), plain.float()
    for _ in range(4):
        ids = batch("cpu")
        train(ours, optimizer, ids), train(plain, reference, ids)
    assert_same(ours, plain, 4)
    assert all(p.grad is None for p in ours.parameters())
    ours.half()
    ours(batch("cpu")).backward()
    with pytest.raises(TypeError, match="is torch.float16"):
        optimizer.step()


@pytest.mark.parametrize(
    "exchange",
    [
        lambda net: net.bfloat16().float(),
        lambda net: net.up.weight.data.set_(net.up.weight.data.clone()),
        lambda net: net.up.weight.set_(net.up.weight.detach().clone()),
    ],
    ids=["round trip", "data.set_", "set_"],
)
def test_weights_whose_autograd_node_is_exchanged_still_train(exchange):
    ours, plain = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    for _ in range(2):
        with torch.no_grad():
            exchange(ours), exchange(plain)
        for _ in range(2):
            ids = batch("cpu")
            train(ours, optimizer, ids), train(plain, reference, ids)
    assert_same(ours, plain, 4)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise ValueError("out of luck")


def test_a_failed_backward_can_be_discarded():
    ours, plain = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    before = copy.deepcopy(ours.state_dict())
    h = _Fails.apply(ours.embed(batch("cpu")))
    with pytest.raises(ValueError, match="out of luck"):
        ours.block(h).sum().backward()
    optimizer.zero_grad()
    assert all(torch.equal(v, before[k]) for k, v in ours.state_dict().items())
    for _ in range(2):
        ids = batch("cpu")
        train(ours, optimizer, ids), train(plain, reference, ids)
    assert_same(ours, plain, 2)


def test_a_checkpoint_loaded_after_a_failed_backward_is_clean():
    ours, plain = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    ids = batch("cpu")
    train(ours, optimizer, ids), train(plain, reference, ids)
    saved = copy.deepcopy((ours.state_dict(), optimizer.state_dict()))
    with pytest.raises(ValueError, match="out of luck"):
        ours.block(_Fails.apply(ours.embed(ids))).sum().backward()
    ours.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(ours, optimizer, ids), train(plain, reference, ids)
    assert_same(ours, plain, 2)


def test_what_was_applied_cannot_be_discarded_silently():
    ours, _ = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    ours(batch("cpu")).backward()
    with pytest.raises(RuntimeError, match="zero_grad.. before step"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


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


def test_replaced_states_are_used():
    ours, plain = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    ids = batch("cpu")
    train(ours, optimizer, ids), train(plain, reference, ids)
    for net, opt in ((ours, optimizer), (plain, reference)):
        weight = net.up.weight
        opt.state[weight]["exp_avg"] = torch.full_like(weight, 0.01)
        opt.state[weight]["exp_avg_sq"] = torch.full_like(weight, 0.01)
    train(ours, optimizer, ids), train(plain, reference, ids)
    assert_same(ours, plain, 2)
    optimizer.state.clear(), reference.state.clear()
    train(ours, optimizer, ids), train(plain, reference, ids)
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        # A first step again: it takes a gradient's sign, also of one that is round-off.
        assert ((p - q).abs() > 1e-2 * LR).float().mean() < 0.01
    assert len(optimizer.state_dict()["state"]) == len(list(ours.parameters()))


def test_weight_laid_out_anew(device):
    ours, plain = pair(device)
    optimizer = ForgeAdamW(ours, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    ids = batch(device)
    train(ours, optimizer, ids), train(plain, reference, ids)
    for net in (ours, plain):
        for weight in (net.embed.weight, net.up.weight):  # plain, and of a fused layer
            weight.data = weight.data.t().contiguous().t()
    for _ in range(2):
        train(ours, optimizer, ids), train(plain, reference, ids)
    assert_same(ours, plain, 3)


def test_operands_changed_in_place_are_noticed():
    """The weight gradient is formed a little after the layer's backward, of what that has seen."""

    class Scribbles(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, victim):
            ctx.victim = victim
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            ctx.victim.zero_()
            return g, None

    layer = nn.Linear(3, 3)
    optimizer = ForgeAdamW(layer, lr=LR)
    x = torch.randn(2, 3, requires_grad=True)
    h = torch.empty(2, 3)
    entry = Scribbles.apply(x, h)  # its backward runs after the layer's, and overwrites h
    h.copy_(entry.detach())
    y = layer(h.requires_grad_()) + entry
    with pytest.raises(RuntimeError, match="'weight'.*changed in place"):
        y.sum().backward()
    del optimizer


def test_frozen_between_forward_and_backward():
    ours, plain = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    before = copy.deepcopy(ours.state_dict())
    loss = ours(batch("cpu"))
    ours.requires_grad_(False)
    loss.backward()
    optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in ours.state_dict().items())


def test_released_duplicate_and_load_hooks():
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="a parameter is in it twice"), pytest.warns(UserWarning):
        ForgeAdamW([layer.weight, layer.weight])
    optimizer = ForgeAdamW(layer)
    called = []
    optimizer.register_load_state_dict_pre_hook(lambda opt, state: called.append("pre"))
    optimizer.register_load_state_dict_post_hook(lambda opt: called.append("post"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["pre", "post"]
    saved = optimizer.state_dict()
    optimizer.release()
    for use in (optimizer.step, lambda: optimizer.load_state_dict(saved)):
        with pytest.raises(RuntimeError, match="released"):
            use()


@pytest.mark.gpu
def test_a_model_moved_after_the_optimizer_was_built_still_trains():
    ours, plain = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    ids = batch("cpu")
    train(ours, optimizer, ids), train(plain, reference, ids)
    ours.to("cuda")
    saved = reference.state_dict()  # torch's own optimizer cannot follow
    reference = torch.optim.AdamW(plain.to("cuda").parameters(), lr=LR)
    reference.load_state_dict(saved)
    for _ in range(3):
        ids = batch("cuda")
        train(ours, optimizer, ids), train(plain, reference, ids)
    assert_same(ours, plain, 4)
    assert {float(s["step"]) for s in optimizer.state.values()} == {4.0}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["weight", "bias"])
def test_pruned_and_parametrized_layers(when, what):
    class Double(nn.Module):
        def forward(self, x):
            return 2 * x

    changes = [
        lambda net: prune.l1_unstructured(net, what, 0.25),
        lambda net: parametrize.register_parametrization(net, what, Double()),
    ]
    for change in changes:
        torch.manual_seed(0)
        ours = nn.Sequential(nn.Linear(5, 7))
        nn.init.constant_(ours[0].bias, 3.0)
        plain = copy.deepcopy(ours)
        if when == "before":
            change(ours[0])
        optimizer = ForgeAdamW(ours, lr=LR)
        if when == "after":
            change(ours[0])
        change(plain[0])
        reference = torch.optim.AdamW(plain.parameters(), lr=LR)
        for _ in range(3):
            x = torch.randn(4, 5)
            for net, opt in ((ours, optimizer), (plain, reference)):
                net(x).square().mean().backward()
                opt.step()
                opt.zero_grad()
        torch.testing.assert_close(ours(x), plain(x))


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
