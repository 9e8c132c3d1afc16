"""OFU from a driver that says what the test wants."""

from __future__ import annotations

import csv
import dataclasses
import json
import time
import types

import pytest
import torch

from command_line import forge_bench
from forge.harness import efficiency, environment, gpu_clock, ofu, ofu_sweep, records
from forge.harness.hardware import HARDWARE
from forge.harness.workloads import MODELS


class FakeNvml:
    """The part of ``pynvml`` that is used: a GPU at 50 % tensor activity, 350 W.

    ``broken`` names functions that raise, ``unsupported`` metrics that have no value.
    """

    NVML_SUCCESS, NVML_CLOCK_SM = 0, 1
    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_ANY_TENSOR_UTIL, NVML_GPM_METRIC_DRAM_BW_UTIL = 5, 10

    class NVMLError(Exception):
        pass

    def __init__(self, broken=(), unsupported=(), gpm=1):
        self.broken, self.unsupported, self.gpm = broken, unsupported, gpm
        self.live, self.open, self.began = [], 0, time.perf_counter()
        self.asked: list[int] = []

    def __getattribute__(self, name):
        found = object.__getattribute__(self, name)
        if name.startswith("nvml") and name in self.broken:

            def fail(*_):
                raise self.NVMLError(f"{name} is not supported")

            return fail
        return found

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == "GPU-7"
        return "handle"

    def nvmlGpmQueryDeviceSupport(self, handle):
        return types.SimpleNamespace(isSupportedDevice=self.gpm)

    def nvmlGpmSampleAlloc(self):
        self.live.append(types.SimpleNamespace(at=None))
        return self.live[-1]

    def nvmlGpmSampleGet(self, handle, sample):
        sample.at = time.perf_counter()

    def nvmlGpmSampleFree(self, sample):
        self.live.remove(sample)

    def c_nvmlGpmMetricsGet_t(self):
        metrics = [types.SimpleNamespace(nvmlReturn=9, value=-1.0) for _ in range(4)]
        return types.SimpleNamespace(metrics=metrics)

    def nvmlGpmMetricsGet(self, query):
        assert query.version == self.NVML_GPM_METRICS_GET_VERSION
        assert query.sample1 is not query.sample2
        assert query.sample2.at - query.sample1.at > 0.1, "shorter than the counters' refresh"
        for metric in query.metrics[: query.numMetrics]:
            self.asked.append(metric.metricId)
            supported = metric.metricId not in self.unsupported
            metric.nvmlReturn = 0 if supported else 3
            metric.value = {5: 50.0, 10: 17.0}[metric.metricId]
        return query

    def nvmlDeviceGetMaxClockInfo(self, handle, clock):
        return 1980

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return int(350e3 * (time.perf_counter() - self.began))


def step():
    time.sleep(0.01)


def cycles():
    """132 multiprocessors at 1464 MHz; their counters started at different times."""
    now = time.perf_counter_ns()
    return {sm: (sm * 10**12 + round(1.464 * now), now) for sm in range(132)}


def no_cycles():
    raise RuntimeError("triton is not installed")


def observe(nvml, max_clock_mhz=1830.0, cycles=cycles):
    return ofu.observe(step, "GPU-7", max_clock_mhz, window_s=0.25, nvml=nvml, cycles=cycles)


@pytest.fixture(autouse=True)
def short_lead(monkeypatch):
    monkeypatch.setattr(ofu, "LEAD_S", 0.02)


def test_ofu_is_activity_times_clock_over_the_clock_of_the_peak():
    nvml = FakeNvml()
    seen = observe(nvml)
    assert seen.missing == []
    assert (seen.tensor_active_pct, seen.dram_active_pct) == (50, 17)
    assert seen.sm_clock_mhz == pytest.approx(1464)
    assert seen.ofu_pct == pytest.approx(50 * 1464 / 1830)
    assert 0.25 <= seen.utilisation_window_s < 0.5 and seen.steps >= 5
    # 350 W, in joules a step: the counter is read a few milliseconds before and after.
    power = seen.energy_j * seen.steps / seen.utilisation_window_s
    assert power == pytest.approx(350, rel=0.15)
    assert nvml.asked == [5, 10] and nvml.live == [] and nvml.open == 0


def test_an_unknown_gpu_is_held_against_the_drivers_maximum():
    assert observe(FakeNvml(), None).ofu_pct == pytest.approx(50 * 1464 / 1980)


@pytest.mark.parametrize(
    ("nvml", "missing", "empty"),
    [
        (FakeNvml(gpm=0), "GPM: not supported by this GPU", {"tensor", "dram", "ofu"}),
        (FakeNvml(["nvmlGpmQueryDeviceSupport"]), "GPM: nvmlGpm", {"tensor", "dram", "ofu"}),
        (FakeNvml(["nvmlGpmSampleGet"]), "GPM: nvmlGpmSampleGet", {"tensor", "dram", "ofu"}),
        (FakeNvml(["nvmlGpmMetricsGet"]), "GPM: nvmlGpmMetricsGet", {"tensor", "dram", "ofu"}),
        (FakeNvml(unsupported=[5]), "no tensor_active_pct (NVML error 3)", {"tensor", "ofu"}),
        (FakeNvml(unsupported=[10]), "no dram_active_pct (NVML error 3)", {"dram"}),
        (FakeNvml(["nvmlDeviceGetTotalEnergyConsumption"]), "energy: nvml", {"energy"}),
    ],
)
def test_what_the_driver_does_not_tell_is_empty_and_says_why(nvml, missing, empty):
    check_empty(nvml, cycles, missing, empty)


def test_cycles_that_cannot_be_counted_are_empty_and_say_why():
    check_empty(FakeNvml(), no_cycles, "clock: RuntimeError: triton is not", {"sm", "ofu"})
    # Programs land on whichever multiprocessor is free.
    assert gpu_clock.mean_mhz({1: (0, 0)}, {2: (5, 5)}) is None
    assert gpu_clock.mean_mhz({1: (0, 0), 2: (7, 0)}, {1: (1500, 1000), 3: (9, 9)}) == 1500


def check_empty(nvml, cycles, missing, empty):
    seen = observe(nvml, cycles=cycles)
    assert len(seen.missing) == 1 and missing in seen.missing[0]
    names = {
        field.name.partition("_")[0]: getattr(seen, field.name)
        for field in dataclasses.fields(seen)
        if field.name not in ("steps", "utilisation_window_s", "missing")
    }
    assert {name for name, value in names.items() if value is None} == empty
    assert nvml.open == 0 and seen.steps > 0


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_no_driver(function):
    seen = observe(FakeNvml([function]))
    assert seen.missing == [f"NVML: {function} is not supported"] and seen.ofu_pct is None


def test_the_real_module_has_what_is_used():
    pynvml = pytest.importorskip("pynvml")
    fake = {name for name in dir(FakeNvml) if not name.startswith("_")}
    assert {name for name in fake if name.startswith(("nvml", "NVML", "c_"))} <= set(dir(pynvml))
    query = pynvml.c_nvmlGpmMetricsGet_t()
    query.numMetrics, query.metrics[1].metricId = 2, pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL
    assert query.metrics[1].metricId == FakeNvml.NVML_GPM_METRIC_DRAM_BW_UTIL


def test_a_failing_step_is_not_hidden():
    calls = []

    def fails_later():
        calls.append(step())
        if len(calls) > 10:
            raise RuntimeError("out of memory")

    nvml = FakeNvml()
    with pytest.raises(RuntimeError, match="out of memory"):
        ofu.observe(fails_later, "GPU-7", 1830.0, window_s=5.0, nvml=nvml, cycles=cycles)
    assert nvml.open == 0


def columns(monkeypatch, nvml, config, name="H200"):
    monkeypatch.setattr(ofu, "device_uuid", lambda: "GPU-7")
    monkeypatch.setattr(efficiency.torch.cuda, "synchronize", lambda: None)
    real = ofu.observe
    short = dict(window_s=0.15, nvml=nvml, cycles=cycles)
    monkeypatch.setattr(ofu, "observe", lambda *arguments: real(*arguments, **short))
    return efficiency.record_columns(config, 1, 513, name, latency_ms=10.0, step=step)


def test_columns_of_a_record(monkeypatch):
    config = MODELS["qwen3-0.6b"].hf_config()
    fields, missing = columns(monkeypatch, FakeNvml(), config)
    assert missing == []
    share = efficiency.step_tile_share(config, 1, 513)
    assert fields["ofu_adjusted_pct"] == pytest.approx(fields["ofu_pct"] * share)
    assert fields["mfu_pct"] == pytest.approx(19, abs=1)
    # Every one is a field of a record.
    known = {field.name for field in dataclasses.fields(records.Record)}
    assert set(fields) <= known and len(fields) == 8


def test_an_optional_column_never_costs_the_row(monkeypatch):
    fields, missing = columns(monkeypatch, FakeNvml(), object())
    assert missing == ["no MFU: AttributeError: 'object' object has no attribute 'get_text_config'"]
    assert fields["ofu_pct"] is not None and "ofu_adjusted_pct" not in fields
    monkeypatch.setattr(ofu, "device_uuid", lambda: 1 / 0)
    fields, missing = efficiency.record_columns(None, 1, 16, "H200", latency_ms=10.0, step=step)
    assert fields == {} and missing[1] == "no OFU: ZeroDivisionError: division by zero"


def test_columns_without_gpm_or_of_an_uncounted_model(monkeypatch):
    from transformers import MambaConfig

    fields, missing = columns(monkeypatch, FakeNvml(gpm=0), MambaConfig())
    assert (
        "no MFU: ValueError: model_type 'mamba'" in missing[0]
        and "GPM: not supported" in missing[1]
    )
    assert "mfu_pct" not in fields and "ofu_adjusted_pct" not in fields
    assert fields["ofu_pct"] is None and fields["energy_j"] > 0


def test_columns_on_a_cpu():
    config = MODELS["qwen3-tiny"].hf_config()
    assert efficiency.record_columns(config, 1, 64, "EPYC", 10.0, None) == ({"mfu_pct": None}, [])


@pytest.mark.parametrize(
    ("kernel", "tile"),
    [
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNN", (256, 128, 64)),
        ("nvjet_tst_64x8_64x16_1x4_h_bz_TNT", (8, 64, 64)),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x128x64_warpgroupsize1x1x1_execute",
         (128, 64, 64)),
        ("cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8", (128, 256, 32)),
        ("cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_128x256x64_2x1x1_0_tnn", (256, 128, 64)),
        ("void gemv2T_kernel_val<int>", efficiency.STEP_TILE),
        ("", efficiency.STEP_TILE),
    ],
)  # fmt: skip
def test_tile_of_a_kernel(kernel, tile):
    assert ofu_sweep.tile_of(kernel) == tile


def test_older_instructions_keep_the_pipe_busy_for_longer():
    assert ofu_sweep.instruction_share("cutlass_75_tensorop_bf16_s1688gemm_bf16_64x") == 1 / 2
    assert ofu_sweep.instruction_share("cutlass_80_tensorop_bf16_s16816gemm_relu_bf16") == 2 / 3
    nvjet = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"
    assert ofu_sweep.instruction_share(nvjet) == 1
    # Tiles of 128 rows: half of the second one is padding.
    assert ofu_sweep.adjusted_pct(60.0, 192, 256, 64, nvjet) == pytest.approx(45.0)
    older = "cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_32x2_tn_align1"
    assert ofu_sweep.adjusted_pct(60.0, 192, 256, 64, older) == pytest.approx(22.5)
    assert ofu_sweep.adjusted_pct(None, 192, 256, 64, older) is None


def test_the_sweep_covers_aligned_and_ragged_products_in_the_time_it_promises():
    shapes = (*ofu_sweep.ALIGNED, *ofu_sweep.RAGGED)
    assert len(shapes) == len(set(shapes)) == 40
    assert all(512 <= extent <= 8192 for shape in shapes for extent in shape)
    assert all(any(extent % 64 for extent in shape) for shape in ofu_sweep.RAGGED)
    assert len(shapes) * (ofu.WINDOW_S + 0.5) < 150


def sweep(monkeypatch, ofu_of, *arguments):
    """The command with made-up measurements: 70 % achieved, ``ofu_of(m, n, k)`` seen."""

    def measure(shape, gpu, uuid):
        assert gpu is HARDWARE["h200"] and uuid == "GPU-7"
        m, n, k = shape
        seen = ofu_of(m, n, k)
        share = efficiency.tile_share(m, n, k, efficiency.STEP_TILE)
        return dict(
            m=m,
            n=n,
            k=k,
            dtype="bf16",
            achieved_pct=70.0,
            ofu_pct=seen,
            ofu_adjusted_pct=seen and seen * share,
            missing=["GPM: not supported"],
        )

    monkeypatch.setattr(environment, "gpus", lambda: [{"name": "NVIDIA H200", "driver": "1"}])
    monkeypatch.setattr(ofu, "device_uuid", lambda: "GPU-7")
    monkeypatch.setattr(ofu_sweep, "measure", measure)
    return forge_bench(monkeypatch, "ofu-sweep", *arguments)


def test_the_sweep_writes_its_table(monkeypatch, capsys, tmp_path):
    def padded(m, n, k):
        return 70.0 / efficiency.tile_share(m, n, k, efficiency.STEP_TILE)

    out = tmp_path / "sweep.csv"
    assert sweep(monkeypatch, padded, "--out", str(out), "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["ofu_adjusted_pct_within_2"] == 1.0 > summary["ofu_pct_within_2"] >= 27 / 40
    assert summary["ofu_adjusted_pct_mean_gap"] < 0.01 < summary["ofu_pct_mean_gap"]
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ofu_sweep.COLUMNS and len(rows) == 40
    assert (rows[0]["m"], rows[0]["hardware"], rows[0]["dtype"]) == ("512", "H200", "bf16")
    assert all(float(row["achieved_pct"]) == 70 for row in rows)


def test_the_sweep_without_gpu_or_counters_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "gpus", lambda: [])
    assert forge_bench(monkeypatch, "ofu-sweep") == 2
    assert "ofu-sweep: no NVIDIA GPU here" in capsys.readouterr().err
    assert sweep(monkeypatch, lambda m, n, k: None) == 2
    assert "no OFU on this machine: GPM: not supported" in capsys.readouterr().err
    monkeypatch.setattr(environment, "gpus", lambda: [{"name": "NVIDIA L40S", "driver": "1"}])
    assert forge_bench(monkeypatch, "ofu-sweep") == 2
    assert "the peak of L40S is not known" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_a_large_product_on_a_gpu(monkeypatch):
    from forge.harness import hardware, options

    monkeypatch.setattr(ofu, "LEAD_S", 0.3)
    gpu = hardware.find(options.hardware("cuda"))
    if gpu is None:
        pytest.skip("the peak of this GPU is not known")
    row = ofu_sweep.measure((4096, 4096, 4096), gpu, ofu.device_uuid())
    if row["missing"]:
        pytest.skip("; ".join(row["missing"]))
    assert 40 < row["achieved_pct"] < 100
    assert row["ofu_adjusted_pct"] == pytest.approx(row["achieved_pct"], abs=2)
    assert row["kernel"] and 4096 % row["tile"][0] == 0


@pytest.mark.gpu
def test_cycles_are_counted_of_most_multiprocessors_and_not_faster_than_the_clock_allows():
    before = gpu_clock.read_counters()
    time.sleep(0.1)
    after = gpu_clock.read_counters()
    count = torch.cuda.get_device_properties(0).multi_processor_count
    assert len(before) > 0.9 * count and len(after) > 0.9 * count
    clock = gpu_clock.mean_mhz(before, after)
    assert clock is not None and 100 < clock < 4000
