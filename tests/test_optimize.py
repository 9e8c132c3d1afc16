"""``forge.optimize``: the swapped model computes what the plain one computes."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

import forge
import forge.qwen3
from forge import ForgeAdamW, ForgeSGD
from forge.deferred import AppliedGradient
from forge.kernels import runtime
from forge.packed_linear import packed_linear, packed_view
from forge.tied import SplitUpdate

VOCAB = 199


@pytest.fixture
def interpreter(monkeypatch):
    """Everything through Triton's interpreter, where there is no GPU."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    monkeypatch.setattr(runtime, "interpret_cpu", True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def make(dtype: torch.dtype = torch.float32, tied: bool = True, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "tie_word_embeddings": tied,
            **changes,
        }
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        # Norm weights of exactly 1 would hide a norm applied to the wrong tensor.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.mul_(4.0)
    return model.to(dtype).train()


def batch(tokens: int = 13, rows: int = 2, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, tokens), generator=generator)
    labels = ids.clone()
    labels[0, 3:5] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: nn.Module, **inputs: Any) -> dict[str, Tensor]:
    """The loss, and every gradient by its parameter's name."""
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def same(ours: dict[str, Tensor], plain: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    assert ours.keys() == plain.keys()
    for name, truth in plain.items():
        distance = (ours[name] - truth).double().norm() / truth.double().norm().clamp(min=1e-30)
        assert distance <= tolerance, name


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


@pytest.mark.parametrize(
    ("optimizer", "tied"), [("forge", True), ("forge first", False), ("torch", True)]
)
def test_ten_steps(optimizer, tied):
    """Against the plain model with torch AdamW."""
    hyper = dict(lr=1e-2, weight_decay=0.1)
    plain, ours = make(tied=tied), make(tied=tied)
    theirs = torch.optim.AdamW(plain.parameters(), **hyper)
    if optimizer == "forge first":
        mine: Any = ForgeAdamW(ours, **hyper)
        forge.optimize(ours)
    else:
        forge.optimize(ours)
        mine = (
            ForgeAdamW(ours, **hyper)
            if optimizer == "forge"
            else torch.optim.AdamW(ours.parameters(), **hyper)
        )
    names = [name for name, _ in ours.named_parameters()]
    parameters = list(ours.parameters())
    for step in range(10):
        losses = []
        for model, opt in ((plain, theirs), (ours, mine)):
            loss = model(**batch(seed=step)).loss
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=2e-4), step
    assert names == [name for name, _ in plain.named_parameters()]
    assert all(a is b for a, b in zip(parameters, ours.parameters(), strict=True))
    for (name, a), b in zip(plain.named_parameters(), parameters, strict=True):
        assert (a - b).norm() <= 2e-3 * a.norm(), name


def test_no_weight_gradient_of_a_packed_layer_is_formed(monkeypatch):
    from forge import packed_linear as module

    def refuse(*_: Any) -> Tensor:
        raise AssertionError("a weight gradient was formed")

    model = forge.optimize(make(tied=False))
    optimizer = ForgeAdamW(model, lr=1e-3)
    monkeypatch.setattr(module, "_product", refuse)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model(**batch()).loss.backward()
    optimizer.step()
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_handed_over_head_in_the_interpreter(interpreter):
    """Untied, its gradient is never formed either; SGD's step shows the gradient itself."""
    plain, ours = make(tied=False, num_hidden_layers=1), make(tied=False, num_hidden_layers=1)
    inputs = batch(5)
    grads = gradients(plain, **inputs)
    optimizer = ForgeSGD(forge.optimize(ours), lr=0.5)
    seen = []
    weight = ours.lm_head.weight
    slot = optimizer._slots[[s.param is weight for s in optimizer._slots].index(True)]
    collect = slot.collect
    slot.collect = lambda x, dy, *rows: seen.append(dy.shape) or collect(x, dy)  # type: ignore[method-assign]
    before = {n: p.detach().clone() for n, p in ours.named_parameters()}
    (ours(**inputs).loss * 2).backward()
    assert seen == [(10, VOCAB)]
    moved = {n: (before[n] - p.detach()) for n, p in ours.named_parameters()}
    same({"loss": grads["loss"], **moved}, grads, tolerance=1e-4)


def test_gradients_of_norms_are_summed_in_one_launch(interpreter, monkeypatch):
    """Also of a weight that two layers share, and of one that the loss reads by itself."""
    from forge import queue
    from forge.kernels import qk_norm_rope, rms_norm

    def loss(model: Any) -> Tensor:
        return model(**batch(5)).loss + model.model.norm.weight.square().sum()

    plain, ours = make(), make()
    for model in (plain, ours):
        first, second = model.model.layers
        second.self_attn.k_norm.weight = first.self_attn.k_norm.weight
    loss(plain).backward()
    optimizer = ForgeSGD(forge.optimize(ours), lr=0.5)
    for module in (qk_norm_rope, rms_norm):
        monkeypatch.delattr(module, "column_sum")
    launches = []
    sums = queue.column_sums
    monkeypatch.setattr(queue, "column_sums", lambda parts: launches.append(parts) or sums(parts))
    before = {n: p.detach().clone() for n, p in ours.named_parameters()}
    loss(ours).backward()
    optimizer.step()
    # Two norms of C and q_norm a layer, and k_norm once; the last norm has a gradient already.
    assert [len(parts) for parts in launches] == [7]
    moved = {n: (before[n] - p.detach()) / 0.5 for n, p in ours.named_parameters()}
    same(moved, {n: p.grad for n, p in plain.named_parameters()}, tolerance=1e-4)


def test_tied_weight_in_the_interpreter(interpreter, monkeypatch):
    """Head and embedding hand over factors and rows; again SGD's step shows the gradient."""
    from forge.kernels import wgrad_auto

    monkeypatch.setattr(wgrad_auto, "SCRATCH_ELEMENTS", 64 * 48)
    plain, ours = make(num_hidden_layers=1), make(num_hidden_layers=1)
    inputs = batch(5)
    grads = gradients(plain, **inputs)
    before = {n: p.detach().clone() for n, p in ours.named_parameters()}
    optimizer = ForgeSGD(forge.optimize(ours), lr=1.0)
    weight = ours.lm_head.weight
    slot = optimizer._slots[[s.param is weight for s in optimizer._slots].index(True)]
    seen = []
    collect = slot.collect
    slot.collect = lambda x, dy, *rows: seen.append(tuple(dy.shape)) or collect(x, dy)  # type: ignore[method-assign]
    ours(**inputs).loss.backward()
    assert seen == [(10, VOCAB), (2, 5)] and isinstance(weight.grad, AppliedGradient)
    moved = {n: before[n] - p.detach() for n, p in ours.named_parameters()}
    same({"loss": grads["loss"], **moved}, grads, tolerance=1e-4)


def test_frozen_parts_get_no_gradient():
    models = [make(), forge.optimize(make())]
    for model in models:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in name or "up_proj" in name or "1.k_norm" in name)
    plain, ours = (gradients(model, **batch()) for model in models)
    same(ours, plain)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("optimizer", [None, ForgeAdamW])
def test_gradient_checkpointing(reentrant, optimizer):
    ours, plain = forge.optimize(make()), make()
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        ours.enable_input_require_grads()
    if optimizer is None:
        same(gradients(ours, **batch()), gradients(plain, **batch()))
        return
    opt, reference = ForgeAdamW(ours, lr=1e-2), torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for model, step in ((ours, opt), (plain, reference)):
        model(**batch()).loss.backward()
        step.step()
    for (name, a), b in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert (a - b).norm() <= 2e-3 * a.norm(), name


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


def test_checkpoint_in_the_interpreter(interpreter):
    """The gradient written over gate and up must not meet a recomputation."""
    ours = forge.optimize(make())
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    same(gradients(ours, **batch(5)), gradients(make(), **batch(5)))


def test_kept_graph_in_the_interpreter(interpreter):
    model = forge.optimize(make(num_hidden_layers=1))
    loss = model(**batch(5)).loss
    loss.backward(retain_graph=True)
    first = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    loss.backward()
    same({n: p.grad for n, p in model.named_parameters()}, first)


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


def test_large_logits_are_formed_in_slices(interpreter, monkeypatch):
    monkeypatch.setattr(forge.qwen3, "LOGITS_BYTES", 1)
    monkeypatch.setattr(forge.qwen3, "SLICE_BYTES", 1)
    inputs = batch(5)
    changes = dict(num_hidden_layers=1)
    same(gradients(forge.optimize(make(**changes)), **inputs), gradients(make(**changes), **inputs))


def close_after(ours, plain, lr):
    """Adam divides small numbers by small ones."""
    for (name, p), q in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert (p - q[1]).abs().max() < 0.02 * lr and (p - q[1]).abs().mean() < 1e-3 * lr, name


def test_slices_are_handed_to_the_optimizer(interpreter, monkeypatch):
    """As a capture does it: rows of the tied weight are updated slice by slice."""
    monkeypatch.setattr(forge.qwen3, "CAPTURED_LOGITS_BYTES", 1)
    ours, plain = forge.optimize(make(num_hidden_layers=1)), make(num_hidden_layers=1)
    optimizer, reference = ForgeAdamW(ours, lr=1e-2), torch.optim.AdamW(plain.parameters(), lr=1e-2)
    (slot,) = [slot for slot in optimizer._slots if slot.shared]
    start, firsts = optimizer._queue.start_split, []

    def started(*args):
        firsts.append(args[3])
        return start(slot, *args)

    slot.split = SplitUpdate(slot.name, started)
    ours(**batch(5)).loss.backward()
    plain(**batch(5)).loss.backward()
    optimizer.step(), reference.step()
    assert firsts == [VOCAB - 128, 0]
    close_after(ours, plain, 1e-2)


@pytest.mark.gpu
def test_slices_in_a_captured_step(monkeypatch):
    monkeypatch.setattr(forge.qwen3, "CAPTURED_LOGITS_BYTES", 1)
    ours, plain = forge.optimize(make().cuda()), make().cuda()
    optimizer, reference = ForgeAdamW(ours, lr=1e-3), torch.optim.AdamW(plain.parameters(), lr=1e-3)
    step = forge.TrainStep(ours, optimizer)
    for seed in range(4):
        inputs = {name: t.cuda() for name, t in batch(seed=seed).items()}
        loss, found = plain(**inputs).loss, step(**inputs)
        torch.testing.assert_close(found, loss.detach(), rtol=1e-4, atol=1e-4)
        loss.backward()
        reference.step(), reference.zero_grad()
    close_after(ours, plain, 1e-3)


def halve(_module: nn.Module, args: Any, output: Any = None) -> None:
    """Halves the gradient of what goes into, or comes out of, a layer."""
    seen = args[0] if output is None else output
    seen.register_hook(lambda grad: grad * 0.5)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_see_the_whole_gradient_between_layers(interpreter, register):
    found = []
    for change in (lambda model: model, forge.optimize):
        model = change(make())
        getattr(model.model.layers[1 if "pre" in register else 0], register)(halve)
        found.append(gradients(model, **batch()))
    same(*reversed(found))


def test_gradients_of_hidden_states(interpreter):
    found = []
    for change in (lambda model: model, forge.optimize):
        out = change(make())(**batch(), output_hidden_states=True)
        found.append(torch.autograd.grad(out.loss, out.hidden_states[1])[0])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)


class Own(nn.Module):
    """A block of one's own, around the model's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("wrapped", ["self_attn", "mlp", "input_layernorm", "mlp.down_proj"])
@pytest.mark.parametrize("before", [True, False])
def test_blocks_of_ones_own(wrapped, before):
    parent, _, name = f"model.layers.0.{wrapped}".rpartition(".")
    losses = []
    for optimized in (False, True):
        model = make()
        if optimized and not before:
            forge.optimize(model)
        owner = model.get_submodule(parent)
        setattr(owner, name, Own(getattr(owner, name)))
        if optimized and before:
            forge.optimize(model)
        losses.append(model(**batch()).loss)
        losses[-1].backward()
    torch.testing.assert_close(*losses)


def test_checkpoints(tmp_path):
    model = forge.optimize(make())
    plain = make().state_dict()
    assert list(model.state_dict()) == list(plain)
    model.save_pretrained(tmp_path / "hf")
    loaded = Qwen3ForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(loaded) is Qwen3ForCausalLM and loaded.config.architectures == ["Qwen3ForCausalLM"]
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, plain[name]), name
    forge.optimize(loaded)
    torch.save(model.state_dict(), tmp_path / "torch.pt")
    saved = torch.load(tmp_path / "torch.pt")
    for assign in (False, True):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.load_state_dict(saved, assign=assign)
        model.tie_weights()
        same(gradients(model, **batch()), gradients(make(), **batch()))


def groups(model: nn.Module) -> list[list[Tensor]]:
    found = []
    for layer in model.model.layers:
        a, m = layer.self_attn, layer.mlp
        found.append([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight])
        found.append([m.gate_proj.weight, m.up_proj.weight])
    return found


def test_packing_survives_conversions_and_copies():
    model = forge.optimize(make())
    assert all(packed_view(group) is not None for group in groups(model))
    model.to(torch.float64).to(torch.float32)
    assert all(packed_view(group) is None for group in groups(model))
    same(gradients(model, **batch()), gradients(make(), **batch()))
    assert all(packed_view(group) is not None for group in groups(model))
    twin = copy.deepcopy(model)
    same(gradients(twin, **batch()), gradients(make(), **batch()))
    ours = {p.data_ptr() for p in model.parameters()}
    assert not ours & {p.data_ptr() for p in twin.parameters()}


def test_neighbours_by_chance_are_not_packed():
    memory = torch.randn(6, 4)
    parts = [torch.from_numpy(memory.numpy()[a:b]) for a, b in ((0, 2), (2, 6))]
    assert parts[0].data_ptr() + parts[0].nbytes == parts[1].data_ptr()
    assert packed_view(parts) is None


def test_optimize_is_idempotent_and_undone():
    model = make()
    classes = [type(module) for module in model.modules()]
    names = [name for name, _ in model.named_modules()]
    parameters = list(model.parameters())
    state = copy.deepcopy(model.state_dict())
    assert forge.optimize(model) is model
    places = [p.data_ptr() for p in parameters]
    swapped = [type(module) for module in model.modules()]
    forge.optimize(model)
    assert swapped == [type(module) for module in model.modules()] != classes
    assert places == [p.data_ptr() for p in parameters]
    assert names == [name for name, _ in model.named_modules()]
    assert all(isinstance(m, c) for m, c in zip(model.modules(), classes, strict=True))
    for _ in range(2):
        forge.optimize(model, undo=True)
        assert classes == [type(module) for module in model.modules()]
        attributes = set().union(*(module.__dict__ for module in model.modules()))
        assert not attributes & {"forward", "_following"}
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    storages = {p.untyped_storage().data_ptr() for p in parameters}
    assert len(storages) == len(parameters)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])
    assert model(**batch()).logits is not None


@pytest.mark.parametrize("around", ["hook", "adapter"])
def test_undone_with_layers_that_are_no_longer_plain(around):
    model = forge.optimize(make())
    attention = model.model.layers[0].self_attn
    if around == "hook":
        attention.q_proj.register_forward_hook(lambda *_: None)
    else:
        attention.q_proj = Own(attention.q_proj)
    forge.optimize(model, undo=True)
    parameters = list(model.parameters())
    assert len({p.untyped_storage().data_ptr() for p in parameters}) == len(parameters)


def test_forge_optimizer_survives_optimize_and_undo():
    """Between steps, in both directions: states stay with their parameters."""
    plain, ours = make(), make()
    theirs, mine = torch.optim.AdamW(plain.parameters(), lr=1e-2), ForgeAdamW(ours, lr=1e-2)
    for step in range(6):
        if step % 2:
            forge.optimize(ours, undo=step == 3)
        for model, opt in ((plain, theirs), (ours, mine)):
            model(**batch(seed=step)).loss.backward()
            opt.step()
            opt.zero_grad()
    for (name, a), b in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert (a - b).norm() <= 2e-3 * a.norm(), name


class Adapter(nn.Module):
    """A LoRA layer as adapters build it: the plain layer inside, a low-rank branch beside."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.a = nn.Linear(base.in_features, 4, bias=False)
        self.b = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.b(self.a(x))


def adapt(model: Any) -> Any:
    torch.manual_seed(3)
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Adapter(layer.self_attn.v_proj)
        layer.mlp.down_proj = Adapter(layer.mlp.down_proj)
    return model


@pytest.mark.parametrize("first", ["optimize", "adapt"])
def test_adapters(first):
    plain = adapt(make())
    ours = forge.optimize(adapt(make())) if first == "adapt" else adapt(forge.optimize(make()))
    same(gradients(ours, **batch()), gradients(plain, **batch()))


@pytest.mark.parametrize("first", ["optimize", "adapt"])
def test_peft(first):
    peft = pytest.importorskip("peft")

    def wrapped(model: Any) -> Any:
        torch.manual_seed(3)
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj", "gate_proj"], init_lora_weights=False
        )
        return peft.get_peft_model(model, config)

    ours = forge.optimize(wrapped(make())) if first == "adapt" else wrapped(forge.optimize(make()))
    same(gradients(ours, **batch()), gradients(wrapped(make()), **batch()))
    merged = [m.merge_and_unload().eval()(**batch()).logits for m in (ours, wrapped(make()))]
    torch.testing.assert_close(*merged, rtol=1e-4, atol=1e-4)


def test_signature_and_pickles_stay(tmp_path):
    model = forge.optimize(make())
    assert inspect.signature(model.forward) == inspect.signature(make().forward)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    same(gradients(loaded, **batch()), gradients(make(), **batch()))


def test_hooks_of_projections_run():
    model = forge.optimize(make())
    seen = []
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *_: seen.append("k"))
    model.model.layers[0].self_attn.q_norm.register_forward_hook(lambda *_: seen.append("q_norm"))
    model.model.layers[1].mlp.up_proj.register_full_backward_hook(lambda *_: seen.append("up"))
    model.model.norm.register_forward_hook(lambda *_: seen.append("norm"))
    found = gradients(model, **batch())
    assert sorted(seen) == ["k", "norm", "q_norm", "up"]
    same(found, gradients(make(), **batch()))


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_the_activation_run(kind):
    calls = []

    def halve(_module: nn.Module, values: Any, *output: Any) -> Any:
        calls.append(kind)
        return output[0] * 0.5 if kind == "forward" else (values[0] * 0.5,)

    found = []
    for change in (lambda model: model, forge.optimize):
        model = change(make())
        getattr(model.model.layers[0].mlp.act_fn, f"register_{kind}_hook")(halve)
        found.append(gradients(model, **batch()))
    assert len(calls) == 2
    same(*reversed(found))


def test_an_activation_of_ones_own():
    found = []
    for change in (lambda model: model, forge.optimize):
        model = change(make())
        model.model.layers[1].mlp.act_fn = nn.GELU()
        found.append(gradients(model, **batch()))
    same(*reversed(found))


def test_hooks_of_all_modules_run_for_each():
    found = []
    for change in (lambda model: model, forge.optimize):
        model = change(make())
        called: Counter[nn.Module] = Counter()
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, *_, called=called: called.update([module])
        )
        try:
            grads = gradients(model, **batch())
        finally:
            handle.remove()
        found.append((grads, {name: called[module] for name, module in model.named_modules()}))
    (plain, calls), (ours, our_calls) = found
    assert our_calls == calls
    same(ours, plain)


def test_a_sum_changed_by_a_hook_is_normalised_again():
    def halve(_module: nn.Module, _inputs: Any, out: Tensor) -> None:
        out.mul_(0.5)

    models = [make(), forge.optimize(make())]
    for model in models:
        model.model.layers[0].register_forward_hook(halve)
    with torch.no_grad():
        a, b = (model(**batch()).logits for model in models)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


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


def test_weights_changed_before_backward_are_refused():
    model = forge.optimize(make())
    loss = model(**batch()).loss
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_create_graph_is_refused():
    model = forge.optimize(make())
    with pytest.raises(RuntimeError, match="create_graph"):
        model(**batch()).loss.backward(create_graph=True)


def test_packed_linear_leaves_alone_what_it_cannot_pack():
    x = torch.randn(3, 8)
    a, b = nn.Linear(8, 4, bias=False), nn.Linear(8, 6, bias=False)
    y = packed_linear(x, [a, b])
    torch.testing.assert_close(y, torch.cat([a(x), b(x)], -1))
    assert packed_linear(x, [a, nn.Linear(8, 6)]) is None  # bias
    assert packed_linear(x, [a, nn.Linear(8, 6, bias=False).double()]) is None
    assert packed_linear(x, [a, nn.Identity()]) is None

    def transformed(row: Tensor) -> Tensor:
        assert packed_linear(row, [a, b]) is None
        return a(row)

    torch.testing.assert_close(torch.func.vmap(transformed)(x), a(x))


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


@pytest.mark.gpu
def test_forward_and_backward_can_be_captured():
    """Nothing synchronises, and a replay reads new tokens."""
    model = forge.optimize(make(torch.bfloat16).cuda())
    static = {name: t.cuda() for name, t in batch().items()}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            gradients(model, **static)
    torch.cuda.synchronize()
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        loss = model(**static).loss
        loss.backward()
    for name, t in batch(seed=9).items():
        static[name].copy_(t)
    graph.replay()
    found = {"loss": loss.detach().clone()}
    found |= {n: p.grad.clone() for n, p in model.named_parameters()}
    same(found, gradients(model, **static), tolerance=1e-3)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.Embedding(3, 2))])
def test_unsupported_architectures(model):
    with pytest.raises(ValueError, match="supports Qwen3 .*ForgeAdamW"):
        forge.optimize(model)


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_that_wait_for_the_step(tied):
    """``update="step"``: every gradient can be read, and all are clipped together."""
    plain, ours = make(tied=tied), forge.optimize(make(tied=tied))
    optimizer = ForgeAdamW(ours, lr=1e-2, update="step", max_grad_norm=0.5)
    same(gradients(ours, **batch()), gradients(plain, **batch()))
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    reference.step()
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-4, atol=0)
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (p - q).norm() <= 1e-3 * q.norm()


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match="model is a str: must be a torch.nn.Module"):
        forge.optimize("Qwen/Qwen3-0.6B")
