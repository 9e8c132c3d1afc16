"""A small net, its plain copy, and how close two trained copies must be: for several test files."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

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
