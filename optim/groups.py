"""Which parameters the low-rank and matrix-wise methods take: the linears of attention and MLP."""

from __future__ import annotations

from torch import nn


def split_hidden_linears(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split the trainable parameters of ``model`` into hidden matrices and all others.

    Hidden matrices are the weights of every ``nn.Linear`` whose path holds ``attn`` or ``mlp``, the
    recipe of the GaLore and APOLLO authors: embeddings, head, norms and biases are the others.

    Returns:
        ``(hidden, others)``: together every trainable parameter, once.

    Raises:
        ValueError: the model has no such linear.
    """
    hidden = {
        module.weight: None
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ("attn" in name or "mlp" in name)
        if module.weight.requires_grad
    }
    if not hidden:
        raise ValueError(
            "model: no trainable nn.Linear under a module named 'attn' or 'mlp'; "
            "this method needs hidden matrices, choose another optimizer"
        )
    others = [p for p in model.parameters() if p.requires_grad and p not in hidden]
    return list(hidden), others
