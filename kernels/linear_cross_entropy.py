"""The head of a language model: logits and their cross-entropy, without fp32 logits.

    z = hidden W^T,     loss = sum over valid t of (log sum_v exp(z[t, v]) - z[t, label[t]]) / count
    dz[t, v] = (exp(z[t, v] - lse[t]) - [v = label[t]]) * dloss / count,   0 where t is not valid
    dhidden = dz W,     dW = dz^T hidden

Shapes: T tokens, C features, V entries of the vocabulary; hidden [T, C], W [V, C], labels [T].
``count`` is the number of valid labels unless it is given. z has the dtype of hidden, as the plain
model's logits have; sums are fp32.

z is stored once, [T, V], and its gradient is written over it in the same kernel. With ``chunk``
that is so for the last slice of the vocabulary only: the others are formed for the sums, and again
for their gradient once the slice behind them is used up. A slice holds every token, so its dW is
complete: nothing accumulates in low precision.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.kernels.runtime import (
    begin,
    early_launch,
    on_device,
    power_of_2,
    runs_triton,
    saved_tensors,
    tl,
    triton,
    wide_product,
)

# Takes the factors x [T, C], dy [T, V] of the weight's gradient dy^T x; False: it must be formed.
# Of a slice, dy [T, last - first], it also gets (first, last); it takes all slices or none.
Collect = Callable[[Tensor, Tensor, tuple[int, int] | None], bool]


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, count: Tensor | None, ignore_index: int
) -> Tensor:
    """In plain torch; differentiable."""
    if hidden.dtype != torch.float64:
        hidden, weight = hidden.float(), weight.float()
    total = F.cross_entropy(
        F.linear(hidden, weight), labels, ignore_index=ignore_index, reduction="sum"
    )
    return total / ((labels != ignore_index).sum() if count is None else count)


@triton.jit(do_not_specialize=["ignore_index"])
def _cross_entropy_kernel(
    z_ptr,  # [T, columns]; with GRAD overwritten by its gradient
    labels_ptr,
    lse_ptr,  # fp32 [T]: of the columns before, then of these too; 0 where the label is ignored
    target_ptr,  # fp32 [T]: the label's logit; 0 where it is ignored
    count_ptr,  # fp32 []: the gradient is divided by it
    dloss_ptr,  # fp32 [] or None: and multiplied by this
    pitch,
    first,  # the vocabulary entry of column 0
    columns,
    ignore_index,
    LSE: tl.constexpr,
    GRAD: tl.constexpr,
    CONTINUED: tl.constexpr,  # there were columns before
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * pitch
    label = tl.load(labels_ptr + row)
    valid = label != ignore_index
    column = tl.arange(0, BLOCK)
    end = tl.where(valid, columns, 0)
    if LSE:
        inside = (label >= first) & (label < first + columns)
        target = tl.load(z_ptr + (label - first), inside, other=float("nan")).to(tl.float32)
        if CONTINUED:
            # Not where the ignored label is an entry of the vocabulary.
            tl.store(target_ptr + row, target, inside & valid)
            largest = tl.load(lse_ptr + row)
            # The sum so far, relative to the largest, sits in one lane.
            total = tl.where(column == 0, 1.0, 0.0)
        else:
            # NaN, and so it stays, if no slice holds the label.
            tl.store(target_ptr + row, tl.where(valid, target, 0.0))
            largest = float("-inf")
            total = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, end, BLOCK):
            mask = start + column < columns
            z = tl.load(z_ptr + start + column, mask, other=float("-inf")).to(tl.float32)
            larger = tl.maximum(largest, tl.max(z, axis=0))
            total = total * tl.exp(largest - larger) + tl.exp(z - larger)
            largest = larger
        lse = tl.where(valid, largest + tl.log(tl.sum(total, axis=0)), 0.0)
        tl.store(lse_ptr + row, lse)
    else:
        lse = tl.load(lse_ptr + row)
    if GRAD:
        count = tl.load(count_ptr)
        # Where nothing is counted there are no gradients, not NaN.
        scale = tl.where(count == 0, 0.0, 1.0 / count)
        if dloss_ptr is not None:
            scale *= tl.load(dloss_ptr)
        for start in range(0, columns, BLOCK):
            mask = start + column < columns
            z = tl.load(z_ptr + start + column, start + column < end, other=0.0).to(tl.float32)
            hit = first + start + column == label
            dz = (tl.exp(z - lse) - tl.where(hit, 1.0, 0.0)) * scale
            dz = tl.where(valid, dz, 0.0)
            tl.store(z_ptr + start + column, dz.to(z_ptr.dtype.element_ty), mask)


def _cross_entropy(
    z: Tensor,
    labels: Tensor,
    lse: Tensor,
    target: Tensor,
    count: Tensor,
    dloss: Tensor | None,
    first: int,
    ignore_index: int,
    lse_pass: bool,
    grad_pass: bool,
) -> None:
    tokens, columns = z.shape
    block = min(4096, power_of_2(columns))
    if tokens == 0:
        return
    with on_device(z):
        _cross_entropy_kernel[(tokens,)](
            z,
            labels,
            lse,
            target,
            count,
            dloss,
            z.stride(0),
            first,
            columns,
            ignore_index,
            LSE=lse_pass,
            GRAD=grad_pass,
            CONTINUED=first > 0,
            BLOCK=block,
            num_warps=8,
            **early_launch(z),
        )


def _scaled(t: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``t * factor`` in ``dtype``, the factor and the product in fp32."""
    # As a matrix: a 0-d factor would be rounded to the dtype of `t` first.
    return torch.mul(t, factor.view(1, 1), out=torch.empty_like(t, dtype=dtype))


def _slices(vocabulary: int, chunk: int | None) -> list[tuple[int, int]]:
    """Where each begins and ends: ``chunk`` entries, but for the first, which has what is over."""
    if chunk is None or chunk >= vocabulary:
        return [(0, vocabulary)]
    return [(max(0, end - chunk), end) for end in range(vocabulary, 0, -chunk)][::-1]


class LinearCrossEntropyFunction(torch.autograd.Function):
    """The loss; between forward and backward the last slice's logits hold their own gradient."""

    @staticmethod
    def forward(
        ctx, hidden, weight, labels, count, ignore_index: int, chunk: int | None,
        collect: Collect | None,
    ):  # fmt: skip
        lse, target = _row_sums(hidden)
        # In fp16 the gradient of a logit needs the loss scale that arrives with backward.
        ctx.late = hidden.dtype != torch.float16
        keep = ctx.late and any(ctx.needs_input_grad[:2])
        ctx.slices, ctx.kept = _slices(weight.shape[0], chunk), None
        for first, last in ctx.slices:
            z = F.linear(hidden, weight[first:last])
            grad = keep and last == weight.shape[0]
            _cross_entropy(z, labels, lse, target, count, None, first, ignore_index, True, grad)
            if grad:
                ctx.kept = z
            del z  # before the next one is formed
        ctx.save_for_backward(hidden, weight, labels, count, lse, target)
        ctx.ignore_index, ctx.collect = ignore_index, collect
        return (lse - target).sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss: Tensor):
        hidden, weight, labels, count, lse, target = saved_tensors(ctx)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        dhidden = dweight = None
        x = _scaled(hidden, dloss, hidden.dtype) if ctx.late and need_weight else hidden
        whole = len(ctx.slices) == 1
        # What is kept is not saved with the other tensors: it goes as soon as it is used. Another
        # backward through the same graph forms it again.
        dz, ctx.kept = ctx.kept, None
        for first, last in reversed(ctx.slices):
            part = weight[first:last]
            if dz is None:
                dz = F.linear(hidden, part)
                scale = None if ctx.late else dloss
                _cross_entropy(
                    dz, labels, lse, target, count, scale, first, ctx.ignore_index, False, True
                )
            if need_hidden:
                product = torch.matmul(dz, part) if whole else wide_product(dz, part)
                dhidden = product if dhidden is None else dhidden.add_(product)
            if need_weight:
                taken = dweight is None and ctx.collect is not None
                if not (taken and ctx.collect(x, dz, None if whole else (first, last))):
                    if dweight is None:
                        dweight = torch.empty_like(weight)
                    torch.mm(dz.t(), x, out=dweight[first:last])
            dz = None
        if dhidden is not None:
            if ctx.late:
                dhidden = _scaled(dhidden, dloss, hidden.dtype)
            dhidden = dhidden.to(hidden.dtype)
        return dhidden, dweight, None, None, None, None, None


def _row_sums(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the sums and the labels' logits, fp32 [T] each."""
    both = torch.empty((2, hidden.shape[0]), dtype=torch.float32, device=hidden.device)
    return both[0], both[1]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    count: Tensor | float | None = None,
    chunk: int | None = None,
    collect: Collect | None = None,
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden, weight).float(), labels)``.

    Args:
        hidden: [..., C]: bf16, fp32, or fp16, whose logits are always formed twice.
        weight: [V, C]; cast to the dtype of ``hidden``, and both to autocast's where that is on.
        labels: [...] int64, what each token should predict (already shifted).
        ignore_index: the label of tokens that do not count.
        count: what the sum of the losses is divided by (default: the number of valid labels).
        chunk: form the logits for so many entries of the vocabulary at a time, and those of all
            slices but one twice, instead of keeping them: T * chunk instead of T * V elements of
            memory for at most one more product.
        collect: given the factors of the weight's gradient during backward, may take them and
            return True: then no gradient is formed. With ``chunk`` slice by slice, from the last
            to the first; it takes all of them or none. On a GPU.

    Returns:
        fp32 []. NaN if no label is valid, with zero gradients; NaN, on a GPU, if a label is
        outside the vocabulary (on a CPU torch's IndexError).

    Raises:
        ValueError: shapes do not fit, or ``chunk`` is not positive.
    """
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"weight: {tuple(weight.shape)} must be [V, {hidden.shape[-1]}]")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels: {tuple(labels.shape)} must be hidden's {tuple(hidden.shape[:-1])}"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk}: must be positive, or None to keep all logits")
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).contiguous()
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    weight = weight.to(hidden.dtype)
    if isinstance(count, Tensor):
        count = count.to(hidden.device, torch.float32, non_blocking=True)
    elif count is not None:
        count = torch.full((), count, dtype=torch.float32, device=hidden.device)
    if not runs_triton(hidden):
        return linear_cross_entropy_reference(hidden, weight, labels, count, ignore_index)
    if count is None:
        count = (labels != ignore_index).sum(dtype=torch.float32)
    return LinearCrossEntropyFunction.apply(
        hidden, weight, labels, count, ignore_index, chunk, collect
    )
