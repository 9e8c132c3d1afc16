"""Hugging Face Trainer, as it is: clipping, accumulation, warm-up, save and resume.

    python examples/hf_trainer.py

Trainer clips by default and accumulates on request, which needs the gradients of a step together:
``update="step"``. :class:`BackwardTrainer` is for ``update="backward"``.
"""

from __future__ import annotations

from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tiny_qwen3 import make_dataset, make_model
from transformers import Trainer, TrainingArguments, get_scheduler

from forge import ForgeAdamW

STEPS = 8


class BackwardTrainer(Trainer):
    """Trains with ``update="backward"``; needs max_grad_norm=0 and no accumulation.

    Trainer measures the norm of the gradients also when it does not clip, and there are none.
    """

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return grad_norm


class GroupsTrainer(Trainer):
    """Builds its optimizer and its loss itself, as TRL's trainers do."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        model = self.model if model is None else model
        decayed = set(self.get_decay_parameter_names(model))
        groups: list[dict[str, Any]] = [
            {"params": [], "weight_decay": self.args.weight_decay},
            {"params": [], "weight_decay": 0.0},
        ]
        for name, param in model.named_parameters():
            groups[name not in decayed]["params"].append(param)
        # model= names the module whose linear layers are fused.
        self.optimizer = ForgeAdamW(groups, lr=self.args.learning_rate, model=model, update="step")
        return self.optimizer

    def compute_loss(self, model: Any, inputs: dict, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs["labels"][:, 1:]
        outputs = model(input_ids=inputs["input_ids"])
        logits = outputs.logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return (loss, outputs) if return_outputs else loss


def settings(folder: str, **changes: Any) -> TrainingArguments:
    defaults = dict(
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        weight_decay=0.1,
        save_steps=STEPS // 2,
        logging_steps=2,
        report_to=[],
        disable_tqdm=True,
    )
    return TrainingArguments(output_dir=folder, **{**defaults, **changes})


def train(
    folder: str,
    build: Callable[..., torch.optim.Optimizer],
    trainer_class: type[Trainer] = Trainer,
    resume: str | None = None,
    **changes: Any,
) -> Trainer:
    """Train a new model with the optimizer ``build(model, lr=..., weight_decay=...)``."""
    model = make_model()
    optimizer = build(model, lr=3e-3, weight_decay=0.1)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=3, num_training_steps=STEPS)
    trainer = trainer_class(
        model=model,
        args=settings(folder, **changes),
        train_dataset=make_dataset(),
        optimizers=(optimizer, scheduler),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def main() -> None:
    def in_step(model: Any, **hyper: Any) -> ForgeAdamW:
        return ForgeAdamW(model, update="step", **hyper)

    with TemporaryDirectory() as folder:
        train(folder, in_step)
        train(folder, in_step, resume=f"{folder}/checkpoint-{STEPS // 2}")
        train(folder, ForgeAdamW, BackwardTrainer, max_grad_norm=0, gradient_accumulation_steps=1)


if __name__ == "__main__":
    main()
