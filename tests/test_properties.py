"""Random models under random sequences of what people do, against torch AdamW as the oracle."""

from __future__ import annotations

import copy
import io

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from forge import ForgeAdamW

LR = 1e-2
WIDTH = 6


class Net(nn.Module):
    """Blocks of random kinds between an embedding and a head that may share its weight."""

    def __init__(self, kinds, tied, checkpointed):
        super().__init__()
        self.embed = nn.Embedding(17, WIDTH)
        self.blocks = nn.ModuleList(_BLOCKS[kind]() for kind in kinds)
        self.head = nn.Linear(WIDTH, 17, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.checkpointed = checkpointed

    def forward(self, ids):
        h = self.embed(ids)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.checkpointed else block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), ids.flatten())


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 9),
            nn.Linear(9, WIDTH),
        )

    def forward(self, h):
        return h + self.down(F.gelu(self.up(self.norm(h))))


class Twice(nn.Module):
    """One weight: a layer called twice, and used outside of it."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, h):
        return self.mix(torch.tanh(self.mix(h))) + F.linear(h, self.mix.weight.t())


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, h):
        return h + self.conv(h.transpose(1, 2)).transpose(1, 2).mean(1, keepdim=True)


_BLOCKS = {
    "residual": Residual,
    "twice": Twice,
    "conv": Pooled,
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
}
models = st.builds(
    Net,
    kinds=st.lists(st.sampled_from(sorted(_BLOCKS)), max_size=3),
    tied=st.booleans(),
    checkpointed=st.booleans(),
)
batch = st.tuples(st.just("backward"), st.integers(1, 3), st.integers(1, 4), st.integers(0, 99))
action = st.one_of(
    batch,
    batch,
    st.tuples(st.just("step")),
    st.tuples(st.just("zero_grad")),
    st.tuples(st.just("reload")),
    st.tuples(st.just("freeze"), st.integers(0, 99)),
    st.tuples(st.just("unfreeze")),
    st.tuples(st.just("lr"), st.sampled_from([0.0, 1e-3, 1e-2])),
    st.tuples(st.just("clip"), st.sampled_from([1e-2, 1.0])),
)


class Pair:
    """The model under both optimizers; ``pending`` counts backwards since the last step."""

    def __init__(self, net, mode):
        self.mode = mode
        self.nets = (net, copy.deepcopy(net))
        ours, plain = self.nets
        self.optimizers = [
            self.build(ours, update=mode),
            torch.optim.AdamW(plain.parameters(), lr=LR),
        ]
        self.pending = 0

    @staticmethod
    def build(net, **kwargs):
        return ForgeAdamW(net, lr=LR, **kwargs)

    def backward(self, rows, columns, seed):
        if self.pending and self.mode == "backward":
            self.step()
        ids = torch.randint(0, 17, (rows, columns), generator=torch.Generator().manual_seed(seed))
        if not any(p.requires_grad for p in self.nets[0].parameters()):
            return
        losses = [net(ids) for net in self.nets]
        torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-4)
        for loss in losses:
            loss.backward()
        self.pending += 1

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.pending = 0

    def zero_grad(self):
        if self.mode == "step" or not self.pending:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.pending = 0

    def reload(self):
        if self.pending:
            return
        buffer = io.BytesIO()
        torch.save(self.optimizers[0].state_dict(), buffer)
        buffer.seek(0)
        self.optimizers[0].release()
        self.optimizers[0] = self.build(self.nets[0], update=self.mode)
        self.optimizers[0].load_state_dict(torch.load(buffer, weights_only=True))
        for group in self.optimizers[0].param_groups:
            group["lr"] = self.optimizers[1].param_groups[0]["lr"]

    def freeze(self, which):
        if not self.pending:
            for net in self.nets:
                parameters = list(net.parameters())
                parameters[which % len(parameters)].requires_grad_(False)

    def unfreeze(self):
        if not self.pending:
            for net in self.nets:
                net.requires_grad_(True)

    def lr(self, value):
        if not self.pending or self.mode == "step":
            for optimizer in self.optimizers:
                optimizer.param_groups[0]["lr"] = value

    def clip(self, norm):
        if self.mode == "step":
            norms = [nn.utils.clip_grad_norm_(net.parameters(), norm) for net in self.nets]
            torch.testing.assert_close(*norms, rtol=1e-3, atol=1e-5)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    net=models, mode=st.sampled_from(["backward", "step"]), actions=st.lists(action, max_size=14)
)
def test_follows_torch_adamw(net, mode, actions):
    torch.manual_seed(0)
    for parameter in net.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    pair = Pair(net, mode)
    for name, *arguments in actions:
        getattr(pair, name)(*arguments)
    pair.step()
    ours, plain = pair.nets
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        # Adam divides small numbers by small ones: a share of how far a weight may have moved.
        error = (p - q).abs().max().item()
        assert error < 0.02 * LR * (1 + len(actions)) ** 0.5, f"{name}: off by {error:.2e}"
    counts = [
        {n: float(opt.state[p]["step"]) for n, p in net.named_parameters() if opt.state.get(p)}
        for net, opt in zip(pair.nets, pair.optimizers, strict=True)
    ]
    assert counts[0] == counts[1]
