"""A run that is saved and resumed, through every usual file format, is the run that was not."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from forge import ForgeAdamW
from forge.state_dict import FORMAT

ROOT = Path(__file__).resolve().parents[1]
FORMATS = [
    (states, dtype, update)
    for states in ("bf16", "fp32", "int8")
    for dtype in (torch.bfloat16, torch.float32)
    for update in ("backward", "step")
]
every_format = pytest.mark.parametrize(("states", "dtype", "update"), FORMATS)


class Net(nn.Module):
    """A tied head and embedding, biases, a norm, a frozen weight, rows of more than one block."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        self.up, self.norm, self.down = nn.Linear(24, 136), nn.LayerNorm(136), nn.Linear(136, 24)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        h = self.down(self.norm(torch.tanh(self.up(self.embed(ids)))))
        return F.cross_entropy(self.head(self.frozen(h)).flatten(0, 1).float(), ids.flatten())


def make(states, dtype, update, seed=0):
    """A model whose weights depend on ``seed``, and its optimizer of two groups."""
    torch.manual_seed(seed)
    net = Net().to(dtype)
    named = dict(net.named_parameters())
    decayed = [(n, p) for n, p in named.items() if p.ndim > 1]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": [(n, p) for n, p in named.items() if p.ndim < 2], "weight_decay": 0.0},
    ]
    # Rounding is a function of seed, step and place: a resumed run needs the same seed.
    options = dict(states=states, update=update, seed=5, model=net)
    optimizer = ForgeAdamW(groups, lr=1e-2 if seed == 0 else 0.5, **options)
    return net, optimizer


def train(net, optimizer, steps):
    for i in steps:
        ids = torch.randint(0, 40, (4, 8), generator=torch.Generator().manual_seed(i))
        net(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.9  # as a scheduler does


def snapshot(net, optimizer):
    """Copies of the weights, of the states by parameter name, and of the groups as saved."""
    states = {
        name: copy.deepcopy(dict(optimizer.state[param]))
        for name, param in net.named_parameters()
        if param in optimizer.state
    }
    groups = copy.deepcopy(optimizer.state_dict()["param_groups"])
    return copy.deepcopy(net.state_dict()), states, groups


def assert_bit_equal(found, truth):
    assert found[2] == truth[2]
    assert found[1].keys() == truth[1].keys() and "frozen.weight" not in found[1]
    pairs = [(found[0], truth[0]), *((found[1][name], truth[1][name]) for name in truth[1])]
    for mine, theirs in pairs:
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert mine[name].dtype == value.dtype and torch.equal(mine[name], value), name


def check_resumed(kind, save, load):
    """``save(net, optimizer)`` and ``load(net, optimizer)`` amid a run change nothing."""
    net, optimizer = make(*kind)
    train(net, optimizer, range(4))
    save(net, optimizer)
    saved = snapshot(net, optimizer)
    train(net, optimizer, range(4, 8))
    other, resumed = make(*kind, seed=1)
    load(other, resumed)
    assert_bit_equal(snapshot(other, resumed), saved)
    train(other, resumed, range(4, 8))
    assert_bit_equal(snapshot(other, resumed), snapshot(net, optimizer))


@every_format
def test_torch_distributed_checkpoint(states, dtype, update, tmp_path):
    def save(net, optimizer):
        model, optim = get_state_dict(net, optimizer)
        dcp.save({"model": model, "optim": optim}, checkpoint_id=tmp_path, no_dist=True)

    def load(net, optimizer):
        model, optim = get_state_dict(net, optimizer)
        both = {"model": model, "optim": optim}
        dcp.load(both, checkpoint_id=tmp_path, no_dist=True)
        set_state_dict(
            net, optimizer, model_state_dict=both["model"], optim_state_dict=both["optim"]
        )

    check_resumed((states, dtype, update), save, load)


@every_format
def test_safetensors(states, dtype, update, tmp_path):
    def save(net, optimizer):
        saved = optimizer.state_dict()
        flat = {f"{i}/{k}": v for i, state in saved["state"].items() for k, v in state.items()}
        groups = json.dumps(saved["param_groups"])
        save_file(flat, tmp_path / "optimizer.safetensors", {"param_groups": groups})
        weights = {k: v for k, v in net.state_dict().items() if k != "head.weight"}  # tied
        save_file(weights, tmp_path / "model.safetensors")

    def load(net, optimizer):
        from safetensors import safe_open

        state = {}
        for key, value in load_file(tmp_path / "optimizer.safetensors").items():
            number, name = key.split("/")
            state.setdefault(int(number), {})[name] = value
        with safe_open(tmp_path / "optimizer.safetensors", "pt") as file:
            groups = json.loads(file.metadata()["param_groups"])
        net.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        for group in optimizer.param_groups:
            group["betas"] = tuple(group["betas"])  # JSON has no tuples

    check_resumed((states, dtype, update), save, load)


@every_format
def test_torch_save(states, dtype, update, tmp_path):
    def save(net, optimizer):
        both = {"model": net.state_dict(), "optim": optimizer.state_dict()}
        torch.save(both, tmp_path / "checkpoint.pt")

    def load(net, optimizer):
        both = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        net.load_state_dict(both["model"])
        optimizer.load_state_dict(both["optim"])

    check_resumed((states, dtype, update), save, load)


def test_preparing_a_fresh_optimizer_for_dcp_moves_no_weight():
    net, optimizer = make("int8", torch.bfloat16, "backward")
    before = copy.deepcopy(net.state_dict())
    get_state_dict(net, optimizer)  # takes a step with zero gradients and lr 0 to make the states
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert optimizer.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("version", [0, FORMAT + 1, "1", None])
def test_a_format_that_is_not_known_is_refused_and_changes_nothing(version):
    net, optimizer = make("int8", torch.float32, "backward")
    train(net, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    assert [group["forge_format"] for group in saved["param_groups"]] == [FORMAT] * 2
    assert all("forge_format" not in group for group in optimizer.param_groups)
    saved["param_groups"][1]["forge_format"] = version
    saved["param_groups"][0]["lr"] = 7.0
    before = snapshot(net, optimizer)
    with pytest.raises(ValueError, match="param group 1: forge_format=.*reads 1: load it with"):
        optimizer.load_state_dict(saved)
    assert_bit_equal(snapshot(net, optimizer), before)


def test_the_format_survives_a_torch_optimizer_in_between():
    net, optimizer = make("fp32", torch.float32, "backward")
    train(net, optimizer, range(2))
    plain = torch.optim.AdamW([{"params": list(g["params"])} for g in optimizer.param_groups])
    plain.load_state_dict(optimizer.state_dict())
    saved = copy.deepcopy(plain.state_dict())
    assert saved["param_groups"][0]["forge_format"] == FORMAT
    before = snapshot(net, optimizer)
    optimizer.load_state_dict(saved)
    assert_bit_equal(snapshot(net, optimizer)[:2] + ([],), before[:2] + ([],))


SAVE = re.compile(
    r"^```python\n(import os\n.*?def save_checkpoint.*?)^```$", re.MULTILINE | re.DOTALL
)
KILLED = """
import os, signal, sys, types
import torch
from torch import nn
from forge import ForgeAdamW

{define}

net = nn.Linear(300, 300)
optimizer = ForgeAdamW(net, lr=1e-2)
def train():
    net(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

train()
{call}
train()
real_save, real_fsync, real_replace = torch.save, os.fsync, os.replace
def die(*arguments, **named):
    os.kill(os.getpid(), signal.SIGKILL)
class Torn:
    # Writes half of a checkpoint, then the process is gone.
    def __init__(self, file): self.file, self.left = file, 200_000
    def write(self, data):
        data = bytes(data)
        self.file.write(data[: self.left])
        self.left -= len(data)
        if self.left <= 0:
            self.file.flush()
            die()
        return len(data)
    def flush(self): self.file.flush()
def torn(what, file):
    if isinstance(file, (str, os.PathLike)):
        with open(file, "wb") as target:
            real_save(what, Torn(target))
    real_save(what, Torn(file))
if "{when}" == "write": torch.save = torn
if "{when}" == "fsync": os.fsync = die
if "{when}" == "replace": os.replace = die
{call}
raise SystemExit("was not killed")
"""


def killed(tmp_path, when, define, call):
    """The checkpoint that is left when its second save is killed at ``when``."""
    code = KILLED.format(define=define, call=call, when=when)
    env = dict(os.environ, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, timeout=120
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    return tmp_path / "checkpoint.pt"


@pytest.mark.parametrize("when", ["write", "fsync", "replace"])
def test_a_killed_save_leaves_the_checkpoint_before(when, tmp_path):
    (define,) = SAVE.findall((ROOT / "docs" / "training.md").read_text(encoding="utf-8"))
    call = 'save_checkpoint("checkpoint.pt", net, optimizer, 1)'
    path = killed(tmp_path, when, define.partition("\n\n\nsave_checkpoint")[0], call)
    saved = torch.load(path, weights_only=True)
    assert saved["optimizer"]["state"][0]["step"] == 1
    net = nn.Linear(300, 300)
    net.load_state_dict(saved["model"])
    ForgeAdamW(net).load_state_dict(saved["optimizer"])


def test_the_kill_destroys_a_checkpoint_that_is_overwritten_in_place(tmp_path):
    define = (
        "def save_checkpoint(path, model, optimizer, step):\n"
        '    torch.save({"model": model.state_dict()}, path)\n'
    )
    call = 'save_checkpoint("checkpoint.pt", net, optimizer, 1)'
    path = killed(tmp_path, "write", define, call)
    with pytest.raises(RuntimeError):
        torch.load(path, weights_only=True)
