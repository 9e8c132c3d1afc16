"""Shapes of graphs that people train through: each ends where torch AdamW ends, in both modes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from adamw_net import LR, Net, assert_same, batch, pair, train
from forge import ForgeAdamW


class TwoHeads(nn.Module):
    """Two linear layers of one weight, without an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24, bias=False)
        self.second.weight = self.first.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = F.one_hot(ids % 24, 24).float()
        return self.second(torch.tanh(self.first(h))).square().mean()


def partly_without_grad(net: Net, ids: Tensor) -> None:
    h = net.embed(ids)
    with torch.no_grad():
        h = h + net.block(h)
    h = h + net.block(h).detach() + net.block(h)
    net.head(h).square().mean().backward()


def evaluated(net: nn.Module, ids: Tensor) -> None:
    net.eval()
    net(ids).backward()


def sum_of_micro_batches(net: nn.Module, ids: Tensor) -> None:
    sum(net(row[None]) for row in ids).backward()


def disjoint(net: Net, ids: Tensor) -> None:
    F.cross_entropy(net.head(torch.ones(5, 24)), ids[0, :5]).backward()
    net.block(torch.ones(2, 24)).square().mean().backward()
    net.embed(ids).square().mean().backward()


def under_no_grad(net: nn.Module, ids: Tensor) -> None:
    loss = net(ids)
    with torch.no_grad():
        loss.backward()


def some_inputs(net: Net, ids: Tensor) -> None:
    net(ids).backward(inputs=[net.mix.weight, net.embed.weight])


def kept_graph(net: nn.Module, ids: Tensor) -> None:
    loss = net(ids)
    loss.backward(retain_graph=True)
    loss.backward()


def two_backwards_through_all(net: nn.Module, ids: Tensor) -> None:
    for row in ids:
        net(row[None]).backward()


BOTH: list[Callable] = [
    partly_without_grad,
    evaluated,
    sum_of_micro_batches,
    disjoint,
    under_no_grad,
    some_inputs,
]
SEVERAL: list[Callable] = [kept_graph, two_backwards_through_all]


def follow(update: str, run: Callable, ours: nn.Module, plain: nn.Module, steps: int = 4) -> None:
    optimizer = ForgeAdamW(ours, lr=LR, update=update)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    for _ in range(steps):
        ids = batch("cpu")
        for net, opt in ((ours, optimizer), (plain, reference)):
            run(net, ids)
            opt.step()
            opt.zero_grad()
    assert_same(ours, plain, steps)


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("run", BOTH)
def test_follows_torch(run, update):
    follow(update, run, *pair("cpu", tied=run is not disjoint))


@pytest.mark.parametrize("run", SEVERAL)
def test_several_backwards_are_for_the_step_mode(run):
    follow("step", run, *pair("cpu"))
    ours, _ = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    with pytest.raises(RuntimeError, match="second backward before step.*update='step'"):
        run(ours, batch("cpu"))
    optimizer.step()


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("tokens", [2, 7])  # factors, and a gradient that is smaller than they are
def test_two_linear_layers_of_one_weight(update, tokens):
    nets = [TwoHeads(), TwoHeads()]
    nets[1].load_state_dict(nets[0].state_dict())
    follow(update, lambda net, ids: net(ids[:, :tokens]).backward(), *nets)


@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_group_added_after_steps(update):
    ours, plain = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR, update=update)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    for _ in range(2):
        ids = batch("cpu")
        train(ours, optimizer, ids), train(plain, reference, ids)
    for net, opt in ((ours, optimizer), (plain, reference)):
        net.extra = nn.Linear(24, 24)
        net.extra.load_state_dict({"weight": torch.eye(24), "bias": torch.zeros(24)})
        opt.add_param_group({"params": net.extra.parameters(), "lr": LR / 3, "weight_decay": 0.0})
    for _ in range(3):
        ids = batch("cpu")
        for net, opt in ((ours, optimizer), (plain, reference)):
            (net(ids) + net.extra(net.embed(ids)).square().mean()).backward()
            opt.step()
            opt.zero_grad()
    assert_same(ours, plain, 5)
    assert [optimizer.state[p]["step"].item() for p in ours.extra.parameters()] == [3, 3]
    assert optimizer.state[ours.up.weight]["step"] == 5


@pytest.mark.parametrize("part", ["loss", "layers"])
@pytest.mark.parametrize(
    "device", ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
def test_a_kept_graph_of_an_optimized_model(device, part):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    model = forge.optimize(transformers.Qwen3ForCausalLM(config).to(device))
    optimizer = ForgeAdamW(model, lr=LR)
    ids = torch.randint(64, (1, 5), device=device)
    if part == "loss":
        loss = model(input_ids=ids, labels=ids).loss
    else:
        loss = model.model(input_ids=ids).last_hidden_state.square().mean()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward before step.*update='step'"):
        loss.backward()
    optimizer.step()
