"""examples/ run, and train as they do with torch.optim.AdamW: the loops of other libraries."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge import ForgeAdamW
from forge.deferred import DeferredGradient

transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NEEDS = {
    "hf_trainer": "accelerate",
    "accelerate_loop": "accelerate",
    "peft_lora": "peft",
    "lightning_module": "lightning",
}
LR = 3e-3


@pytest.fixture(autouse=True)
def _examples_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def example(name: str) -> ModuleType:
    pytest.importorskip(NEEDS[name], reason=f"examples/{name}.py needs {NEEDS[name]}")
    return importlib.import_module(name)


def ours(model: nn.Module, update: str = "step", **hyper: Any) -> ForgeAdamW:
    return ForgeAdamW(model, update=update, **{"lr": LR, **hyper})


def in_backward(model: nn.Module, **hyper: Any) -> ForgeAdamW:
    return ours(model, "backward", **hyper)


def torchs(model: nn.Module, **hyper: Any) -> torch.optim.AdamW:
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(params, **{"lr": LR, **hyper})


def assert_same(a: nn.Module, b: nn.Module) -> None:
    """fp32 accuracy: within a small part of one step's length."""
    mine, theirs = (dict(model.named_parameters()) for model in (a, b))
    assert mine.keys() == theirs.keys()
    for name, p in mine.items():
        error = (p - theirs[name]).abs().max().item()
        assert error < 2e-3 * LR, f"{name}: off by {error:.2e}"


def test_these_are_all_examples():
    assert {file.stem for file in EXAMPLES.glob("*.py")} == {*NEEDS, "tiny_qwen3"}


@pytest.mark.parametrize("name", NEEDS)
def test_examples_run(name):
    example(name)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_trainer_clips_accumulates_and_schedules(tmp_path):
    hf = example("hf_trainer")
    mine = hf.train(tmp_path / "ours", ours)
    theirs = hf.train(tmp_path / "torch", torchs)
    assert_same(mine.model, theirs.model)
    norms = [
        [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        for trainer in (mine, theirs)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) and max(norms[0]) > 1  # it clipped

    # Saved half way; what resumes there ends where the others did, whoever saved it.
    half = f"checkpoint-{hf.STEPS // 2}"
    saved = torch.load(tmp_path / "ours" / half / "optimizer.pt", weights_only=True)
    assert {float(state["step"]) for state in saved["state"].values()} == {hf.STEPS / 2}
    resumed = hf.train(tmp_path / "again", ours, resume=str(tmp_path / "ours" / half))
    assert_same(resumed.model, mine.model)
    switched = hf.train(tmp_path / "switch", ours, resume=str(tmp_path / "torch" / half))
    assert_same(switched.model, mine.model)
    assert resumed.state.global_step == hf.STEPS


def test_trainer_with_updates_in_backward(tmp_path):
    hf = example("hf_trainer")
    with pytest.raises(RuntimeError, match="applied inside backward.*update='step'"):
        hf.train(tmp_path, in_backward, gradient_accumulation_steps=1)
    with pytest.raises(RuntimeError, match="second backward before step.*update='step'"):
        hf.train(tmp_path, in_backward, hf.BackwardTrainer, max_grad_norm=0)
    plainly = dict(max_grad_norm=0, gradient_accumulation_steps=1)
    mine = hf.train(tmp_path, in_backward, hf.BackwardTrainer, **plainly)
    assert_same(mine.model, hf.train(tmp_path, torchs, **plainly).model)


def test_trainer_that_builds_its_own_optimizer(tmp_path):
    hf = example("hf_trainer")

    class Reference(hf.GroupsTrainer):
        create_optimizer = transformers.Trainer.create_optimizer  # torch AdamW, the same groups

    trainers = []
    for trainer_class in (hf.GroupsTrainer, Reference):
        trainers.append(
            trainer_class(
                model=hf.make_model(),
                args=hf.settings(str(tmp_path), warmup_steps=2, save_strategy="no"),
                train_dataset=hf.make_dataset(),
            )
        )
        trainers[-1].train()
    mine, theirs = trainers
    groups = mine.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [len(g["params"]) for g in groups] == [
        len(g["params"]) for g in theirs.optimizer.param_groups
    ]
    assert type(mine.model.model.layers[0].mlp.up_proj).__name__ == "ForgeLinear"
    assert_same(mine.model, theirs.model)


def test_trainer_given_class_and_arguments(tmp_path):
    """Trainer takes ``model`` out of the arguments and passes it first."""
    hf = example("hf_trainer")
    model = hf.make_model()
    trainer = transformers.Trainer(
        model=model,
        args=hf.settings(str(tmp_path), save_strategy="no", lr_scheduler_type="constant"),
        train_dataset=hf.make_dataset(),
        optimizer_cls_and_kwargs=(
            ForgeAdamW,
            dict(model=model, lr=LR, weight_decay=0.1, update="step"),
        ),
    )
    trainer.train()
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "ForgeLinear"


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_accelerate(mixed_precision):
    loop = example("accelerate_loop")
    importlib.import_module("accelerate").state.AcceleratorState._reset_state()  # one a process
    (mine, norms), (theirs, expected) = (loop.train(b, mixed_precision) for b in (ours, torchs))
    assert len(norms) == 6 and min(norms) > 0.5  # it clipped
    if mixed_precision == "no":
        assert norms == pytest.approx(expected, rel=1e-4)
        assert_same(mine, theirs)
    else:
        assert norms == pytest.approx(expected, rel=2e-2)
    with pytest.raises(RuntimeError, match="update='step'"):
        loop.train(in_backward, mixed_precision)


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("kernels", ["before", "after", "none"])
def test_adapters(kernels, update):
    lora = example("peft_lora")
    models, losses = [], []
    for build in (ours, torchs):
        model = lora.make_model()
        if build is ours and kernels == "before":
            model = forge.optimize(model)
        model = lora.adapt(model)
        if build is ours and kernels == "after":
            forge.optimize(model)
        optimizer = build(model, update) if build is ours else build(model)
        losses.append(lora.train(model, optimizer))
        models.append(model)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    trained = [name for name, p in models[0].named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 3 * 2 and all("lora" in name for name in trained)
    assert_same(*models)
    mine, theirs = (model.merge_and_unload() for model in models)
    assert_same(mine, theirs)


def test_adapters_are_fused_and_frozen_weights_take_no_state():
    lora = example("peft_lora")
    model = lora.adapt(lora.make_model())
    optimizer = ours(model)
    batch = {key: value[None] for key, value in lora.make_dataset(1)[0].items()}
    model(**batch).loss.backward()
    kept = {n for n, p in model.named_parameters() if isinstance(p.grad, DeferredGradient)}
    assert kept == {n for n, p in model.named_parameters() if p.requires_grad}
    optimizer.step()
    assert len(optimizer.state) == len(kept)


def test_lightning():
    module = example("lightning_module")
    both = dict(gradient_clip_val=0.5, accumulate_grad_batches=2)
    assert_same(module.train(ours, **both), module.train(torchs, **both))
    assert_same(module.train(in_backward), module.train(torchs))
    for one in ("gradient_clip_val", "accumulate_grad_batches"):
        with pytest.raises(RuntimeError, match="update='step'"):
            module.train(in_backward, **{one: both[one]})
    with pytest.raises(RuntimeError, match="clipping by value"):
        module.train(ours, gradient_clip_val=0.5, gradient_clip_algorithm="value")


@pytest.mark.parametrize("name", [kind.value for kind in transformers.SchedulerType])
def test_schedulers_of_transformers(name):
    specific = {
        "cosine_with_min_lr": dict(min_lr=1e-3),
        "cosine_warmup_with_min_lr": dict(min_lr=1e-3),
        "warmup_stable_decay": dict(num_decay_steps=2),
    }
    nets, rates = [], []
    for build in (in_backward, torchs):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = build(net)
        scheduler = transformers.get_scheduler(
            name, optimizer, 2, 6, scheduler_specific_kwargs=specific.get(name)
        )
        seen = []
        for _ in range(5):
            seen.append(optimizer.param_groups[0]["lr"])
            loss = net(torch.randn(9, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(*[loss.item()] * (name in ("reduce_lr_on_plateau", "greedy")))
        nets.append(net)
        rates.append(seen)
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 1 or name in ("constant", "reduce_lr_on_plateau", "greedy")
    assert_same(*nets)
