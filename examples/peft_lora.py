"""LoRA adapters of PEFT on a model with this package's kernels.

    python examples/peft_lora.py

Only the adapters are in the optimizer's states. Frozen weights cost nothing: no gradient, no state.
"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from tiny_qwen3 import make_dataset, make_model
from torch import nn

import forge
from forge import ForgeAdamW


def adapt(model: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"]))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Returns the losses."""
    losses = []
    for batch in torch.utils.data.DataLoader(make_dataset(12), batch_size=2):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    model = adapt(forge.optimize(make_model()))  # or forge.optimize(adapt(...))
    print(train(model, ForgeAdamW(model, lr=3e-3)))
    merged = model.merge_and_unload()
