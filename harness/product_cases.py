"""What ``forge-bench kernels`` measures of the linear layers' products, op ``linear``; on a GPU.

The products of :mod:`forge.kernels.linear_auto` as a layer runs them: one whose sum is split goes
with the norm that adds its parts. ``torch`` is torch's product with the same norm behind it, so
that the two differ in the product alone. A case ends in ``y`` (``x W^T``) or ``dx`` (``dy W``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.harness.kernel_cases import EPS, Case, Op, gain, prepare, random
from forge.harness.shapes import Shape
from forge.kernels.linear_auto import linear_backward, linear_forward
from forge.kernels.rms_norm import add_rms_norm, rms_norm_backward, rms_norm_reference

PRODUCTS = "linear"  # what ``--op`` calls them

Product = Callable[[Tensor, Tensor], Tensor]

# Nothing writes weights here: they may be read before the kernel in front has ended.
_y = partial(linear_forward, prefetch=True)
_dx = partial(linear_backward, prefetch=True)
_y_parts = partial(_y, unsummed=True)
_dx_parts = partial(_dx, unsummed=True)


def _into_norm(product: Product) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda x, w, residual, scale: add_rms_norm(product(x, w), residual, scale, EPS)


def _into_norm_backward(product: Product) -> Callable[..., Tensor]:
    return lambda dy, w, h, scale: rms_norm_backward(
        product(dy, w), None, h, scale, EPS, need_weight=False
    )[0]


def _exact_norm(x: Tensor, w: Tensor, residual: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return rms_norm_reference(x @ w.t(), scale, EPS, residual)


def _exact_norm_backward(dy: Tensor, w: Tensor, h: Tensor, scale: Tensor) -> Tensor:
    leaf = h.detach().requires_grad_()
    y, _ = rms_norm_reference(leaf, scale, EPS)
    return torch.autograd.grad(y, leaf, dy.detach() @ w.detach())[0]


def _op(name: str, rows: int, columns: int, hidden: int) -> Op:
    """The product with a weight ``[rows, columns]``; ``hidden``: the width of the norm, or 0."""
    forward = name.endswith("y")
    wide, narrow = (columns, rows) if forward else (rows, columns)

    def weight() -> Tensor:
        return (wide**-0.5 * torch.randn(rows, columns)).bfloat16()

    if not hidden:
        return Op(
            name,
            functions=(),
            inputs=lambda s, t: ((random(t, wide), weight()), ()),
            ours=_y if forward else _dx,
            plain=F.linear if forward else torch.matmul,
            exact=F.linear if forward else torch.matmul,
            liger=None,
            elements=lambda s, t: (t * wide + rows * columns + t * narrow, 0.0),
            flops=lambda s, t: (2.0 * t * rows * columns, 0.0),
        )
    behind = _into_norm if forward else _into_norm_backward
    return Op(
        name,
        functions=(),
        inputs=lambda s, t: ((random(t, wide), weight(), random(t, hidden), gain(hidden)), ()),
        ours=behind(_y_parts if forward else _dx_parts),
        plain=behind(F.linear if forward else torch.matmul),
        exact=_exact_norm if forward else _exact_norm_backward,
        liger=None,
        # The product's result stays on the chip; the norm reads one more and writes two, or one.
        elements=lambda s, t: (t * wide + rows * columns + t * hidden * (3 if forward else 2), 0.0),
        flops=lambda s, t: (2.0 * t * rows * columns, 0.0),
    )


def product_cases(model: str, shape: Shape) -> Iterator[Case]:
    """The eight products of a layer at few tokens, forward passes all, on a GPU.

    Args:
        model: its name in the names of the cases.
    """
    hidden, width = shape.hidden, shape.q_width
    qkv, gate_up = width + 2 * shape.kv_width, 2 * shape.intermediate
    ops = (
        _op("qkv-y", qkv, hidden, 0),
        _op("o-norm-y", hidden, width, hidden),
        _op("gate-up-y", gate_up, hidden, 0),
        _op("down-norm-y", hidden, shape.intermediate, hidden),
        _op("down-dx", hidden, shape.intermediate, 0),
        _op("gate-up-norm-dx", gate_up, hidden, hidden),
        _op("o-dx", hidden, width, 0),
        _op("qkv-norm-dx", qkv, hidden, hidden),
    )
    for op in ops:
        yield Case(
            PRODUCTS,
            f"{model}-{op.name}",
            (512, 1024),
            ("forge", "torch"),
            partial(prepare, op, shape, False),
        )
