"""TrainStep: what is captured, captured anew, and refused, mostly without a GPU."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from forge import ForgeAdamW, TrainStep
from forge.train_step import _Graph
from step_net import LR, Net, assert_equal, batches, loop, optimizers, pair


class Recorded(TrainStep):
    """Counts captures, and runs the step where a graph would be replayed.

    So that what decides between eager steps, captures and replays is tested without a GPU.
    """

    graph = True
    captures = started = drawn = 0
    pure = True

    def _on_side_stream(self):
        return nullcontext()

    def _capture(self, inputs):
        self.captures += 1
        buffers = {k: v.clone() for k, v in inputs.items() if isinstance(v, torch.Tensor)}
        loss = torch.zeros(())
        forward = SimpleNamespace(replay=self.start)
        replay = lambda: loss.copy_(self._step({**inputs, **buffers}))  # noqa: E731
        return _Graph(forward, SimpleNamespace(replay=replay), buffers, loss, self.pure)

    def start(self):
        self.started += 1
        torch.rand(self.drawn)

    def _random_state(self):
        return torch.get_rng_state()


def recorded(**kwargs):
    net, plain = pair("cpu")
    ours, theirs = optimizers(net, plain)
    return Recorded(net, ours, **kwargs), net, ours, plain, theirs


@pytest.mark.parametrize("update", ["backward", "step"])
def test_the_optimizer_of_another_model_is_refused_before_anything_changes(update):
    net, other = pair("cpu")
    outer = nn.ModuleDict({"net": net, "extra": nn.Linear(2, 2)})
    x = batches(1, "cpu")[0]
    for optimizer in (ForgeAdamW(other, update=update), ForgeAdamW(outer["extra"], update=update)):
        before = copy.deepcopy(net.state_dict())
        step = Recorded(net, optimizer)
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match="'embed.weight' wants a .*optimizer of this model"
            ):
                step(ids=x)
        assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
        assert all(p.grad is None for p in net.parameters()) and not optimizer.state
    half = ForgeAdamW(net.up, update=update)  # what it holds must not be updated, either
    with pytest.raises(RuntimeError, match="'embed.weight' wants a gradient"):
        TrainStep(net, half)(ids=x)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


@pytest.mark.parametrize(("pure", "drawn"), [(True, 0), (True, 1), (False, 0)])
def test_the_forward_pass_starts_early_only_if_it_changes_nothing(pure, drawn):
    """One that the checks then refuse was for nothing; each of the others belongs to a step."""
    step, net, ours, plain, theirs = recorded()
    step.pure, step.drawn = pure, drawn
    pure = pure and not drawn
    ids = batches(6, "cpu")
    for x in ids[:3]:
        step(ids=x)
    assert step.started == 2  # the first call is eager
    weights = [p.clone() for p in net.parameters()]
    net.norm.bias.grad = torch.ones_like(net.norm.bias)
    with pytest.raises(RuntimeError, match="has a gradient from outside the step"):
        step(ids=ids[3])
    assert step.started == 2 + pure
    assert all(map(torch.equal, weights, net.parameters()))
    net.norm.bias.grad = None
    net.norm.eval()  # captured anew after an eager call
    for x in ids[3:]:
        step(ids=x)
    assert step.captures == 2 and step.started == 4 + 2 * pure


class Averaging(Net):
    """Its forward pass keeps an average in a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.average = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, ids):
        loss = super().forward(ids)
        self.average.lerp_(loss.detach(), 0.5)
        return loss


class Dropping(Net):
    def forward(self, ids):
        return super().forward(ids, scale=F.dropout(torch.ones(9, device=ids.device)).mean())


def test_a_forward_pass_that_writes_to_a_parameter_is_noticed():
    for net, changes in ((Net(), False), (Averaging(), True)):
        step = TrainStep(net, ForgeAdamW(net))
        before = step._versions()
        net(batches(1, "cpu")[0])
        assert (step._versions() != before) is changes


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Averaging, Dropping])
def test_a_step_that_is_refused_draws_and_writes_nothing(kind):
    net = kind().to("cuda")
    step = TrainStep(net, ForgeAdamW(net, lr=LR))
    *ids, last = batches(5, "cuda")
    for x in ids:
        step(ids=x)
    parameters = list(net.parameters())
    before = [p.clone() for p in parameters], torch.cuda.get_rng_state()
    parameters[0].grad = torch.ones_like(parameters[0])
    with pytest.raises(RuntimeError, match="has a gradient from outside the step"):
        step(ids=last)
    assert torch.equal(before[1], torch.cuda.get_rng_state())
    assert all(map(torch.equal, before[0], parameters))


def frozen():
    return nn.Parameter(torch.ones(()), requires_grad=False)


@pytest.mark.parametrize(
    "change, again",
    [
        (lambda net, opt: opt.param_groups[0].update(lr=0.5), False),
        (lambda net, opt: net.norm.eval(), True),
        (lambda net, opt: net.norm.bias.requires_grad_(False), True),
        (lambda net, opt: setattr(net.norm.bias, "data", net.norm.bias.data.clone()), True),
        (lambda net, opt: setattr(net, "norm", copy.copy(net.norm)), True),
        (lambda net, opt: net.register_buffer("table", torch.ones(2)), True),
        (lambda net, opt: net.norm.register_buffer("first", torch.ones(2)), True),
        (lambda net, opt: net.register_parameter("first", frozen()), True),
        (lambda net, opt: opt.load_state_dict(opt.state_dict()), True),
        (lambda net, opt: opt.state[net.up.bias].update(step=torch.tensor(9.0)), True),
        (lambda net, opt: opt.state[net.up.bias].update(exp_avg=torch.zeros(32)), True),
    ],
    ids="lr eval frozen moved module buffer first own load count state".split(),
)
def test_what_a_graph_has_baked_in_is_captured_anew(change, again):
    step, net, ours, plain, theirs = recorded()
    net.register_buffer("table", torch.zeros(2))
    ids = batches(6, "cpu")
    for i, x in enumerate(ids):
        if i == 3:
            assert step.captures == 1
            change(net, ours)
        step(ids=x)
    assert step.captures == 1 + again


def test_an_exchanged_parameter_that_the_optimizer_does_not_hold_is_refused():
    step, net, *_ = recorded()
    x, y, z = batches(3, "cpu")
    step(ids=x), step(ids=y)
    net.norm.bias = nn.Parameter(net.norm.bias.detach().clone())
    with pytest.raises(
        RuntimeError, match="'norm.bias' wants a gradient but is not in the optimizer"
    ):
        step(ids=z)


def test_shapes_that_train_different_parameters_share_no_stale_counts():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x, both):
            h = self.parts[0](x)
            return (self.parts[1](h) if both else h).square().mean()

    torch.manual_seed(0)
    net = Branches()
    plain = copy.deepcopy(net)
    ours, theirs = optimizers(net, plain)
    step = Recorded(net, ours)
    for i in range(14):
        x, both = torch.randn(3, 4), i % 3 == 0
        known = dict(step._graphs)
        step(x=x, both=both)
        loss = plain(x, both)
        loss.backward(), theirs.step(), theirs.zero_grad()
        if i in (0, 1):  # the second shape splits the count: the first is to be captured anew
            assert all(key not in step._graphs for key in known)
    assert_equal(net, plain)
    assert {float(s["step"]) for s in ours.state.values()} == {14.0, 5.0}
    assert step.captures == 2


def test_inputs_that_a_graph_cannot_follow():
    step, net, *_ = recorded(max_graphs=3)
    x = batches(1, "cpu")[0]
    for scale in (1, 1.0, True) * 3:
        step(ids=x, scale=scale)
    assert step.captures == 3  # equal numbers of different types are different programs
    for value, message in (
        ([1.0], "scale= is a list"),
        ((1.0, torch.ones(())), "scale= is a Tensor"),
        (SimpleNamespace(), "scale= is a SimpleNamespace"),
        (torch.ones((), requires_grad=True), "scale= requires a gradient"),
    ):
        with pytest.raises(TypeError, match=message):
            step(ids=x, scale=value)


def test_what_a_replay_would_pass_over_is_refused():
    step, net, ours, plain, theirs = recorded()
    x, y, z = batches(3, "cpu")
    for ids in (x, y):
        step(ids=ids)
        loop(plain, theirs, ids)
    net(z).backward()
    with pytest.raises(RuntimeError, match="from outside the step: call optimizer.step"):
        step(ids=z)
    ours.step()
    loop(plain, theirs, z)
    net.norm.bias.grad = torch.ones(16)
    with pytest.raises(RuntimeError, match="'norm.bias' has a gradient from outside"):
        step(ids=z)
    ours.zero_grad()
    hook = ours.register_step_post_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="step hooks .* graph=False"):
        step(ids=z)
    hook.remove()
    step(ids=x)
    loop(plain, theirs, x)
    assert_equal(net, plain)


def test_what_only_a_capture_meets_is_refused(monkeypatch):
    """States and counts made while a graph is captured would be made anew in every replay."""
    net, _ = pair("cpu")
    ours = ForgeAdamW(net)
    x, y = batches(2, "cpu")
    monkeypatch.setattr(ours._queue, "captured", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="'(up|down).weight' got its first gradient while"):
        net(x).backward()
    monkeypatch.undo()
    ours.zero_grad()
    loop(net, ours, x)
    monkeypatch.setattr(ours._queue, "captured", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    net.up(torch.ones(1, 16)).sum().backward()
    with pytest.raises(RuntimeError, match="'embed.weight' got no gradient while"):
        ours.step()


@pytest.mark.gpu
def test_a_broken_capture_leaves_model_and_optimizer_usable():
    graphed, plain = pair("cuda")
    ours, theirs = optimizers(graphed, plain)
    forward, broken = graphed.forward, []

    def synchronizing(**inputs):
        loss = forward(**inputs)
        if broken:
            loss.item()
        return loss

    graphed.forward = synchronizing
    step = TrainStep(graphed, ours)
    ids = batches(6, "cuda")
    for i, x in enumerate(ids):
        if i == 1:
            before = copy.deepcopy(graphed.state_dict())
            broken.append(True)
            with pytest.raises(RuntimeError, match="cannot be captured.*graph=False"):
                step(ids=x)
            broken.clear()
            torch.testing.assert_close(graphed.state_dict(), before, rtol=0, atol=0)
            assert torch.rand(1, device="cuda").isfinite()
        step(ids=x)
        loop(plain, theirs, x)
    assert_equal(graphed, plain)


def test_a_tied_weight_that_cannot_be_updated_in_parts_is_said_to_be_updated_at_the_end():
    net, _ = pair("cpu")
    optimizer = ForgeAdamW(net)
    slot = optimizer._slots[0]
    slot.shared = slot.embeds = True
    step, tried = TrainStep(net, optimizer), []

    def capture(inputs, tied):
        tried.append(list(tied))
        if tied:
            raise RuntimeError("the step cannot be captured") from RuntimeError("two heads")
        return "graph"

    step._capture_once = capture
    with pytest.warns(UserWarning, match=f"{slot.name}: updated at the end.*two heads"):
        assert step._capture({}) == "graph"
    assert tried == [[slot], []]
