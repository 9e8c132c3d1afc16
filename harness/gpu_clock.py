"""The clock that a GPU's multiprocessors really ran at, counted by themselves.

What the driver reports is the clock that was set: under load the multiprocessors miss some of its
ticks. On an H200 they count 1,600 to 1,840 million cycles a second where NVML says 1,780 to 1,980.
"""

from __future__ import annotations

import statistics

import torch

from forge.kernels.runtime import HAS_TRITON, processors, tl, triton

# By multiprocessor: its cycles, and the nanoseconds of the GPU's timer.
Counters = dict[int, tuple[int, int]]


@triton.jit
def _read_counters_kernel(out_ptr):
    pid = tl.program_id(0)
    # The operand only keeps the three reads from being merged with those of another program.
    sm = tl.inline_asm_elementwise(
        "mov.u32 $0, %smid; // $1", "=r,r", [pid], dtype=tl.int32, is_pure=False, pack=1
    )
    cycles = tl.inline_asm_elementwise(
        "mov.u64 $0, %clock64; // $1", "=l,r", [sm], dtype=tl.int64, is_pure=False, pack=1
    )
    timer = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer; // $1", "=l,r", [sm], dtype=tl.int64, is_pure=False, pack=1
    )
    tl.store(out_ptr + 3 * pid, sm.to(tl.int64))
    tl.store(out_ptr + 3 * pid + 1, cycles)
    tl.store(out_ptr + 3 * pid + 2, timer)


def read_counters() -> Counters:
    """Of the current CUDA device's multiprocessors, or of most of them.

    Raises:
        RuntimeError: triton is not installed.
    """
    if not HAS_TRITON:
        raise RuntimeError("cycles are counted by a Triton kernel, and triton is not installed")
    out = torch.empty(0, 3, dtype=torch.int64, device="cuda")
    # Several a multiprocessor: the hardware places them, and few are left out.
    programs = 4 * processors(out)
    out = out.new_empty(programs, 3)
    _read_counters_kernel[(programs,)](out, num_warps=1)
    return {sm: (cycles, timer) for sm, cycles, timer in out.tolist()}


def mean_mhz(before: Counters, after: Counters) -> float | None:
    """Median over the multiprocessors of their mean clock between two readings."""
    clocks = []
    for sm in before.keys() & after.keys():
        (cycles, timer), (later_cycles, later) = before[sm], after[sm]
        clocks.append(1e3 * (later_cycles - cycles) / (later - timer))
    return statistics.median(clocks) if clocks else None
