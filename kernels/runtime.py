"""Where a kernel runs: Triton on a GPU (or in Triton's interpreter), the torch reference elsewhere.

Kernel files import ``triton`` and ``tl`` from here, so that ``import forge`` works without triton.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
    INTERPRETED = bool(triton.knobs.runtime.interpret)
except ImportError:
    HAS_TRITON = INTERPRETED = False

    def _jit(fn: Callable | None = None, **_: Any) -> Callable:
        return fn if fn is not None else _jit

    triton = types.SimpleNamespace(jit=_jit, cdiv=lambda a, b: -(-a // b))
    tl = types.SimpleNamespace(constexpr=None)


# Whether CPU tensors go through Triton's interpreter. The tests turn it on where they test kernels.
interpret_cpu = INTERPRETED


def runs_triton(tensor: Tensor) -> bool:
    """Whether kernels on ``tensor`` go through Triton; otherwise the torch reference runs.

    Raises:
        RuntimeError: ``tensor`` is on a GPU and triton is not installed.
    """
    if tensor.is_cuda and not HAS_TRITON:
        raise RuntimeError("the fused kernels need triton on a GPU: pip install triton")
    return tensor.is_cuda or interpret_cpu


def on_device(tensor: Tensor) -> Any:
    """Context in which a Triton launch goes to ``tensor``'s GPU rather than to the current one."""
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)


@lru_cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def processors(tensor: Tensor) -> int:
    """How many multiprocessors ``tensor``'s GPU has; 4 on a CPU, so that loops take turns."""
    return _processors(tensor.get_device()) if tensor.is_cuda else 4


@lru_cache
def capability(device: torch.device) -> tuple[int, int]:
    """Major and minor compute capability; torch looks it up in every call."""
    return torch.cuda.get_device_capability(device)


@lru_cache
def _launches_early(index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= (9, 0)


def early_launch(tensor: Tensor) -> dict[str, Any]:
    """Launch options of a kernel whose first statement is ``begin(PDL)``, on ``tensor``'s device.

    On Hopper and later it is launched before the kernel in front of it ends (programmatic dependent
    launch, which a captured graph keeps).
    """
    early = tensor.is_cuda and _launches_early(tensor.get_device())
    return dict(PDL=True, launch_pdl=True) if early else dict(PDL=False)


@triton.jit
def begin(PDL: tl.constexpr):
    """Wait until the kernel in front has ended; then let the next one be launched.

    In this order: who is launched early then knows that all in front of its predecessor has ended,
    and may read what is as old before its own wait.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()


def saved_tensors(ctx: Any) -> tuple[Tensor, ...]:
    """The saved tensors of a node that hands its weight's gradient to ``ctx.collect``, if given."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if ctx.collect is not None and "inplace operation" in str(error):
            raise RuntimeError(
                "second backward before step()? What this one needs, a weight perhaps, was changed "
                "in place after the forward pass, as an update inside backward does. To "
                "differentiate a graph twice build the optimizer with update='step'"
            ) from error
        raise


def as_rows(t: Tensor) -> Tensor:
    """``t`` as rows [M, C] whose elements lie side by side; their pitch is free."""
    t = t.reshape(-1, t.shape[-1])
    return t if t.stride(1) == 1 else t.contiguous()


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """``a b`` of matrices, fp32: for a partial sum, not to be rounded before the rest is added."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def bits_of(x: Tensor) -> Tensor:
    """The bits of fp32 ``x`` as int32."""
    return x.view(torch.int32)


def float_of(bits: Tensor) -> Tensor:
    """The fp32 number of these bits, an int32."""
    return bits.view(torch.float32)


@triton.jit
def _bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _sqrt(x):
    return tl.sqrt(x)


@triton.jit
def _divide(x, y):
    return x / y


@triton.jit
def _exp2(x):
    return tl.exp2(x)


@triton.jit
def _log2(x):
    return tl.log2(x)


@triton.jit
def _where(condition, x, y):
    return tl.where(condition, x, y)


@triton.jit
def _sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


_TRITON = {
    "sqrt": _sqrt,
    "divide": _divide,
    "exp2": _exp2,
    "log2": _log2,
    "where": _where,
    "sign": _sign,
    "bits_of": _bits_of,
    "float_of": _float_of,
}


class Dual:
    """An arithmetic function, written once, that runs on torch tensors and inside Triton kernels.

    The function may use operators, tuples, and torch's ``sqrt``, ``divide``, ``exp2``, ``log2``,
    ``where`` and ``sign``, and ``bits_of`` and ``float_of`` above, imported by those names.
    ``.torch`` is the function itself; ``.triton``
    is the same source with these names bound to Triton's (None without triton).
    """

    def __init__(self, fn: Callable) -> None:
        self.torch = fn
        self.triton: Any = None
        if HAS_TRITON:
            # The interpreter wants `tl` among a function's globals.
            names = {**fn.__globals__, **_TRITON, "tl": tl}
            self.triton = triton.jit(types.FunctionType(fn.__code__, names, fn.__name__))
