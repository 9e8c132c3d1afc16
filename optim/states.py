"""How optimizer states are stored: the formats, and the state tensors of a parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forge.kernels.block_code import decode_reference, encode_reference, scale_shape
from forge.optim.rules import Rule

# `None`: the parameter's own dtype, as torch.optim does. `int8`: kernels/block_code.py.
FORMATS: dict[str, torch.dtype | None] = {
    "auto": None,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "int8": torch.int8,
}
ROUNDINGS = ("stochastic", "nearest")
_FLOATS = {torch.bfloat16, torch.float32}


def check_format(states: str, rounding: str) -> None:
    """Raise ValueError when ``states`` or ``rounding`` is not one of the known names."""
    if states not in FORMATS:
        raise ValueError(f"states={states!r}: choose one of {', '.join(FORMATS)}")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding={rounding!r}: choose one of {', '.join(ROUNDINGS)}")
    if states == "int8" and rounding == "nearest":
        raise ValueError(
            "rounding='nearest': an average that moves by 0.1 % a step never leaves an 8-bit code; "
            "use rounding='stochastic', or states='bf16' or 'fp32'"
        )


def stored_names(rule: Rule, states: str) -> tuple[str, ...]:
    """Names of a parameter's state tensors in the order of a Target's ``states`` and ``scales``.

    A state of 8 bits has codes and scales, under names that no torch optimizer takes for values.
    """
    if states != "int8":
        return rule.states
    return tuple(f"{name}_{part}" for part in ("code", "scale") for name in rule.states)


def new_states(rule: Rule, states: str, param: Tensor) -> dict[str, Tensor]:
    """Zero states of ``param`` by name.

    Of its shape and strides, in the storage dtype. ``int8``: codes so (int8, or uint8 where the
    rule says that a state is never negative), and ``<name>_scale`` uint8, an exponent for every 128
    values of a row.
    """

    def like(dtype: torch.dtype) -> Tensor:
        return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)

    if states != "int8":
        return {name: like(FORMATS[states] or param.dtype) for name in rule.states}
    codes = [like(_code_dtype(rule, name)) for name in rule.states]
    scales = [code.new_zeros(scale_shape(code), dtype=torch.uint8) for code in codes]
    return dict(zip(stored_names(rule, states), codes + scales, strict=True))


def _code_dtype(rule: Rule, name: str) -> torch.dtype:
    return torch.uint8 if name in rule.nonnegative else torch.int8


def convert_states(
    rule: Rule, states: str, param: Tensor, saved: dict[str, Any]
) -> dict[str, Tensor]:
    """The states in ``saved``, of any format, as those of ``param`` in the format ``states``.

    What is stored in the same format and layout is copied bit for bit; otherwise to nearest.
    """
    result = new_states(rule, states, param)
    for name in rule.states:
        code = saved.get(f"{name}_code")
        if states != "int8":
            result[name].copy_(saved[name] if code is None else _decode(saved, name))
            continue
        mine = result[f"{name}_code"], result[f"{name}_scale"]
        if code is None:
            encode_reference(saved[name], *mine, None)
        elif code.stride() == mine[0].stride():
            mine[0].copy_(code)
            mine[1].copy_(saved[f"{name}_scale"])
        else:
            encode_reference(_decode(saved, name), *mine, None)
    return result


def _decode(saved: dict[str, Any], name: str) -> Tensor:
    return decode_reference(saved[f"{name}_code"], saved[f"{name}_scale"])


def check_stored(
    rule: Rule, states: str, param: Tensor, stored: dict[str, Any], owner: str
) -> None:
    """Check that ``stored``, the live state of ``param``, is what one kernel launch can update.

    Raises:
        KeyError, ValueError: as :func:`check_states`; states of several dtypes.
    """
    check_states(rule, states, param, stored, owner)
    names = stored_names(rule, states)
    dtypes = {stored[name].dtype for name in names if name in stored}
    if not all(name in stored for name in names) or (
        states != "int8" and (len(dtypes) > 1 or not dtypes <= _FLOATS)
    ):
        found = ", ".join(f"{k} {v.dtype}" for k, v in stored.items() if isinstance(v, Tensor))
        raise ValueError(
            f"{owner!r}: its state was replaced by {found}; states={states!r} needs "
            f"{', '.join(names)}, "
            + ("codes and scales" if states == "int8" else "all bfloat16 or all float32")
        )


def check_states(rule: Rule, states: str, param: Tensor, saved: dict[str, Any], owner: str) -> None:
    """Check that ``saved`` holds every state of ``rule``, in a form that ``states`` can hold.

    Raises:
        KeyError: a state, or the scale of one, is missing.
        ValueError: no tensor, a shape or dtype does not fit, or a state that cannot be negative is;
            the messages name the parameter, ``owner``.
    """
    for name in rule.states:
        coded = f"{name}_code" in saved
        key = f"{name}_code" if coded else name
        for needed in (key, f"{name}_scale") if coded else (key,):
            if needed not in saved:
                raise KeyError(f"{owner!r}: its state has no {needed!r}, which {rule.name} needs")
            if not isinstance(saved[needed], Tensor):
                raise ValueError(f"{owner!r}: {needed} is {saved[needed]!r:.40}: must be a tensor")
        value = saved[key]
        if value.shape != param.shape:
            raise ValueError(
                f"{owner!r}: {key} has shape {tuple(value.shape)}, "
                f"the parameter {tuple(param.shape)}"
            )
        if coded:
            scale, want = saved[f"{name}_scale"], _code_dtype(rule, name)
            if value.dtype != want or scale.dtype != torch.uint8:
                raise ValueError(
                    f"{owner!r}: {key} is {value.dtype} and {name}_scale {scale.dtype}, "
                    f"not {want} and torch.uint8: codes must not be cast"
                )
            if scale.shape != scale_shape(value):
                raise ValueError(
                    f"{owner!r}: {name}_scale has shape {tuple(scale.shape)}, "
                    f"codes of this shape and layout have {scale_shape(value)}"
                )
        elif not value.is_floating_point():
            raise ValueError(f"{owner!r}: {key} is {value.dtype}: must be floating point")
        elif states == "int8" and name in rule.nonnegative and bool((value < 0).any()):
            raise ValueError(f"{owner!r}: {key} has negative values")
