"""What an optimizer's arguments and states must be, checked before anything is changed."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from forge.linear import Slot, slot_of
from forge.queue import check_single_process

_DTYPES = (torch.bfloat16, torch.float32)
_NOT_NEGATIVE = {
    "lr": "learning rate",
    "eps": "epsilon value",
    "weight_decay": "weight_decay value",
    "momentum": "momentum value",
    "alpha": "alpha value",
    "lr_decay": "lr_decay value",
    "initial_accumulator_value": "initial_accumulator_value value",
    "momentum_decay": "momentum_decay value",
}


def check_not_distributed(model: Any) -> None:
    """Raise NotImplementedError for several processes, or a wrapper for several copies."""
    check_single_process()
    wrapper = type(model).__name__
    if wrapper in ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"):
        raise NotImplementedError(
            f"{wrapper}: several copies of a model are not supported; pass the module inside"
        )


def check_parameter(param: Tensor, name: str, attached: bool = False) -> None:
    """Raise ValueError or TypeError, naming the parameter, when the kernels cannot update it.

    Args:
        attached: the optimizer that asks holds it already.
    """
    if not attached and slot_of(param) is not None:
        raise ValueError(
            f"{name!r} already belongs to a ForgeOptimizer: call release() on that one first"
        )
    if not param.requires_grad:
        return
    if is_lazy(param):
        raise ValueError(f"{name!r} has no shape yet: run the model once before")
    if type(param).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        raise TypeError(f"{name!r} is a {type(param).__name__}: only plain tensors are supported")
    if param.dtype not in _DTYPES:
        raise TypeError(
            f"{name!r} is {param.dtype}: weights must be bfloat16 or float32 "
            "(for float16 compute, keep float32 weights and use torch.autocast)"
        )
    if param.is_inference():
        raise ValueError(f"{name!r} was made under inference_mode: clone it outside, to train it")
    if torch.empty_like(param).stride() != param.stride():
        raise ValueError(f"{name!r} is not dense in memory: pass param.contiguous()")


def check_update(update: str, max_grad_norm: float | None, on_nonfinite: str) -> None:
    """Raise ValueError when these settings do not exist or do not go together.

    TypeError when ``max_grad_norm`` is no number.
    """
    if update not in ("backward", "step"):
        raise ValueError(f"update={update!r}: choose one of backward, step")
    if on_nonfinite not in ("propagate", "skip", "raise"):
        raise ValueError(f"on_nonfinite={on_nonfinite!r}: choose one of propagate, skip, raise")
    if max_grad_norm is not None and not isinstance(max_grad_norm, Real | Tensor):
        raise TypeError(f"max_grad_norm={max_grad_norm!r}: must be a number, or None not to clip")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm={max_grad_norm}: must be positive, or None not to clip")
    if update == "backward" and (max_grad_norm is not None or on_nonfinite != "propagate"):
        name = "max_grad_norm" if max_grad_norm is not None else "on_nonfinite"
        raise ValueError(
            f"{name}= needs all gradients before the first update: use update='step' with it"
        )


def check_hyper(settings: dict[str, Any]) -> None:
    """Raise ValueError, in torch's words, when a hyperparameter is out of range.

    TypeError when it is no number. Tensors are read, which waits for their device.
    """
    for key, words in _NOT_NEGATIVE.items():
        value = settings.get(key, 0.0)
        if not isinstance(value, Real | Tensor):
            raise TypeError(f"{key}={value!r}: must be a number or a tensor of one element")
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"Tensor {key} must be 1-element")
        if not value >= 0.0:  # type: ignore[operator]
            raise ValueError(f"Invalid {words}: {value}")
    if "betas" not in settings:
        return
    betas = settings["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas={betas!r}: must be two numbers")
    for i, beta in enumerate(betas):
        if not isinstance(beta, Real | Tensor):
            raise TypeError(f"betas[{i}]={beta!r}: must be a number or a tensor of one element")
        if not 0.0 <= beta < 1.0:  # type: ignore[operator]
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")


def as_count(value: Any) -> float | None:
    """``value`` as a count of steps, or of what goes with it; None if it is no number from 0 on."""
    try:
        count = float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return count if 0 <= count < math.inf else None


def read_count(slot: Slot, stored: dict[str, Any], name: str) -> float:
    """The count called ``name`` that somebody has put into the state of ``slot``.

    Raises:
        ValueError: it is not a number from 0 on.
    """
    value = as_count(stored.get(name))
    if value is None:
        raise ValueError(
            f"{slot.name!r}: its state was replaced, and {name!r} in it is "
            f"{stored.get(name)!r}: must be a number from 0 on"
        )
    return value


def refuse_edited(slot: Slot) -> NoReturn:
    """Raise RuntimeError: somebody has written to the counts that ``slot`` shares with others."""
    names = " or ".join(map(repr, slot.clock.counts()))
    raise RuntimeError(
        f"{slot.name!r}: {names} in its state was written in place, but parameters that advance "
        "together share one tensor; put a tensor of its own there, state[p]['step'] = "
        "torch.tensor(...), for each of them, or load_state_dict()"
    )


def named_like(
    others: list[dict[str, Any]], group: dict[str, Any], names: dict[int, str]
) -> dict[str, Any]:
    """``group`` with names of its parameters when ``others`` have them, else without.

    torch refuses a mixture, but a module's parameters come with names that nobody has asked for.

    Args:
        names: by parameter id, of those that are known; those of ``group`` are added.
    """
    params = group["params"]
    if not others or isinstance(params, set):
        return group
    params = [params] if isinstance(params, Tensor) else list(params)
    given = [p for p in params if isinstance(p, tuple)]
    names.update((id(param), name) for name, param in given)
    if "param_names" not in others[0]:
        params = [p[1] if isinstance(p, tuple) else p for p in params]
    elif not given:
        params = [(names.get(id(p), f"group{len(others)}.{i}"), p) for i, p in enumerate(params)]
    return {**group, "params": params}
