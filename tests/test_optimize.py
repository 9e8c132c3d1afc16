"""``forge.optimize``: the swapped model computes what the plain one computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import forge
from small_qwen3 import batch, gradients, make, same


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tokens", [2, 37])
def test_loss_and_every_gradient(tied, tokens):
    inputs = batch(tokens)
    same(gradients(forge.optimize(make(tied=tied)), **inputs), gradients(make(tied=tied), **inputs))


def test_loss_and_every_gradient_in_the_interpreter(interpreter):
    inputs = batch(7)
    same(gradients(forge.optimize(make()), **inputs), gradients(make(), **inputs))


def test_bf16_loses_no_more_than_the_plain_model():
    inputs = batch(37)
    truth = gradients(make(), **inputs)
    plain, ours = gradients(make(torch.bfloat16), **inputs), make(torch.bfloat16)
    ours = gradients(forge.optimize(ours), **inputs)

    def error(found: dict[str, Tensor]) -> float:
        flat = torch.cat([(found[n].double() - truth[n].double()).flatten() for n in truth])
        return flat.norm().item()

    assert error(ours) <= error(plain) * 1.05
    assert abs(ours["loss"] - truth["loss"]) <= abs(plain["loss"] - truth["loss"]) + 1e-3


def packed_mask() -> dict[str, Tensor]:
    """Two sequences of one row: positions start again, and attention stays within each."""
    part = torch.tensor([0] * 5 + [1] * 8)
    mask = (part[:, None] == part[None, :]) & torch.ones(13, 13).tril().bool()
    positions = torch.cat([torch.arange(5), torch.arange(8)])
    return {
        "attention_mask": torch.where(mask, 0.0, -1e9)[None, None],
        "position_ids": positions[None],
    }


INPUTS: dict[str, dict[str, Any]] = {
    "padding": {"attention_mask": torch.tensor([[1] * 13, [0] * 4 + [1] * 9])},
    "positions": {"position_ids": torch.stack([torch.arange(13) + 3, torch.arange(13) * 2])},
    "packed positions": {
        "position_ids": torch.cat([torch.arange(5), torch.arange(8)])[None],
        "use_cache": False,
    },
    "packed mask": packed_mask(),
    "count": {"num_items_in_batch": torch.tensor(50)},
    "plain count": {"num_items_in_batch": 50},
    "shifted": {"shift_labels": batch(seed=5)["labels"]},
    "other ignored label": {"ignore_index": 7},
    "cache": {"use_cache": True},
}


@pytest.mark.parametrize("extra", INPUTS.values(), ids=INPUTS)
def test_inputs(extra):
    rows = 1 if "packed" in str(list(extra)) else 2
    inputs = {**batch(rows=rows), **extra}
    if "ignore_index" in extra:
        inputs["labels"] = inputs["labels"].masked_fill(inputs["labels"] == -100, 7)
    same(gradients(forge.optimize(make()), **inputs), gradients(make(), **inputs))


CONFIGS: dict[str, dict[str, Any]] = {
    "eager attention": {"attn_implementation": "eager"},
    "attention bias": {"attention_bias": True},
    "gelu": {"hidden_act": "gelu"},
    "sliding window": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "scaled rope": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 64,
        }
    },
    "untied": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_configurations(changes):
    inputs = batch()
    same(gradients(forge.optimize(make(**changes)), **inputs), gradients(make(**changes), **inputs))


def test_inputs_embeds_and_their_gradient():
    grads = []
    for model in (make(), forge.optimize(make())):
        embeds = torch.linspace(-1, 1, 2 * 13 * 48).view(2, 13, 48).requires_grad_()
        found = gradients(model, inputs_embeds=embeds, labels=batch()["labels"])
        grads.append({**found, "embeds": embeds.grad})
    same(grads[1], grads[0])


@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "no_grad below"])
def test_layers_called_by_hand(way):
    """What a sum carries to the next norm must not bring along a graph that is not the sum's."""
    found = []
    for model in (make(), forge.optimize(make())):
        start = torch.linspace(-1, 1, 13 * 48).view(1, 13, 48).requires_grad_()
        rotation = model.model.rotary_emb(start, torch.arange(13)[None])
        h = start
        for i, layer in enumerate(model.model.layers):

            def call(h: Tensor, layer: nn.Module = layer, rotation: Any = rotation) -> Tensor:
                return layer(h, attention_mask=None, position_embeddings=rotation)

            if way == "no_grad below":
                with torch.set_grad_enabled(i > 0):
                    h = call(h)
            else:
                h = checkpoint(call, h, use_reentrant=way == "reentrant")
        model.model.norm(h).square().mean().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append(grads if start.grad is None else {**grads, "start": start.grad})
    same(found[1], found[0])


def test_evaluation_gives_logits_and_generates_the_same():
    plain, ours = make().eval(), forge.optimize(make()).eval()
    inputs = batch()
    with torch.no_grad():
        a, b = plain(**inputs), ours(**inputs)
    torch.testing.assert_close(a.logits, b.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(a.loss, b.loss)
    prompt = inputs["input_ids"][:, :4]
    arguments = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    for extra in ({}, {"use_cache": False}, {"num_beams": 2}):
        found = [model.generate(prompt, **arguments, **extra) for model in (plain, ours)]
        assert torch.equal(*found)
    with torch.inference_mode():
        assert torch.equal(plain.generate(prompt, **arguments), ours.generate(prompt, **arguments))


@pytest.mark.parametrize("training", [True, False])
def test_hidden_states_and_attentions(training):
    changes = dict(attn_implementation="eager")
    outs = []
    for model in (make(**changes), forge.optimize(make(**changes))):
        arguments = dict(output_hidden_states=True, output_attentions=True)
        outs.append(model.train(training)(**batch(), **arguments))
    for a, b in zip(outs[0].hidden_states, outs[1].hidden_states, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    for a, b in zip(outs[0].attentions, outs[1].attentions, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_logits_in_training():
    inputs = batch()
    model = forge.optimize(make())
    assert model(**inputs).logits is None
    plain = make()(**inputs)
    kept = forge.optimize(model, fused_loss=False)(**inputs)
    torch.testing.assert_close(kept.logits, plain.logits, rtol=1e-4, atol=1e-4)
    again = forge.optimize(model)
    assert again(**inputs).logits is None
    assert again(inputs["input_ids"], labels=inputs["labels"]).logits is None  # positional
    loss, *_ = again(**inputs, return_dict=False)
    torch.testing.assert_close(loss, plain.loss)
    few = {"logits_to_keep": 4, "labels": inputs["labels"][:, -4:]}
    assert again(inputs["input_ids"], **few).logits.shape[1] == 4
    again.loss_function = lambda logits, labels, **_: logits.square().mean()
    torch.testing.assert_close(again(**inputs).loss, plain.logits.square().mean())


def test_gradients_of_hidden_states(interpreter):
    found = []
    for change in (lambda model: model, forge.optimize):
        out = change(make())(**batch(), output_hidden_states=True)
        found.append(torch.autograd.grad(out.loss, out.hidden_states[1])[0])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)


def test_compile_sees_the_plain_model():
    model = forge.optimize(make(num_hidden_layers=1))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    same(
        gradients(compiled, **batch()),
        {
            "_orig_mod." * (name != "loss") + name: grad
            for name, grad in gradients(make(num_hidden_layers=1), **batch()).items()
        },
    )


def test_autocast():
    inputs = batch(37)
    truth = gradients(make(), **inputs)
    errors = []
    for model in (make(), forge.optimize(make())):
        with torch.autocast("cpu", torch.bfloat16):
            found = gradients(model, **inputs)
        assert found.keys() == truth.keys()
        errors.append(
            torch.cat([(found[n] - truth[n]).double().flatten() for n in truth]).norm().item()
        )
    assert errors[1] <= 1.1 * errors[0]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 129, 513])
def test_on_a_gpu(tokens):
    """bf16 against the plain model's loss of precision, both against fp32 on the CPU."""
    inputs = batch(tokens)
    truth = gradients(make(), **inputs)
    errors = []
    for model in (make(torch.bfloat16), forge.optimize(make(torch.bfloat16))):
        found = gradients(model.cuda(), **{k: v.cuda() for k, v in inputs.items()})
        errors.append(
            torch.cat([(found[n].cpu() - truth[n]).double().flatten() for n in truth]).norm().item()
        )
    assert errors[1] <= 1.05 * errors[0]


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.Embedding(3, 2))])
def test_unsupported_architectures(model):
    with pytest.raises(ValueError, match="supports Qwen3 .*ForgeAdamW"):
        forge.optimize(model)


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match="model is a str: must be a torch.nn.Module"):
        forge.optimize("Qwen/Qwen3-0.6B")
