"""Profiles: made-up GPU traces with known times, and a real one of a CPU."""

from __future__ import annotations

import csv
import gzip
import json

import pytest

from command_line import forge_bench
from forge.harness import profile, profiles, trace
from forge.harness.rows import Row
from forge.harness.workloads import MODELS

# Names as CUDA's profiler gives them.
KERNELS = {
    "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNN": "gemm",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x128x64_execute_kernel": "gemm",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_32x3_nn>": "gemm",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>": "gemm",
    "triton_tem_fused_mm_12": "gemm",
    "_linear_hopper_kernel": "gemm",
    "_attention_bwd_hopper_kernel": "attention",
    "_attention_finish_kernel": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128": "attention",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<128>": "attention",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80": "attention",
    "void (anonymous namespace)::softmax_warp_forward<float, 9>": "attention",
    "_rms_norm_backward_kernel": "norm",
    "_swiglu_forward_kernel": "norm",
    "_triton_rope": "norm",
    "triton_red_fused__fused_rms_norm__to_copy_add_3": "norm",
    "triton_poi_fused_cat_mul_7": "norm",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>": "norm",
    "void at::native::reduce_kernel<512, 1, at::native::MeanOps<float>>": "norm",
    "liger_cross_entropy_kernel": "loss",
    "element_mul_kernel": "loss",
    "triton_red_fused__log_softmax_nll_loss_forward_1": "loss",
    "void at::native::cunn_SoftMaxBackward<4, float, LogSoftMaxBackwardEpilogue>": "loss",
    "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<c10::BFloat16, 4>>": "update",
    "void kOptimizerStatic8bit2StateBlockwise<__nv_bfloat16, 0, 256, 1>": "update",
    "_wgrad_update_kernel": "update",
    "_wgrad_update_hopper_kernel": "update",
    "_wgrad_update_hopper_int8_kernel": "update",
    "_apply_rule_kernel": "update",
    "_triton_adam_kernel": "update",
    "Memcpy DtoD (Device -> Device)": "other",
    "void at::native::embedding_backward_feature_kernel<c10::BFloat16>": "other",
    "something nobody has seen": "other",
    "aten::mm": "gemm",
    "aten::addmm": "gemm",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
    "aten::_log_softmax_backward_data": "loss",
    "aten::silu_backward": "norm",
    "aten::copy_": "norm",
    "aten::add": "norm",
    "aten::empty_strided": "other",
}


@pytest.mark.parametrize(("name", "part"), KERNELS.items())
def test_part_of_a_kernel(name, part):
    assert trace.part_of(name) == part
    assert trace.part_of(name, in_update=True) == "update"


def test_our_kernels_are_called_what_the_table_expects():
    from forge.kernels import apply_rule, wgrad_update

    names = [apply_rule._apply_rule_kernel.__name__, wgrad_update._wgrad_update_kernel.__name__]
    assert [trace.part_of(name) for name in names] == ["update", "update"]


class Trace:
    """Builds a Chrome trace of two threads of a host and a device."""

    def __init__(self):
        self.events = [{"ph": "M", "name": "process_name", "ts": 0}]
        self.count = 0

    def add(self, category, name, begin, us, tid=1, **args):
        event = dict(ph="X", cat=category, name=name, ts=begin, dur=us, tid=tid, args=args)
        self.events.append(event)

    def launch(self, name, launched, begin, us, call="cudaLaunchKernel", tid=1):
        self.count += 1
        self.add("cuda_runtime", call, launched, 2, tid, correlation=self.count)
        self.add("kernel", name, begin, us, tid=7, correlation=self.count)

    def write(self, path):
        opened = gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w")
        with opened as file:
            json.dump({"traceEvents": self.events}, file)
        return path


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_times_of_a_gpu_trace(tmp_path, suffix):
    made = Trace()
    made.launch("nvjet_before_the_steps", 10, 20, 50)
    for begin in (1000, 2000):
        made.add("user_annotation", trace.STEP, begin, 800)
        made.launch("nvjet_a", begin + 10, begin + 20, 200)
        made.launch("nvjet_a", begin + 12, begin + 220, 100)
        # Overlaps the second product by 50: busy once.
        made.launch("_rms_norm_forward_kernel", begin + 15, begin + 270, 100)
        made.add("user_annotation", "Optimizer.step#AdamW.step", begin + 400, 100)
        made.launch("void vectorized_elementwise_kernel<x>", begin + 450, begin + 500, 60)
        # Launched meanwhile by another thread: not the update's.
        made.launch("void vectorized_elementwise_kernel<x>", begin + 460, begin + 560, 40, tid=2)
        made.add("cpu_op", "aten::mm", begin + 5, 30)
    steps = trace.read_steps(made.write(tmp_path / f"trace{suffix}"))
    assert (steps.count, steps.wall_ms, steps.launches) == (2, 0.8, 5)
    assert steps.busy_ms == pytest.approx((200 + 100 + 50 + 60 + 40) / 1e3)
    parts = steps.parts()
    assert parts["gemm"] == pytest.approx((0.3, 2))
    assert parts["norm"] == pytest.approx((0.14, 2))
    assert parts["update"] == pytest.approx((0.06, 1))
    assert parts["loss"] == parts["other"] == parts["attention"] == (0, 0)
    name, part, ms, calls = steps.kernels()[0]
    assert (name, part, calls) == ("nvjet_a", "gemm", 2) and ms == pytest.approx(0.3)
    # The kernel that both launched has two rows.
    assert [row[1] for row in steps.kernels() if "elementwise" in row[0]] == ["update", "norm"]


def test_a_graph_is_one_launch_and_its_kernels_go_by_name(tmp_path):
    made = Trace()
    made.add("user_annotation", trace.STEP, 0, 500)
    made.add("cuda_runtime", "cudaGraphLaunch", 5, 2, correlation=9)
    for i, name in enumerate(("nvjet_a", "_wgrad_update_kernel", "cudnn_sdpa_bwd")):
        made.add("kernel", name, 10 + 100 * i, 90, tid=7, correlation=9)
    steps = trace.read_steps(made.write(tmp_path / "trace.json"))
    assert steps.launches == 1 and steps.busy_ms == pytest.approx(0.27)
    shown = {name: ms for name, (ms, _) in steps.parts().items() if ms}
    assert shown == pytest.approx({"gemm": 0.09, "update": 0.09, "attention": 0.09})


def test_own_time_of_operators(tmp_path):
    made = Trace()
    made.add("user_annotation", trace.STEP, 0, 1000)
    made.add("cpu_op", "aten::linear", 100, 300)
    made.add("cpu_op", "aten::mm", 100, 250)
    made.add("cpu_op", "aten::empty", 110, 10)
    made.add("cpu_op", "aten::mm", 100, 40, tid=2)
    made.add("user_annotation", "Optimizer.step#AdamW.step", 500, 100)
    made.add("cpu_op", "aten::mul", 510, 20)
    steps = trace.read_steps(made.write(tmp_path / "trace.json"))
    parts = steps.parts()
    assert parts["gemm"] == pytest.approx((0.24 + 0.04, 2))
    assert parts["other"] == pytest.approx((0.05 + 0.01, 2))
    assert parts["update"] == pytest.approx((0.02, 1))
    assert steps.busy_ms == pytest.approx(0.36) and steps.launches == 0


def test_a_trace_without_steps_or_work_is_an_error(tmp_path):
    made = Trace()
    with pytest.raises(ValueError, match="no span called"):
        trace.read_steps(made.write(tmp_path / "trace.json"))
    made.add("user_annotation", trace.STEP, 0, 100)
    with pytest.raises(ValueError, match="nothing ran"):
        trace.read_steps(made.write(tmp_path / "trace.json"))


def test_ranking_by_what_can_be_gained():
    work = (
        trace.Work("nvjet", "gemm", 0, 6000),
        trace.Work("adam", "update", 6000, 2000),
        trace.Work("what", "other", 8000, 400),
    )
    steps = trace.Steps(1, wall_ms=30.0, busy_ms=8.4, work=work, launches=3)
    rows = profile.ranking(steps, 10.0, {"gemm": 5.5, "update": 0.5, "attention": 0.1})
    by_part = {row["part"]: row for row in rows}
    assert [row["part"] for row in rows][:4] == ["idle", "update", "gemm", "other"]
    # The wall time is that of a step without the profiler.
    assert by_part["idle"]["ms"] == pytest.approx(1.6)
    assert by_part["update"]["gain_pct"] == pytest.approx(15)
    assert by_part["gemm"]["gain_pct"] == pytest.approx(5)
    assert by_part["gemm"]["share_pct"] == pytest.approx(60)
    assert by_part["attention"]["gain_pct"] == 0  # nothing above its floor
    assert by_part["other"]["floor_ms"] is None


def test_floors_follow_the_method():
    config = MODELS["qwen3-0.6b"].hf_config()

    def floors(key):
        return profile.floors_ms(Row(key, "torch", "eager"), config, 1, 512, "NVIDIA H200")

    separate, fused = floors("adamw-fused"), floors("forge-bf16")
    step = sum(fused[part] for part in ("gemm", "attention", "update"))
    assert step == pytest.approx(3.51, abs=0.01)
    assert separate["update"] == pytest.approx(14 * 596e6 / 4.3e9, rel=0.001)
    assert separate["gemm"] == pytest.approx(3 * (0.571 + 0.202), abs=0.002)
    assert floors("bnb-adamw8bit")["update"] < separate["update"] < floors("forge-fp32")["update"]
    assert profile.floors_ms(Row("adamw", "hf", "eager"), config, 1, 512, "EPYC") == {}


def test_a_cpu_profile(monkeypatch, capsys, tmp_path):
    options = "--seq 16 --steps 2 --warmup 1 --device cpu --top 4 --out".split()
    code = forge_bench(monkeypatch, "profile", "adamw-fused", *options, str(tmp_path), "--json")
    captured = capsys.readouterr()
    assert code == 0, captured.err
    found = json.loads(captured.out)
    (folder,) = tmp_path.iterdir()
    assert found["folder"] == str(folder)
    assert "adamw-fused-hf-eager-qwen3-tiny-b1-s16" in folder.name
    assert len(found["kernels"]) == 4 and found["launches"] == 0
    parts = {row["part"]: row for row in found["parts"]}
    assert parts["gemm"]["pieces"] == 3 * (4 * 7 + 1)  # forward, two backward, a linear
    assert parts["attention"]["ms"] > 0 < parts["loss"]["ms"] and parts["update"]["pieces"] > 0
    assert sum(row["ms"] for row in found["parts"]) == pytest.approx(found["wall_ms"], rel=0.01)
    assert sum(row["share_pct"] for row in found["parts"]) == pytest.approx(100, abs=1)
    with (folder / "parts.csv").open() as file:
        assert [row["part"] for row in csv.DictReader(file)] == list(parts)
    with (folder / "kernels.csv").open() as file:
        names = [row["kernel"] for row in csv.DictReader(file)]
    assert "aten::_fused_adamw_" in names and "aten::mm" in names
    events = json.loads(gzip.open(folder / "trace.json.gz").read())["traceEvents"]
    assert sum(event["name"] == trace.STEP for event in events) == 2
    (kept,), damaged = profiles.load_all(tmp_path)
    assert damaged == [] and kept.parts == found["parts"] and kept.wall_ms == found["wall_ms"]
    assert (kept.run_id, kept.row, kept.seq) == (folder.name, "adamw-fused/hf/eager", 16)
    text = (folder / "profile.txt").read_text()
    assert "matrix products" in text and "aten::mm" in text and "ms a step" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nope", "METHOD: unknown nope; valid: all, adamw"),
        ("adamw,adamw-fused", "profile adamw,adamw-fused: one method at a time"),
        ("all", "profile all: one method at a time"),
        ("flashoptim", "profile flashoptim: unsupported: FlashOptim runs on cuda only"),
        ("adamw --kernels liger", "--kernels liger: Liger's kernels need a CUDA device"),
        ("adamw --execution cuda_graph", "--execution cuda_graph: a CUDA graph needs a CUDA"),
        ("adamw --model nope", "--model: unknown 'nope'"),
        ("adamw --attention x", "--attention: unknown 'x'"),
        ("adamw --steps 0", "--steps"),
        ("adamw --device cuda", "--device cuda: no NVIDIA GPU here"),
        ("adamw --seq 16 --out /proc/no/such", "--out /proc/no/such"),
    ],
)
def test_refusals(arguments, message, tmp_path, monkeypatch, capsys):
    from forge.harness import environment

    monkeypatch.setattr(environment, "gpus", lambda: [])
    monkeypatch.chdir(tmp_path)
    assert forge_bench(monkeypatch, "profile", *arguments.split()) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_profile_leaves_nothing(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(profile, "record", interrupted)
    options = "--seq 16 --steps 1 --warmup 1 --device cpu --out".split()
    assert forge_bench(monkeypatch, "profile", "adamw", *options, str(tmp_path)) == 130
    assert capsys.readouterr().err.endswith("forge-bench: interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.parametrize("execution", ["eager", "cuda_graph"])
def test_a_gpu_profile(execution, monkeypatch, capsys, tmp_path):
    options = f"--model qwen3-tiny --seq 128 --kernels torch --execution {execution} --out".split()
    code = forge_bench(monkeypatch, "profile", "adamw-fused", *options, str(tmp_path), "--json")
    captured = capsys.readouterr()
    assert code == 0, captured.err
    found = json.loads(captured.out)
    parts = {row["part"]: row for row in found["parts"]}
    # q, k, v are one matrix here, gate and up too; a product may be split over two kernels.
    assert parts["gemm"]["pieces"] >= 3 * (4 * 4 + 1)
    assert parts["attention"]["pieces"] >= 8 and parts["update"]["pieces"] >= 1
    assert parts["idle"]["ms"] < found["wall_ms"]
    # A graph is one launch beside the copies of the batch.
    assert (found["launches"] < 10) == (execution == "cuda_graph")
