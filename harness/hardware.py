"""The GPUs that floors and utilisation are computed for: data sheet, and what is achievable."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Shares of the data sheet that large operations reach where nobody is known to have measured the
# part: those of the H200 (790 of 989 TFLOP/s, 4.3 of 4.8 TB/s).
_GEMM_SHARE, _COPY_SHARE = 0.80, 0.90


@dataclass(frozen=True)
class Hardware:
    """One GPU.

    Attributes:
        key: what ``--hardware`` calls it.
        name: pattern of the name that the driver reports.
        peak_tflops: dense bf16 with fp32 accumulation, by the data sheet.
        gemm_tflops: what a large bf16 matrix product reaches on random data.
        bandwidth_tb_s: device memory, by the data sheet.
        copy_tb_s: what a large copy reaches, bytes read plus bytes written.
        sms, flop_per_clock: multiprocessors, and dense bf16 operations of one in a cycle.
    """

    key: str
    name: str
    peak_tflops: float
    gemm_tflops: float
    bandwidth_tb_s: float
    copy_tb_s: float
    sms: int
    flop_per_clock: int

    @property
    def tensor_clock_mhz(self) -> float:
        """The clock at which the data sheet's peak holds; the boost clock may be higher."""
        return self.peak_tflops * 1e6 / (self.sms * self.flop_per_clock)


def _assumed(key: str, name: str, peak: float, bandwidth: float, sms: int, flop: int) -> Hardware:
    gemm, copy = _GEMM_SHARE * peak, _COPY_SHARE * bandwidth
    return Hardware(key, name, peak, gemm, bandwidth, copy, sms, flop)


# Peaks, bandwidths and multiprocessors: NVIDIA's data sheets and architecture papers. Achievable
# products of A100, H100 and B200: the MAMF table of github.com/stas00/ml-engineering.
_ALL = (
    # Measured here: an 8192^3 product 793 TFLOP/s, a device copy 4.28 TB/s (rounded).
    Hardware("h200", r"\bH200\b(?! NVL)", 989.4, 790.0, 4.8, 4.3, 132, 4096),
    _assumed("h200-nvl", r"\bH200 NVL\b", 835.5, 4.8, 132, 4096),
    # 3.0 TB/s is what QuACK's row kernels reach (its media/2025-07-10-membound-sol.md).
    Hardware("h100", r"\bH100 80GB HBM3\b", 989.4, 792.0, 3.35, 3.0, 132, 4096),
    _assumed("h100-nvl", r"\bH100 NVL\b", 835.5, 3.9, 132, 4096),
    _assumed("h100-pcie", r"\bH100 PCIe\b", 756.0, 2.0, 114, 4096),
    Hardware("a100", r"\bA100.*80GB\b", 312.0, 268.0, 2.039, _COPY_SHARE * 2.039, 108, 2048),
    Hardware("b200", r"\bB200\b", 2250.0, 1745.0, 8.0, _COPY_SHARE * 8.0, 148, 8192),
    _assumed("rtx4090", r"\bRTX 4090\b(?! D)", 165.2, 1.008, 128, 512),
)
HARDWARE = {hardware.key: hardware for hardware in _ALL}


def find(name: str) -> Hardware | None:
    """The entry of the GPU that the driver calls ``name``; ``None`` when it is not in the table."""
    return next((hardware for hardware in _ALL if re.search(hardware.name, name)), None)
