"""What stands in ``param.grad`` for a gradient that is not stored.

With ``update="step"`` a fused layer's weight gradient waits as its factors until ``step()``;
:class:`DeferredGradient` behaves as that gradient to code that asks for its norm, scales, zeroes
or reads it, so that ``torch.nn.utils.clip_grad_norm_`` and gradient scalers are exact without
knowing of it. With ``update="backward"`` the gradient has been applied: :class:`AppliedGradient`
says so to whoever still wants it, where ``None`` would pass as "no gradient" and clipping would be
lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_aten = torch.ops.aten


class _Standin(torch.Tensor):
    """A tensor of its parameter's shape, dtype and device, without memory."""

    slot: Any

    @staticmethod
    def __new__(cls, slot: Any) -> Any:
        p = slot.param
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, p.shape, strides=p.stride(), dtype=p.dtype, device=p.device
        )

    def __init__(self, slot: Any) -> None:
        self.slot = slot

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None  # made of no other tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.slot.name!r}, {tuple(self.shape)})"


class AppliedGradient(_Standin):
    """The gradient of a parameter that was updated inside backward: gone."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _aten.detach.default:
            return args[0]
        name = next(a.slot.name for a in tree_leaves(args) if isinstance(a, cls))
        if func in (_aten.add_.Tensor, _aten.add.Tensor):
            refuse_second_backward(name)  # autograd accumulates
        raise RuntimeError(
            f"the gradient of {name!r} was applied inside backward and does not exist any more "
            f"({func}): to clip, scale or read gradients, build the optimizer with update='step'; "
            "DistributedDataParallel needs torch.optim.AdamW"
        )


class DeferredGradient(_Standin):
    """A weight gradient kept as factors: ``sum of dy^T x, plus dense``.

    Scaling by a number or scalar tensor, zeroing and the addition of a dense gradient work on what
    is kept. Reading it (its norm, ``grad.abs().max()``, ``grad.clone()``, the checks of a gradient
    scaler) forms a copy for the occasion. Other changes in place raise RuntimeError.

    The factors live here, not in the slot, so that whatever drops the gradient drops them
    (``model.zero_grad()``, ``param.grad = None``).
    """

    def __init__(self, slot: Any) -> None:
        super().__init__(slot)
        self.factors: list[tuple[Tensor, Tensor, int]] = []
        self.dense: Tensor | None = None

    def form(self) -> Tensor:
        """The gradient [N, K], newly allocated, in the parameter's dtype."""
        grad = None
        for x, dy, _ in self.factors:
            product = dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
            grad = product.to(self.dtype) if grad is None else grad.add_(product)
        if grad is None:
            grad = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return grad if self.dense is None else grad.add_(self.dense)

    def clear(self) -> None:
        """Make the gradient zero."""
        self.factors, self.dense = [], None

    def scale_by(self, factor: Any) -> None:
        """Multiply by a number, now: what a later backward adds is not multiplied."""
        factor = torch.as_tensor(factor, dtype=torch.float32, device=self.device)
        if factor.numel() != 1:
            _refuse(self, "multiplication by more than one number")
        factor = factor.reshape(())
        scaled = []
        for x, dy, _ in self.factors:
            if dy.dtype == torch.float16:
                # What a scaler has lifted into fp16's range must not fall out of it again.
                x, dy = x.float(), dy.float()
            # Out of place: parts of one output gradient may belong to several layers.
            dy = (dy * factor).to(dy.dtype)
            scaled.append((x, dy, x._version + dy._version))
        self.factors = scaled
        if self.dense is not None:
            self.dense.mul_(factor)

    def accumulate(self, other: Tensor) -> None:
        self.dense = other.clone() if self.dense is None else self.dense.add_(other)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self = args[0]
        if func is _aten.detach.default:
            return self
        if func is _aten._amp_foreach_non_finite_check_and_unscale_.default:
            return _unscale(*args)
        if isinstance(self, cls) and func in _IN_PLACE:
            _IN_PLACE[func](self, *args[1:], **kwargs)
            return self
        if func._schema.is_mutable:
            arguments = func._schema.arguments
            given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
            changed = [
                given.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write
            ]
            for grad in tree_leaves(changed):
                if isinstance(grad, cls):
                    _refuse(grad, str(func))
        args, kwargs = tree_map(lambda a: a.form() if isinstance(a, cls) else a, (args, kwargs))
        return func(*args, **kwargs)


def refuse_second_backward(name: str) -> NoReturn:
    """Raise the RuntimeError of a parameter that this step has updated already."""
    raise RuntimeError(
        f"second backward before step(): {name!r} was already updated in this step. "
        "Call optimizer.step() after every backward, or build the optimizer with update='step' to "
        "accumulate. (A weight used in several reentrant checkpoints counts too: use "
        "checkpoint(use_reentrant=False), or update='step'.)"
    )


def _add(grad: DeferredGradient, other: Tensor, alpha: float = 1) -> None:
    grad.accumulate(other if alpha == 1 else other * alpha)


def _divide(grad: DeferredGradient, divisor: Any) -> None:
    grad.scale_by(1 / torch.as_tensor(divisor, dtype=torch.float32, device=grad.device))


_IN_PLACE: dict[Any, Callable] = {
    _aten.mul_.Tensor: DeferredGradient.scale_by,
    _aten.mul_.Scalar: DeferredGradient.scale_by,
    _aten.div_.Tensor: _divide,
    _aten.div_.Scalar: _divide,
    _aten.add_.Tensor: _add,
    _aten.zero_.default: DeferredGradient.clear,
}


def _unscale(grads: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """What a gradient scaler does to all gradients of a device."""
    plain = [grad for grad in grads if not isinstance(grad, DeferredGradient)]
    if plain:
        torch._amp_foreach_non_finite_check_and_unscale_(plain, found_inf, inverse)
    for grad in grads:
        if isinstance(grad, DeferredGradient):
            broken = ~torch.isfinite(grad.form()).all()
            found_inf.copy_(torch.maximum(found_inf, broken.to(found_inf.dtype)))
            grad.scale_by(inverse)


def _refuse(grad: _Standin, what: str) -> NoReturn:
    raise RuntimeError(
        f"{what}: the gradient of {grad.slot.name!r} is kept as its factors, which can be scaled, "
        "zeroed and read, but not changed element by element; norm clipping works, but for "
        "foreach=True; clipping by value or DistributedDataParallel needs torch.optim.AdamW"
    )
