"""Which parameters the low-rank and matrix-wise methods take: the linears of attention and MLP."""

from __future__ import annotations

from torch import Tensor, nn


def split_hidden_linears(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Split the trainable parameters of ``model`` into hidden matrices and all others.

    Hidden matrices are the weights of every ``nn.Linear`` whose path holds ``attn`` or ``mlp``, the
    recipe of the GaLore and APOLLO authors: embeddings, head, norms and biases are the others.

    Returns:
        ``(hidden, others)``: together every trainable parameter, once.

    Raises:
        ValueError: the model has no such linear.
    """
    linears = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ("attn" in name or "mlp" in name)
    ]
    hidden = {id(m.weight): m.weight for m in linears if m.weight.requires_grad}
    if not hidden:
        raise ValueError(
            "model: no trainable nn.Linear under a module named 'attn' or 'mlp'; "
            "this method needs hidden matrices, choose another optimizer"
        )
    others: list[Tensor] = [
        p for p in model.parameters() if p.requires_grad and id(p) not in hidden
    ]
    return list(hidden.values()), others
