"""Where ``torch.compile`` leaves its graph at a fused layer.

In a file that only traced code imports: the decorator loads the compiler, which takes a second.
"""

import torch
from torch import Tensor, nn


@torch.compiler.disable(reason="forge updates weights inside backward: no fullgraph=True here")
def graph_break(layer: nn.Module, input: Tensor) -> Tensor:
    """The eager forward: the compiler must not trace a backward that has side effects."""
    return layer.forward(input)
