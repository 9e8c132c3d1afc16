"""forge-bench: every option does what it says or is refused in one line with exit code 2."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pandas as pd
import pytest

from command_line import forge_bench
from forge.harness import cli, environment, records, run
from forge.harness.files import locked
from forge.harness.rows import VARIANTS
from forge.optim.registry import REGISTRY

KEYS = ", ".join(REGISTRY)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Refusals must not depend on the machine that runs the tests."""
    monkeypatch.setattr(environment, "gpus", lambda: [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--optimizers adamw,nope", f"--optimizers: unknown nope; valid: all, {KEYS}"),
        ("--optimizers ,", "--optimizers: empty; valid: all"),
        ("--model gpt", "--model: unknown 'gpt'; valid: qwen3-tiny, qwen3-0.6b"),
        ("--weights {tmp}", "the folder holds no config.json"),
        ("--weights {tmp} --model qwen3-tiny", "--model and --weights: a checkpoint brings"),
        ("--batch 0", "--batch"),
        ("--seq 1", "--seq"),
        ("--seq 999999999 --data random", "--batch 1 x --seq 999999999: 999,999,999 tokens a"),
        ("check adamw --batch 999999 --data random", "--batch 999999 x --seq 128: 127,999,872"),
        ("--steps 0", "--steps"),
        ("--warmup 0", "--warmup"),
        ("--repeat 0", "--repeat"),
        ("--repeat 1000000000", "--repeat"),
        ("validate --seeds 1000000000", "--seeds"),
        ("validate --batch 2 --seq 99999999", "--batch 2 x --seq 99999999: 199,999,998 tokens a"),
        ("leaderboard --runs {tmp} --readme README.md", "--include-cpu for those of a CPU"),
        ("--timeout 0", "--timeout"),
        ("--repeat 2 --repeat-only x", "--repeat-only: not in this run: x"),
        ("--repeat-only adamw", "--repeat-only: says what to measure again, but --repeat is 1"),
        ("--seed x", "--seed"),
        ("--seed -1", "--seed"),
        ("--timeout inf", "--timeout"),
        ("--timeout nan", "timeout"),
        ("--data=", "--data: empty, give a value"),
        ("run --weights=", "--weights: empty, give a value"),
        ("--optimizers all,adamw", "--optimizers: all is every method already, give it alone"),
        ("check all,adamw", "METHOD: all is every method already, give it alone"),
        ("check adamw --seed -1", "--seed"),
        ("--states fp7", "--states: no chosen method stores 'fp7'; valid: bf16"),
        ("--kernels x", "--kernels: unknown 'x'; valid: hf, liger"),
        ("--kernels liger", "--kernels liger: Liger's kernels need a CUDA device"),
        ("--attention x", "--attention: unknown 'x'; valid: auto, sdpa, flash, forge"),
        ("--attention flash", "--attention flash: FlashAttention needs a CUDA device"),
        ("--attention forge --kernels forge", "--attention forge: its kernel needs a CUDA device"),
        ("--execution x", "--execution: unknown 'x'; valid: eager, compile"),
        ("--execution cuda_graph", "--execution cuda_graph: a CUDA graph needs a CUDA device"),
        ("--data /no/such", "--data /no/such: no such file or folder"),
        ("--device cuda", "--device cuda: no NVIDIA GPU here"),
        ("--device tpu", "--device: unknown 'tpu'; valid: cuda, cpu"),
        ("--out /proc/no/such", "--out /proc/no/such"),
        ("--resume {tmp}", "holds no run.json, it is not a run's folder"),
        ("--resume {tmp} --batch 2", "--resume takes every setting from the run's folder; drop"),
        ("--bogus", "No such option: --bogus"),
        ("bogus", "unknown command bogus; valid: check, compare"),
        ("leaderboard --runs /no/such", "--runs /no/such: no such folder"),
        ("leaderboard --runs . --run x", "--run x: chooses the README's table, give --readme too"),
        ("publish --runs /no/such", "--runs /no/such: no such folder"),
        ("leaderboard --runs . --published no.csv", "--published no.csv: no such file"),
        ("publish --runs . --published no.csv", "--published no.csv: no such file"),
        ("kernels --op rms_norm --device cpu --out .", "--out .: is a folder"),
        ("compare a b --runs /no/such", "a: no such run folder, run or commit in /no/such"),
        ("compare a", "Missing argument 'B'"),
        ("check", "Missing argument 'METHOD'"),
        ("check nope", "METHOD: unknown nope; valid: all"),
        ("check adamw --model gpt", "--model: unknown 'gpt'; valid: qwen3-tiny"),
        ("list extra", "unexpected extra argument"),
    ],
)
def test_refused_in_one_line_before_anything_is_written(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    given = arguments.format(tmp=tmp_path).split()
    assert forge_bench(monkeypatch, *given) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("forge-bench: ") and message in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["leaderboard", "publish"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"A,B\n1,2,3,4\n1\n1,2,3,4,5,6\n", "p.csv: no table of published results (ParserError"),
        (b"\xff\xfe\x00", "p.csv: no table of published results (UnicodeDecodeError"),
        (b"", "p.csv: no table of published results (EmptyDataError"),
        (b"method,model\na,b\n", "p.csv: a table without the columns batch, hardware, seq"),
    ],
)
def test_a_damaged_table_of_published_results(
    command, content, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("p.csv").write_bytes(content)
    assert forge_bench(monkeypatch, command, "--runs", ".", "--published", "p.csv") == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["p.csv"]


def test_resume_on_another_machine_is_refused(tmp_path, monkeypatch, capsys):
    options = ["--optimizers", "adalomo", "--data", "random", "--out", str(tmp_path)]
    assert forge_bench(monkeypatch, *options) == 0
    (folder,) = tmp_path.iterdir()
    monkeypatch.setattr(environment, "cpu_name", lambda: "another CPU")
    assert forge_bench(monkeypatch, "--resume", str(folder)) == 2
    assert "rows would not compare" in capsys.readouterr().err


def test_an_argument_that_is_empty_is_refused(monkeypatch, capsys):
    assert forge_bench(monkeypatch, "--data", "") == 2
    assert capsys.readouterr().err == "forge-bench: --data: empty, give a value\n"


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": "1"},
        {"timeout_s": float("inf")},
        {"seq": 0},
        {"rows": [{"key": "adamw"}]},
        {"rows": ["adamw"]},
        {"rows": [{"key": "adamw", "kernels": 3, "execution": "eager"}]},
        {"model": "gpt"},
    ],
)
def test_settings_that_cannot_be_are_refused(changes, tmp_path, monkeypatch, capsys):
    options = ["--optimizers", "adalomo", "--data", "random", "--out", str(tmp_path)]
    assert forge_bench(monkeypatch, *options) == 0
    (folder,) = tmp_path.iterdir()
    settings = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    (folder / "run.json").write_text(json.dumps(settings | changes), encoding="utf-8")
    assert forge_bench(monkeypatch, "--resume", str(folder)) == 2
    error = capsys.readouterr().err
    assert "unreadable run.json" in error and error.count("\n") == 1


@pytest.mark.parametrize("text", ['{"model": ', '{"rows": 3}', "[]"])
def test_a_broken_run_json_is_refused(text, tmp_path, monkeypatch, capsys):
    (tmp_path / "run.json").write_text(text)
    assert forge_bench(monkeypatch, "--resume", str(tmp_path)) == 2
    assert "unreadable run.json" in capsys.readouterr().err


def test_list_names_every_method_with_package_licence_and_limits(monkeypatch, capsys):
    assert forge_bench(monkeypatch, "list") == 0
    shown = capsys.readouterr().out
    flat = " ".join(shown.replace("│", " ").split())
    for spec in REGISTRY.values():
        assert spec.key in flat and spec.licence in flat and spec.states in flat
        assert (spec.distribution or "torch") in flat
        for limit in spec.limits:
            assert limit.split()[0] in flat
    assert "CC-BY-NC-4.0" in flat and "non-commercial" in flat


def test_list_as_json(monkeypatch, capsys):
    assert forge_bench(monkeypatch, "list", "--json") == 0
    shown = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(shown) == list(REGISTRY)
    assert shown["forge-bf16"]["package"] == "forge-optim"
    assert shown["adalomo"]["devices"] == ["cuda"]


COMMANDS = sorted(str(command.name) for command in cli.app.registered_commands)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_json(command, monkeypatch, capsys):
    assert forge_bench(monkeypatch, command, "--help") == 0
    shown = capsys.readouterr().out
    example = shown.partition("Example")[2].splitlines()
    assert example[1].strip().startswith(f"forge-bench {command}"), shown
    assert "--json" in shown


def test_help_lists_commands_and_exit_codes(monkeypatch, capsys):
    assert forge_bench(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {command} " in shown for command in COMMANDS)
    assert re.findall(r"^ +(\d+)  ", shown, re.MULTILINE) == ["0", "1", "2", "130"]


def test_every_example_of_the_help_is_a_command_that_exists():
    """Parsed as the command line would be; docs/ has the ones that run in a test."""
    from typer.main import get_command

    group = get_command(cli.app)
    found = [cli.HELP, *(command.help or "" for command in group.commands.values())]
    examples = re.findall(r"^ +forge-bench (.+)$", "\n".join(found), re.MULTILINE)
    assert len(examples) >= 1 + len(group.commands)
    for words in (example.split() for example in examples):
        if words != ["--install-completion"]:
            name = "run" if words[0].startswith("-") else words.pop(0)
            group.commands[name].make_context(name, words)  # raises on what it does not know


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("comp", ["compare"]),
        ("roofline --hard", ["--hardware"]),
        ("--opt", ["--optimizers"]),
        ("--optimizers all --repeat-", ["--repeat-only"]),
        ("--install", ["--install-completion"]),
    ],
)
def test_completion(monkeypatch, capsys, words, found):
    line = f"forge-bench {words}"
    for name, value in (
        ("_FORGE_BENCH_COMPLETE", "complete_bash"),
        ("COMP_WORDS", line.replace(" ", "\n")),  # as the script of bash joins them
        ("COMP_CWORD", str(line.count(" "))),
    ):
        monkeypatch.setenv(name, value)
    assert forge_bench(monkeypatch) == 0
    assert capsys.readouterr().out.split() == found


def test_completion_in_zsh(monkeypatch, capsys):
    monkeypatch.setenv("_FORGE_BENCH_COMPLETE", "complete_zsh")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "forge-bench --opt")
    assert forge_bench(monkeypatch) == 0
    assert "--optimizers" in capsys.readouterr().out


def test_a_full_disk_ends_a_run_with_one_line_and_its_records(tmp_path, monkeypatch, capsys):
    """Two rows that are settled without a worker; there is room for run.json and one record."""
    another = dataclasses.replace(REGISTRY["adalomo"], key="another")
    monkeypatch.setitem(REGISTRY, "another", another)
    room, write = iter([True, True]), records.os.fsync

    def fsync(file):
        if not next(room, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file)

    monkeypatch.setattr(records.os, "fsync", fsync)
    options = ["--optimizers", "adalomo,another", "--data", "random", "--seq", "16"]
    assert forge_bench(monkeypatch, *options, "--out", str(tmp_path)) == 1
    error = capsys.readouterr().err
    assert error.startswith("forge-bench: ") and error.count("\n") == 1
    assert "No space left on device" in error and "--resume" in error
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "run.json").read_text())["run_id"] == folder.name
    assert len(records.load(folder)[0]) >= 1


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("run --optimizers adalomo --data random --seq 16", "--out {out}/"),
        ("validate --steps 1 --seeds 1 --methods fp32-master", "--out {out}/"),
        ("profile adamw --steps 1 --warmup 1 --seq 16", "{out}/"),
        ("kernels --op rms_norm", "--out {out}/k.csv"),
        ("publish --runs .", "--target {out}"),
        ("leaderboard --runs .", "--target {out}"),
    ],
)
def test_a_disk_that_is_full_from_the_start(command, named, tmp_path, monkeypatch, capsys):
    """Exit code 1, one line that names what could not be written, and no half of it is left."""

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(records.os, "fsync", full)
    monkeypatch.setattr(environment, "gpus", lambda: [])
    out = tmp_path / "out"
    where = dict(kernels=["--out", f"{out}/k.csv"], publish=["--target", str(out)],
                 leaderboard=["--target", f"{out}/l.csv"])  # fmt: skip
    words = command.split()
    code = forge_bench(monkeypatch, *words, *where.get(words[0], ["--out", str(out)]))
    assert code == 1
    error = capsys.readouterr().err
    last = error.splitlines()[-1]
    assert last.startswith(f"forge-bench: {named.format(out=out)}") and "No space left" in last
    left = [path for path in out.rglob("*") if path.is_file() and path.name != "log.txt"]
    assert [path.name for path in left] == (["kernels.jsonl"] if words[0] == "kernels" else [])
    assert words[0] == "kernels" or list(out.iterdir()) == []


def test_an_interrupt_that_a_finalizer_swallows_is_not_lost(tmp_path, monkeypatch, capsys):
    class Finalized:
        pass

    def long_work(*_):
        dying = Finalized()
        ref = weakref.ref(dying, lambda _: signal.raise_signal(signal.SIGINT))
        del dying
        for _ in range(1000):
            time.sleep(0.01)
        return ref

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.leaderboard, "read", long_work)
    hook = sys.unraisablehook
    assert forge_bench(monkeypatch, "leaderboard", "--runs", ".") == 130
    assert capsys.readouterr().err == "forge-bench: interrupted\n" and sys.unraisablehook is hook


def test_a_folder_has_one_writer(tmp_path, monkeypatch, capsys):
    options = ["--optimizers", "adalomo", "--data", "random", "--out", str(tmp_path)]
    assert forge_bench(monkeypatch, *options) == 0
    (folder,) = tmp_path.iterdir()
    before = (folder / records.RECORDS_FILE).read_bytes()
    with locked(folder / "log.txt"):
        assert forge_bench(monkeypatch, "--resume", str(folder)) == 2
        assert "another forge-bench is writing to this run" in capsys.readouterr().err
    assert forge_bench(monkeypatch, "--resume", str(folder)) == 0
    assert (folder / records.RECORDS_FILE).read_bytes() == before


def test_options_do_what_they_say(tmp_path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 40)
    code = forge_bench(
        monkeypatch,
        *(
            "run --optimizers adamw-fused,forge-fp32 --states bf16 --kernels torch --batch 2"
        ).split(),
        *("--seq 24 --steps 3 --warmup 2 --seed 7 --repeat 2 --device cpu --json").split(),
        *("--data", str(text), "--out", str(tmp_path / "out")),
    )
    captured = capsys.readouterr()
    assert code == 0, captured.err
    shown = json.loads(captured.out)
    (folder,) = (tmp_path / "out").iterdir()
    found, damaged = records.load(folder)
    assert damaged == [] and [record.repeat for record in found] == [0, 1]
    for record in found:
        assert (record.key, record.states, record.kernels) == ("adamw-fused", "bf16", "torch")
        assert (record.batch, record.seq, record.steps, record.warmup) == (2, 24, 3, 2)
        assert record.status == "ok" and record.data.startswith(str(text))
        assert record.environment["seed"] == 7
    drift = json.loads((folder / "run.json").read_text())["drift_pct"]
    low, high = sorted(record.latency_ms for record in found)
    assert drift == pytest.approx(100 * (high / low - 1), abs=0.01)
    assert ("run marked: drift of" in captured.err) == (drift > 2)
    (row,) = shown
    assert row["latency_ms"] == pytest.approx((low + high) / 2, rel=1e-3)
    assert row["steps"] == 6 and row["method"] == "fused AdamW" and "2 passes" in row["notes"]


def test_damaged_published_rows_do_not_hide_what_was_measured(tmp_path, monkeypatch, capsys):
    (tmp_path / "published.csv").write_text("\x00nothing\n")
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    arguments = "--optimizers adamw-fused --seq 16 --steps 2 --warmup 1 --device cpu --json"
    code = forge_bench(monkeypatch, *arguments.split(), "--out", str(tmp_path / "out"))
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert "published.csv: a table without the columns batch, hardware" in captured.err
    (row,) = json.loads(captured.out)
    assert row["method"] == "fused AdamW" and row["status"] == "ok"


def test_weights_of_a_checkpoint(tmp_path, monkeypatch, capsys):
    import torch

    from forge.harness.workloads import MODELS, build_model

    config = MODELS["qwen3-tiny"].hf_config(layers=1)
    common = dict(device="cpu", dtype=torch.bfloat16, attention="sdpa", kernels="hf")
    build_model(config, **common, seed=5).save_pretrained(tmp_path / "checkpoint")
    code = forge_bench(
        monkeypatch,
        *("--optimizers adamw --seq 16 --steps 2 --data random --device cpu --weights").split(),
        *(str(tmp_path / "checkpoint"), "--out", str(tmp_path / "out")),
    )
    assert code == 0, capsys.readouterr().err
    (folder,) = (tmp_path / "out").iterdir()
    (record,) = records.load(folder)[0]
    assert (record.status, record.model) == ("ok", "checkpoint")
    assert record.params == 8192 * 256 + 256 * (3 * 256 + 3 * 512) + 3 * 256 + 2 * 64


def save_checkpoint(folder, kind, **sizes):
    """A small checkpoint of the architecture ``kind``, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).save_pretrained(folder)
    return str(folder)


def test_a_checkpoint_whose_operations_are_not_counted_is_timed(tmp_path, monkeypatch, capsys):
    sizes = dict(vocab_size=512, n_embd=64, n_layer=1, n_head=2, n_positions=32)
    weights = save_checkpoint(tmp_path / "gpt2", "gpt2", **sizes)
    arguments = "--optimizers adamw --seq 16 --steps 2 --data random --device cpu --out"
    out = str(tmp_path / "out")
    assert forge_bench(monkeypatch, *arguments.split(), out, "--weights", weights) == 0
    (folder,) = (tmp_path / "out").iterdir()
    (record,) = records.load(folder)[0]
    assert (record.status, record.model) == ("ok", "gpt2"), record.notes
    assert "no MFU" in record.notes


def test_an_encoder_is_no_causal_language_model(tmp_path, monkeypatch, capsys):
    sizes = dict(vocab_size=512, hidden_size=64, num_hidden_layers=1, num_attention_heads=2)
    weights = save_checkpoint(tmp_path / "bert", "bert", **sizes, intermediate_size=64)
    assert forge_bench(monkeypatch, "--weights", weights, "--device", "cpu") == 2
    assert "no causal language model there: a checkpoint of type 'bert'" in capsys.readouterr().err


def test_any_text_may_name_a_folder(tmp_path):
    """Without UTF-8 in the environment, a name that is no ASCII."""
    env = dict(os.environ, PYTHONUTF8="0", LC_ALL="C")
    options = "--optimizers adalomo --data random --seq 16 --device cpu --out dirü".split()
    command = [sys.executable, "-m", "forge.harness.cli"]
    done = subprocess.run([*command, *options], cwd=tmp_path, env=env, capture_output=True)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "dirü").iterdir()
    assert "dir" in (folder / "log.txt").read_text(encoding="utf-8")
    again = [*command, "publish", "--include-cpu", "--runs", "dirü", "--target", "dirü/t"]
    done = subprocess.run(again, cwd=tmp_path, env=env, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path):
    options = "--optimizers adamw,adamw-fused --data random --seq 16 --device cpu --out out".split()
    command = f"{sys.executable} -m forge.harness.cli {' '.join(options)} 2>errors; echo $? >code"
    subprocess.run(f"({command}) | head -1", shell=True, cwd=tmp_path, check=True)
    (folder,) = (tmp_path / "out").iterdir()
    assert [record.status for record in records.load(folder)[0]] == ["ok", "ok"]
    assert (tmp_path / "code").read_text() == "0\n" and (tmp_path / "errors").read_text() == ""


def test_all_end_to_end(tmp_path):
    """The main job: every row ends in a defined status, within two minutes, on a CPU."""
    code = "from forge.harness import cli; cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--optimizers", "all", "--device", "cpu"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,  # other tests run beside it
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "results" / "runs").iterdir()
    found, _ = records.load(folder)
    rivals = [row for row in VARIANTS if row.kernels != "forge"]  # the others are for a GPU
    assert len(found) == len(REGISTRY) + len(rivals)
    by_key = {record.row: record for record in found}
    for key in ("adamw", "adamw-foreach", "adamw-fused", "forge-bf16", "forge-fp32"):
        record = by_key[f"{key}/hf/eager"]
        assert (record.status, record.gate) == ("ok", "pass"), record.notes
    assert {record.status for record in found} <= {"ok", "unsupported", "skipped"}
    assert all(record.notes for record in found if record.status != "ok")
    assert "says nothing about a GPU" in done.stdout and "qwen3-tiny" in done.stdout
    again = subprocess.run(
        [sys.executable, "-c", code, "leaderboard", "--include-cpu"], cwd=tmp_path, text=True
    )
    assert again.returncode == 0
    frame = pd.read_csv(tmp_path / "results" / "leaderboard.csv")
    assert len(frame) == len(found) and set(frame["source"]) == {"measured"}
