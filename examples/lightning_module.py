"""Lightning: its Trainer clips and accumulates with ``update="step"``.

python examples/lightning_module.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
import torch
from tiny_qwen3 import make_dataset, make_model
from torch import Tensor, nn

from forge import ForgeAdamW


class LanguageModel(lightning.LightningModule):
    """A model and what builds its optimizer."""

    def __init__(self, build: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.model = make_model()
        self.build = build

    def training_step(self, batch: dict[str, Tensor], _index: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        optimizer = self.build(self.model)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def train(build: Callable[[nn.Module], torch.optim.Optimizer], **settings: Any) -> nn.Module:
    """``settings`` go to ``lightning.Trainer``."""
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **settings,
    )  # fmt: skip
    module = LanguageModel(build)
    trainer.fit(module, torch.utils.data.DataLoader(make_dataset(24), batch_size=2))
    return module.model


if __name__ == "__main__":
    train(
        lambda model: ForgeAdamW(model, lr=3e-3, update="step"),
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
    )
    train(lambda model: ForgeAdamW(model, lr=3e-3, update="backward"))
