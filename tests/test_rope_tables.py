"""The tables of the rotary embedding: what transformers' module computes, in one kernel."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

import forge
from forge import qwen3
from forge.kernels import rope_tables as module
from forge.kernels.rope_tables import counted_rope_tables, rope_tables

SIZES = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2)
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "llama3": {
        **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 64,
    },
    # Its results are scaled.
    "yarn": {
        **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
        "original_max_position_embeddings": 64,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
}


def config(rope="default", size=16, **changes):
    return Qwen3Config(
        **SIZES, **HEADS, head_dim=size, rope_parameters=dict(ROPES[rope]), **changes
    )


def ulp(x):
    """Of each element's dtype."""
    wide = x.double().abs().clamp(min=torch.finfo(x.dtype).smallest_normal)
    return torch.exp2(wide.log2().floor()) * torch.finfo(x.dtype).eps


def check(found, wanted, scaling=1.0):
    # What differs by one unit before it is scaled may differ by two behind it.
    units = 1 if scaling == 1 else 2
    for a, b in zip(found, wanted, strict=True):
        a = a.cpu()
        assert a.dtype == b.dtype and a.shape == b.shape
        assert ((a.double() - b.double()).abs() <= units * ulp(b)).all()


POSITIONS = {
    "in order": torch.arange(37)[None],
    "packed": torch.cat([torch.arange(9), torch.arange(14)])[None].expand(2, -1),
    "far": torch.tensor([[0, 1, 2**15 - 1, 40_959], [7, 131_071, 3, 5]]),
    "int32": torch.arange(5, dtype=torch.int32)[None],
    "none": torch.arange(0)[None],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize(("rope", "size"), [("default", 128), ("llama3", 16), ("yarn", 80)])
def test_values_are_those_of_transformers(device, dtype, positions, rope, size):
    theirs = Qwen3RotaryEmbedding(config(rope, size))
    wanted = theirs(torch.empty(1, dtype=dtype), positions)
    inv_freq, scaling = theirs.inv_freq.to(device), theirs.attention_scaling
    assert (scaling != 1) == (rope == "yarn")
    check(rope_tables(inv_freq, positions.to(device), dtype, scaling), wanted, scaling)


@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_positions_in_order_are_made_on_the_way(device, tokens):
    theirs = Qwen3RotaryEmbedding(config("yarn"))
    inv_freq, scaling = theirs.inv_freq.to(device), theirs.attention_scaling
    positions, *tables = counted_rope_tables(inv_freq, tokens, torch.float32, scaling)
    assert positions.dtype == torch.int64
    assert torch.equal(positions.cpu(), torch.arange(tokens)[None])
    check(tables, theirs(torch.empty(1), positions.cpu()), scaling)


def test_frequencies_of_a_converted_model(device):
    """``model.to(bfloat16)`` rounds them too; angles stay fp32."""
    theirs = Qwen3RotaryEmbedding(config()).to(torch.bfloat16)
    found = rope_tables(
        theirs.inv_freq.to(device), torch.arange(50)[None].to(device), torch.float32
    )
    check(found, theirs(torch.empty(1), torch.arange(50)[None]))


# -- in a model -------------------------------------------------------------------------------


@pytest.fixture
def calls(interpreter, monkeypatch):
    """Launches of the kernel, in the interpreter: whether each also made the positions."""
    found, launch = [], module._launch

    def counting(*args, count):
        found.append(count)
        return launch(*args, count=count)

    monkeypatch.setattr(module, "_launch", counting)
    return found


def make(rope="default", **changes):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config(rope, **changes)).train()


def loss(model, **inputs):
    ids = torch.arange(23)[None] * 5 % 97
    return model(**({"input_ids": ids, "labels": ids} | inputs)).loss.item()


@pytest.mark.parametrize(
    ("inputs", "made"),
    [
        ({}, True),
        ({"position_ids": torch.arange(23)[None] + 9}, False),
        ({"attention_mask": torch.tensor([[0] * 4 + [1] * 19])}, False),
        ({"input_ids": None, "inputs_embeds": torch.ones(1, 23, 32)}, True),
    ],
    ids=["in order", "given", "padded", "embeddings"],
)
def test_one_launch_a_forward_pass(calls, inputs, made):
    found = loss(forge.optimize(make()), **inputs)
    assert calls == [made]
    assert found == pytest.approx(loss(make(), **inputs), rel=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_dynamic_frequencies_are_left_to_transformers(calls, implementation):
    changes = dict(max_position_embeddings=16, attn_implementation=implementation)
    found = loss(forge.optimize(make("dynamic", **changes)))
    assert not calls
    assert found == pytest.approx(loss(make("dynamic", **changes)), rel=1e-5)


def test_positions_that_were_written_to_count_as_given(calls):
    rotary = forge.optimize(make()).model.rotary_emb
    x = torch.empty(1)
    for spoil in (lambda p: p.add_(3), lambda p: p):
        positions = rotary.count(5, x.dtype)
        positions = spoil(positions)
        check(rotary(x, positions), Qwen3RotaryEmbedding(config())(x, positions))
    half = torch.empty(1, dtype=torch.float16)
    assert rotary(half, rotary.count(5, x.dtype))[0].dtype == torch.float16
    assert calls == [True, False, True, True, False]


def test_a_hook_sees_every_call(calls):
    model = forge.optimize(make())
    seen = []
    model.model.rotary_emb.register_forward_hook(lambda *_: seen.append(None))
    assert math.isfinite(loss(model)) and seen == [None] and calls == [False]


def test_undo():
    model = forge.optimize(make())
    assert type(model.model.rotary_emb) is qwen3.ForgeQwen3RotaryEmbedding
    forge.optimize(model, undo=True)
    assert type(model.model.rotary_emb) is Qwen3RotaryEmbedding
