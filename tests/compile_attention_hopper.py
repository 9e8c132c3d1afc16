"""Attention's kernels for Hopper, compiled for compile_for_hopper.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon._runtime import GluonASTSource

from forge.kernels import (
    attention_hopper,
    attention_hopper_backward,
    attention_hopper_backward_long,
    attention_hopper_long,
)

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def _described(block: list[int], dtype: torch.dtype) -> str:
    return f"tensordesc<{_NAMES[dtype]}{block},{attention_hopper.layout_of(block, dtype)!r}>"


def attention_hopper_kernels(usage: Callable) -> dict[str, dict[str, int]]:
    """``usage`` of both directions, forward of both kernels.

    Of the gradients also where those of keys and values are not parts.
    """
    found = {}
    half = torch.bfloat16
    for size in (64, 128):
        heads = _described(attention_hopper.head_block(size), half)
        result = _described(attention_hopper.rows_block(size // 2), half)
        types: dict[str, Any] = dict(
            q=heads, k=heads, v=heads, out=result, lse_ptr="*fp32", c="fp32"
        )
        found[f"attention_hopper {size}"] = _kernel(
            usage,
            attention_hopper._attention_fwd_hopper_kernel,
            types,
            attention_hopper.REGISTERS.value,
            dict(H=16, GROUP=2, STAGES=attention_hopper.STAGES),
        )
        keys = _described(attention_hopper.head_block(size, attention_hopper_long.KEYS.value), half)
        rows = _described(attention_hopper.rows_block(size), half)
        found[f"attention_hopper long {size}"] = _kernel(
            usage,
            attention_hopper_long._attention_fwd_hopper_long_kernel,
            types | dict(k=keys, v=keys, out=rows),
            None,
            dict(H=16, GROUP=2, STAGES=attention_hopper_long.STAGES),
        )
        for group, dtype in ((1, half), (2, torch.float32)):
            rows = _described(attention_hopper.rows_block(size), dtype)
            row = _described([1, attention_hopper.BLOCK.value], torch.float32)
            types = dict(q=heads, k=heads, v=heads, dout=heads, lse=row, delta=row)
            types |= dict(dq=_described(attention_hopper.rows_block(size), half))
            types |= dict(dk=rows, dv=rows, lse_ptr="*fp32", delta_ptr="*fp32")
            types |= dict(c="fp32", scale="fp32")
            found[f"attention_hopper backward {size} {group}"] = _kernel(
                usage,
                attention_hopper_backward._attention_bwd_hopper_kernel,
                types,
                attention_hopper_backward.REGISTERS.value,
                dict(H=16, GROUP=group, STAGES=attention_hopper_backward.STAGES),
            )
    for heads, dtype in ((1, torch.float32), (2, half), (4, half)):
        found[f"attention_hopper long backward {heads}"] = _long(usage, heads, dtype)
    return found


def _long(usage: Callable, heads: int, dtype: torch.dtype) -> dict[str, int]:
    """So many heads of a group are taken by a program."""
    boxes = _described(attention_hopper.head_block(128), torch.bfloat16)
    rows = _described(attention_hopper.rows_block(128), dtype)
    row = _described([1, attention_hopper.BLOCK.value], torch.float32)
    types = dict.fromkeys(("q", "k", "v", "dout"), boxes) | dict(lse=row, minus=row)
    types |= dict(fine_ptr="*fp32", sizes_ptr="*i32", sums_ptr="*i64", dk=rows, dv=rows, c="fp32")
    return _kernel(
        usage,
        attention_hopper_backward_long._attention_bwd_hopper_long_kernel,
        types,
        attention_hopper_backward_long.REGISTERS.value,
        dict(H=16, GROUP=max(heads, 2), HEADS=heads),
    )


def _kernel(
    usage: Callable,
    kernel: Any,
    types: dict[str, str],
    registers: int | None,
    constants: dict[str, Any],
) -> dict[str, int]:
    names = kernel.arg_names
    types |= dict.fromkeys(constants, "constexpr")
    source = GluonASTSource(
        fn=kernel,
        signature={n: types.get(n, "i32") for n in names},
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={},
    )
    return usage(source, dict(num_warps=4, launch_pdl=True, maxnreg=registers))
