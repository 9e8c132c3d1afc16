"""A small net trained by TrainStep and by the loop it stands for: for several test files."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from forge import ForgeAdamW

LR = 1e-2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16, bias=False)
        self.head = nn.Linear(16, 31, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels=None, scale=1.0):
        h = self.embed(ids)
        h = h + self.down(F.gelu(self.up(self.norm(h))))
        labels = ids if labels is None else labels
        return scale * F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def pair(device):
    torch.manual_seed(3)
    net = Net().to(device)
    return net, copy.deepcopy(net)


def loop(net, optimizer, ids, **kwargs):
    loss = net(ids, **kwargs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def batches(count, device, shape=(2, 6)):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 31, shape, generator=generator).to(device) for _ in range(count)]


def assert_equal(a, b):
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        if p.is_cuda:
            # A captured step sums the parts of a tied weight's gradient in another order.
            assert torch.allclose(p, q, rtol=1e-5, atol=1e-6), name
        else:
            assert torch.equal(p, q), name


def optimizers(a, b, **kwargs):
    # One path for both: `auto` would take another one in a graph, of another order of sums.
    path = "auto" if next(a.parameters()).device.type == "cpu" else "tiles"
    return [ForgeAdamW(net, lr=LR, weight_decay=0.1, path=path, **kwargs) for net in (a, b)]
