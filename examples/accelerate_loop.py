"""A loop of Accelerate's: prepare, accumulate, backward, clip.

python examples/accelerate_loop.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from accelerate import Accelerator
from tiny_qwen3 import make_dataset, make_model
from torch import nn

from forge import ForgeAdamW


def train(
    build: Callable[[nn.Module], torch.optim.Optimizer], mixed_precision: str = "no"
) -> tuple[nn.Module, list[float]]:
    """Returns the model and the norms of the gradients before clipping, one a step."""
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision=mixed_precision)
    model = make_model()
    optimizer = build(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
    loader = torch.utils.data.DataLoader(make_dataset(24), batch_size=2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    norms = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model), norms


if __name__ == "__main__":
    print(train(lambda model: ForgeAdamW(model, lr=3e-3, update="step"))[1])
