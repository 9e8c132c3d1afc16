"""What a GPU did while steps ran: tensor-core activity, clock, memory traffic, energy.

The clock is counted on the GPU (:mod:`forge.harness.gpu_clock`), the rest is NVML's. OFU, the share
of the tensor cores' peak in use, is ``activity x clock / maximum clock`` (arXiv:2605.20799):
activity is the share of cycles in which a multiprocessor's tensor pipe is busy, NVML's GPM metric
"any tensor"; the maximum is the clock at which the data sheet's peak holds, which is below the
boost clock. It counts work on padding too: tiles of matrix products are whole.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from forge.harness import gpu_clock
from forge.harness.environment import one_line

# Counters are refreshed every 100 ms or so: windows are much longer, and begin under load.
WINDOW_S, LEAD_S = 2.0, 0.3


@dataclass
class Observation:
    """A window of steps. What the driver does not tell is ``None``, and ``missing`` says why.

    Attributes:
        steps, utilisation_window_s: steps in the window, and its length in seconds.
        tensor_active_pct, dram_active_pct: share of cycles the tensor pipes were busy, and of the
            peak memory bandwidth used, over the whole GPU.
        sm_clock_mhz: mean clock that the multiprocessors counted.
        energy_j: of the board, a step.
        ofu_pct: share of the tensor cores' peak in use.
    """

    steps: int = 0
    utilisation_window_s: float | None = None
    tensor_active_pct: float | None = None
    dram_active_pct: float | None = None
    sm_clock_mhz: float | None = None
    energy_j: float | None = None
    ofu_pct: float | None = None
    missing: list[str] = field(default_factory=list)


def device_uuid() -> str:
    """``GPU-...`` of the first CUDA device, as NVML names it."""
    return "GPU-" + str(torch.cuda.get_device_properties(0).uuid).removeprefix("GPU-")


def observe(
    step: Callable[[], Any],
    uuid: str,
    max_clock_mhz: float | None = None,
    window_s: float = WINDOW_S,
    nvml: Any = None,
    cycles: Callable[[], gpu_clock.Counters] = gpu_clock.read_counters,
) -> Observation:
    """Run ``step`` for at least ``window_s`` seconds and read the counters before and after.

    Without a driver it runs nothing.

    Args:
        step: does some work and waits for it.
        uuid: ``GPU-...``, as the driver names the device.
        max_clock_mhz: clock of the tensor cores' peak; ``None``: the driver's maximum.
        nvml: the module ``pynvml``, or one like it.
        cycles: reads the counters of the multiprocessors.
    """
    found = Observation()
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # no package, no driver
        found.missing.append(f"NVML: {error}")
        return found
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        _observe(step, _Counters(nvml, handle, found, cycles), max_clock_mhz, window_s)
    except nvml.NVMLError as error:
        found.missing.append(f"NVML: {error}")
    finally:
        nvml.nvmlShutdown()
    return found


def _observe(
    step: Callable[[], Any], counters: _Counters, max_clock_mhz: float | None, window_s: float
) -> None:
    found = counters.found
    counters.count_cycles()  # compiles its kernel
    _run(step, LEAD_S)
    before = counters.snapshot()
    found.steps, found.utilisation_window_s = _run(step, window_s)
    counters.compare(before, counters.snapshot())
    if found.tensor_active_pct is not None and found.sm_clock_mhz is not None:
        top = max_clock_mhz or counters.max_clock_mhz()
        if top:
            found.ofu_pct = found.tensor_active_pct * found.sm_clock_mhz / top


def _run(step: Callable[[], Any], seconds: float) -> tuple[int, float]:
    begin, steps = time.perf_counter(), 0
    while True:
        step()
        steps += 1
        elapsed = time.perf_counter() - begin
        if elapsed >= seconds:
            return steps, elapsed


@dataclass(frozen=True)
class _Snapshot:
    """``energy_mj``: millijoules since the driver was loaded; ``sample``: of GPM."""

    cycles: gpu_clock.Counters | None
    sample: Any
    energy_mj: int | None


class _Counters:
    """The counters of one device. What one of them cannot tell goes to ``found.missing``."""

    def __init__(
        self,
        nvml: Any,
        handle: Any,
        found: Observation,
        cycles: Callable[[], gpu_clock.Counters],
    ) -> None:
        self.nvml, self.handle, self.found, self.cycles = nvml, handle, found, cycles
        self.gpm = bool(self._ask("GPM", self._gpm_supported))

    def _ask(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self.nvml.NVMLError as error:
            self._miss(f"{what}: {error}")
            return None

    def _miss(self, message: str) -> None:
        if message not in self.found.missing:
            self.found.missing.append(message)

    def _gpm_supported(self) -> bool:
        supported = self.nvml.nvmlGpmQueryDeviceSupport(self.handle).isSupportedDevice
        if not supported:
            self.found.missing.append("GPM: not supported by this GPU (Hopper and later have it)")
        return supported

    def count_cycles(self) -> gpu_clock.Counters | None:
        """Of the multiprocessors, since some time before."""
        try:
            return self.cycles()
        except Exception as error:  # no triton, or an architecture that it does not know
            self._miss(f"clock: {one_line(error)}")
            return None

    def snapshot(self) -> _Snapshot:
        """The counters now."""
        cycles = self.count_cycles()
        sample = self._ask("GPM", self._sample) if self.gpm else None
        energy = self._ask("energy", self.nvml.nvmlDeviceGetTotalEnergyConsumption, self.handle)
        return _Snapshot(cycles, sample, energy)

    def _sample(self) -> Any:
        sample = self.nvml.nvmlGpmSampleAlloc()
        self.nvml.nvmlGpmSampleGet(self.handle, sample)
        return sample

    def compare(self, before: _Snapshot, after: _Snapshot) -> None:
        """Fill in what happened between two snapshots, and free them."""
        if before.energy_mj is not None and after.energy_mj is not None:
            self.found.energy_j = (after.energy_mj - before.energy_mj) / 1e3 / self.found.steps
        if before.cycles is not None and after.cycles is not None:
            self.found.sm_clock_mhz = gpu_clock.mean_mhz(before.cycles, after.cycles)
        first, second = before.sample, after.sample
        if first is not None and second is not None:
            self._ask("GPM", self._metrics, first, second)
        for sample in (first, second):
            if sample is not None:
                self._ask("GPM", self.nvml.nvmlGpmSampleFree, sample)

    def _metrics(self, first: Any, second: Any) -> None:
        nvml = self.nvml
        wanted = {
            "tensor_active_pct": nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
            "dram_active_pct": nvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
        }
        query = nvml.c_nvmlGpmMetricsGet_t()
        query.version = nvml.NVML_GPM_METRICS_GET_VERSION
        query.numMetrics = len(wanted)
        query.sample1, query.sample2 = first, second
        for i, metric in enumerate(wanted.values()):
            query.metrics[i].metricId = metric
        nvml.nvmlGpmMetricsGet(query)
        for i, name in enumerate(wanted):
            code = query.metrics[i].nvmlReturn
            if code == nvml.NVML_SUCCESS:
                setattr(self.found, name, query.metrics[i].value)
            else:
                self.found.missing.append(f"GPM: no {name} (NVML error {code})")

    def max_clock_mhz(self) -> float | None:
        """The multiprocessors' highest clock."""
        nvml = self.nvml
        return self._ask("clock", nvml.nvmlDeviceGetMaxClockInfo, self.handle, nvml.NVML_CLOCK_SM)
