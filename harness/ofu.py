"""What a GPU did while steps ran: tensor-core activity, clock, memory traffic, energy, by NVML.

OFU, the share of the tensor cores' peak in use, is ``activity x clock / maximum clock``
(arXiv:2605.20799): activity is the share of cycles in which a multiprocessor's tensor pipe is busy,
NVML's GPM metric "any tensor"; the maximum is the clock at which the data sheet's peak holds, which
is below the boost clock. It counts work on padding too: tiles of matrix products are whole.
"""

from __future__ import annotations

import importlib
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

# Counters are refreshed every 100 ms or so: windows are much longer, and begin under load.
WINDOW_S, LEAD_S, CLOCK_EVERY_S = 2.0, 0.3, 0.05


@dataclass
class Observation:
    """A window of steps. What the driver does not tell is ``None``, and ``missing`` says why.

    Attributes:
        steps, utilisation_window_s: steps in the window, and its length in seconds.
        tensor_active_pct, dram_active_pct: share of cycles the tensor pipes were busy, and of the
            peak memory bandwidth used, over the whole GPU.
        sm_clock_mhz: mean clock of the multiprocessors.
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
) -> Observation:
    """Run ``step`` for at least ``window_s`` seconds and read the counters before and after.

    Without a driver it runs nothing.

    Args:
        step: does some work and waits for it.
        uuid: ``GPU-...``, as the driver names the device.
        max_clock_mhz: clock of the tensor cores' peak; ``None``: the driver's maximum.
        nvml: the module ``pynvml``, or one like it.
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
        _observe(step, _Counters(nvml, handle, found), max_clock_mhz, window_s)
    except nvml.NVMLError as error:
        found.missing.append(f"NVML: {error}")
    finally:
        nvml.nvmlShutdown()
    return found


def _observe(
    step: Callable[[], Any], counters: _Counters, max_clock_mhz: float | None, window_s: float
) -> None:
    found = counters.found
    _run(step, LEAD_S)
    clock = _Clock(counters)
    before = counters.snapshot()
    with clock:
        found.steps, found.utilisation_window_s = _run(step, window_s)
    after = counters.snapshot()
    counters.compare(before, after)
    found.sm_clock_mhz = clock.mean_mhz
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


class _Counters:
    """The counters of one device. What one of them cannot tell goes to ``found.missing``."""

    def __init__(self, nvml: Any, handle: Any, found: Observation) -> None:
        self.nvml, self.handle, self.found = nvml, handle, found
        # The driver does not take two calls about GPM at a time.
        self.lock = threading.Lock()
        self.gpm = bool(self._ask("GPM", self._gpm_supported))

    def _ask(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            with self.lock:
                return function(*arguments)
        except self.nvml.NVMLError as error:
            message = f"{what}: {error}"
            if message not in self.found.missing:
                self.found.missing.append(message)
            return None

    def _gpm_supported(self) -> bool:
        supported = self.nvml.nvmlGpmQueryDeviceSupport(self.handle).isSupportedDevice
        if not supported:
            self.found.missing.append("GPM: not supported by this GPU (Hopper and later have it)")
        return supported

    def snapshot(self) -> tuple[Any, int | None]:
        """A GPM sample and the millijoules since the driver was loaded."""
        sample = self._ask("GPM", self._sample) if self.gpm else None
        energy = self._ask("energy", self.nvml.nvmlDeviceGetTotalEnergyConsumption, self.handle)
        return sample, energy

    def _sample(self) -> Any:
        sample = self.nvml.nvmlGpmSampleAlloc()
        self.nvml.nvmlGpmSampleGet(self.handle, sample)
        return sample

    def compare(self, before: tuple[Any, int | None], after: tuple[Any, int | None]) -> None:
        """Fill in what happened between two snapshots, and free them."""
        (first, energy), (second, later) = before, after
        if energy is not None and later is not None:
            self.found.energy_j = (later - energy) / 1e3 / self.found.steps
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

    def clock_mhz(self) -> float | None:
        """The clock of the multiprocessors now."""
        nvml = self.nvml
        return self._ask("clock", nvml.nvmlDeviceGetClockInfo, self.handle, nvml.NVML_CLOCK_SM)

    def max_clock_mhz(self) -> float | None:
        """Their highest clock."""
        nvml = self.nvml
        return self._ask("clock", nvml.nvmlDeviceGetMaxClockInfo, self.handle, nvml.NVML_CLOCK_SM)


class _Clock:
    """Reads the clock in a thread while the block runs."""

    def __init__(self, counters: _Counters) -> None:
        self._counters = counters
        self._samples: list[float] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def _poll(self) -> None:
        while True:
            clock = self._counters.clock_mhz()
            if clock is None:
                return
            self._samples.append(clock)
            if self._done.wait(CLOCK_EVERY_S):
                return

    def __enter__(self) -> _Clock:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()

    @property
    def mean_mhz(self) -> float | None:
        """Mean of the samples."""
        return statistics.fmean(self._samples) if self._samples else None
