"""Which attention implementation really runs in a forward pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode

# The first match names the backend; the math path is seen by its softmax.
_BACKENDS = (
    ("_scaled_dot_product_cudnn_attention", "sdpa:cudnn"),
    ("_scaled_dot_product_flash_attention", "sdpa:flash"),
    ("_scaled_dot_product_efficient_attention", "sdpa:efficient"),
    ("_scaled_dot_product_fused_attention_overrideable", "sdpa:overrideable"),
    ("flash_attn", "flash-attn"),
    ("_scaled_dot_product_attention_math", "sdpa:math"),
    ("softmax", "sdpa:math"),
)


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def _differentiates(loss: Tensor, functions: tuple[str, ...]) -> bool:
    """Whether an autograd function of one of these names is behind ``loss``."""
    found: set[Node] = set()
    left = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [following for following, _ in node.next_functions]
    return bool({node.name() for node in found} & {f"{name}Backward" for name in functions})


def attention_backend(model: nn.Module, batch: dict[str, Tensor]) -> str:
    """Run one forward of ``model`` (with gradients, as in training) and name its attention."""
    with _Names() as seen:
        out: Any = model(**batch)
    # Its kernels are no operators of torch; what they are launched by is a node of the graph.
    if _differentiates(out.loss, ("AttentionFunction", "QKVAttentionFunction")):
        return "forge"
    for fragment, name in _BACKENDS:
        if any(fragment in op for op in seen.names if "log_softmax" not in op):
            return name
    return "unknown"
