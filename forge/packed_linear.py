"""Several bias-free linear layers of one input as one product, though each keeps its own weight.

    [y_1, y_2, ...] = x [W_1; W_2; ...]^T

The weights' memory lies side by side in one buffer, so one product reads all of them. Parameters
keep their identity, names and optimizer states; only where their elements lie changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from forge.deferred import refuse_second_backward
from forge.kernels.linear_auto import linear_backward, linear_forward
from forge.kernels.rms_norm import NormAgain
from forge.linear import ForgeLinear, Slot, slot_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_plain(module: nn.Module, *types: type[nn.Module]) -> bool:
    """Whether calling ``module`` does what its type says, so that its weight alone may be used."""
    attributes = module.__dict__
    return (
        type(module) in types
        and "forward" not in attributes
        and not any(attributes[hooks] for hooks in _HOOKS)
        and not _has_any_global_hook()
    )


def plain_weight(layer: nn.Module) -> Tensor | None:
    """The weight, where ``layer`` is a bias-free ``nn.Linear`` and nothing else."""
    if not is_plain(layer, nn.Linear, ForgeLinear) or layer._parameters.get("bias") is not None:
        return None
    weight = layer._parameters.get("weight")
    # None if pruned or parametrized, a subclass if quantized or distributed.
    return weight if type(weight) is nn.Parameter else None


@torch.no_grad()
def pack(weights: Sequence[Tensor]) -> bool:
    """Let the weights, [N_i, K], lie in one buffer; False if dtype, device or K differ."""
    if packed_view(weights) is not None:
        return True
    if len({(w.dtype, w.device, w.shape[1:]) for w in weights}) > 1:
        return False
    buffer = torch.cat([w.data for w in weights])
    for weight, part in zip(weights, buffer.split([len(w) for w in weights]), strict=True):
        weight.data = part
    return True


@torch.no_grad()
def unpack(layers: Sequence[nn.Module]) -> None:
    """Give each weight memory of its own again, also inside adapters and under hooks."""
    for layer in layers:
        for weight in layer.parameters():
            if type(weight) is nn.Parameter and weight.untyped_storage().nbytes() > weight.nbytes:
                weight.data = weight.data.clone()


def packed_view(weights: Sequence[Tensor]) -> Tensor | None:
    """All weights as one matrix, where they lie side by side in one buffer; without gradient.

    Looked up for every call and kept nowhere: ``model.to()``, assigned checkpoints and copies of
    the model take the weights apart.
    """
    first, rows = weights[0], 0
    address = first.data_ptr()
    for weight in weights:
        if weight.data_ptr() != address or not weight.is_contiguous():
            return None
        if weight.dtype != first.dtype:
            return None
        address += weight.nbytes
        rows += weight.shape[0]
    # Allocations of their own may happen to be neighbours.
    if first.untyped_storage().data_ptr() != weights[-1].untyped_storage().data_ptr():
        return None
    columns = first.shape[1]
    return first.detach().as_strided((rows, columns), (columns, 1))


class PackedLinearFunction(torch.autograd.Function):
    """``x`` times the packed weights; backward as :class:`forge.linear.LinearFunction` for each."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        packed: Tensor,
        slots: list[Slot | None],
        prefetch: bool,
        alone: bool,
        *weights: Tensor,
    ):
        normed = NormAgain.of(x)
        # What a norm made is not kept: its backward pass, next after this one's, makes it again.
        ctx.again = normed if any(slot and not slot.deferred for slot in slots) else None
        ctx.unsummed = alone and normed is not None
        ctx.save_for_backward(*(() if ctx.again else (x,)))
        # Not saved tensors, which hooks may copy: only in place do the weights lie side by side.
        ctx.packed, ctx.weights, ctx.slots = packed, weights, slots
        ctx.versions = [w._version for w in weights]
        same = packed if packed.dtype == x.dtype else packed.to(x.dtype)
        # The norm's kernel lies between this one and any update.
        prefetch = prefetch and normed is not None and same is packed
        return linear_forward(x, same, prefetch=prefetch)

    @staticmethod
    def backward(ctx, dy: Tensor):
        packed, weights = ctx.packed, ctx.weights
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: packed projections cannot be differentiated twice; "
                "forge.optimize(model, undo=True) restores plain ones"
            )
        if [w._version for w in weights] != ctx.versions:
            for slot in ctx.slots:
                if slot is not None and slot.updated:
                    refuse_second_backward(slot.name)
            raise RuntimeError(
                "a packed weight was changed in place after the forward pass (by an optimizer's "
                "step?): its layer's input gradient would be wrong"
            )
        dx = None
        if ctx.needs_input_grad[0]:
            # Between the weights' last update and this pass lies the forward pass.
            same = packed if packed.dtype == dy.dtype else packed.to(dy.dtype)
            prefetch = same is packed
            dx = linear_backward(dy, same, prefetch=prefetch, unsummed=ctx.unsummed)
        sizes = [len(w) for w in weights]
        needed = ctx.needs_input_grad[5:]
        if not any(needed):
            return dx, None, None, None, None, *(None for _ in weights)
        x = ctx.again.buffer() if ctx.again else ctx.saved_tensors[0]
        parts = dy.split(sizes, dim=-1)
        missing = [
            need and (slot is None or not slot.collect(x, part))
            for need, slot, part in zip(needed, ctx.slots, parts, strict=True)
        ]
        dws: list[Tensor | None] = [None] * len(weights)
        filler = NormAgain.unfilled(x) if any(missing) else None
        if filler is not None:
            filler.fill()
        if all(missing):
            dws = list(_product(dy, x, packed.dtype).split(sizes))
        elif any(missing):
            dws = [
                _product(part, x, packed.dtype) if lacks else None
                for part, lacks in zip(parts, missing, strict=True)
            ]
        return dx, None, None, None, None, *dws


def _product(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    return (dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])).to(dtype)


def packed_linear(x: Tensor, layers: Sequence[nn.Module], alone: bool = False) -> Tensor | None:
    """The outputs of ``layers`` for ``x``, side by side; ``None`` where each must be called itself.

    That is so for layers that are not plain (adapters, hooks, biases, quantized weights), under
    function transforms and ``torch.compile``, and for weights that cannot lie in one buffer.

    Args:
        x: [..., K].
        layers: bias-free linear layers with K input features.
        alone: if a norm of this package made ``x``, nothing else reads it, and no hook sees its
            gradient: what arrives at the norm may be parts of it.

    Returns:
        [..., N], N the sum of the layers' output features.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return None
    weights = []
    for layer in layers:
        weight = plain_weight(layer)
        if weight is None:
            return None
        weights.append(weight)
    packed = packed_view(weights)
    was_packed = packed is not None  # otherwise it is what the kernel in front has just written
    if packed is None:
        # Parameters in memory of inference mode or of a captured graph would be of no use outside.
        capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
        if torch.is_inference_mode_enabled() or capturing or not pack(weights):
            return None
        packed = packed_view(weights)
    assert packed is not None
    if not torch.is_grad_enabled():
        return F.linear(x, packed)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    elif x.dtype != packed.dtype:
        return F.linear(x, packed)  # raises torch's own dtype error
    slots = [slot_of(weight) for weight in weights]
    slots = [slot if slot is not None and slot.node is not None else None for slot in slots]
    return PackedLinearFunction.apply(x, packed, slots, was_packed, alone, *weights)
