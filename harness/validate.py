"""``forge-bench validate``: does training with a method end where fp32 master weights end?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from forge.harness import environment, fidelity, options, records, verdict
from forge.harness.fidelity import METHODS, RECORDS_FILE, REFERENCE, Record
from forge.harness.files import locked, write_atomically
from forge.harness.options import RESULTS
from forge.harness.runner import SAME
from forge.harness.settings import MOST_PASSES, new_folder
from forge.harness.validate_models import (
    PRETRAINED_RATES,
    SCRATCH_RATES,
    SMOLLM,
    is_pretrained,
)
from forge.harness.validate_rows import Row, Settings, train_rows
from forge.harness.workloads import MODELS

SETTINGS_FILE = "validate.json"
TRAINED = {"cuda": [SMOLLM, "qwen3-tiny"], "cpu": ["qwen3-tiny"]}
STEPS, BATCH, SEQ = {"cuda": 1000, "cpu": 20}, {"cuda": 4, "cpu": 2}, {"cuda": 512, "cpu": 64}


def command(
    context: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{SMOLLM}, a .gguf file, or, from scratch, {', '.join(MODELS)}; repeatable "
            f"(default: {SMOLLM} and qwen3-tiny; on a CPU qwen3-tiny)"
        ),
    ] = None,
    methods: Annotated[
        str, typer.Option(help=f"{REFERENCE} and keys of `forge-bench list`, by commas")
    ] = ",".join(METHODS),
    lr: Annotated[
        list[float] | None,
        typer.Option(
            min=0, help="constant; repeatable (default: 2e-5 and 1e-6, from scratch 1e-3)"
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="of each row (default: 1000; 20 on a CPU)")
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(
            min=1, max=MOST_PASSES, help="of the data's order, and of weights from scratch"
        ),
    ] = 3,
    batch: Annotated[int | None, typer.Option(min=1, help="default: 4; 2 on a CPU")] = None,
    seq: Annotated[int | None, typer.Option(min=2, help="default: 512; 64 on a CPU")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu (default: cuda if any)")] = None,
    out: Annotated[Path, typer.Option(help="where the run's folder is made")] = RESULTS / "runs",
    resume: Annotated[
        Path | None, typer.Option(help="go on with an interrupted run (its folder)")
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="rows trained side by side, each in a process of its own")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="rows and verdicts on stdout")] = False,
) -> None:
    """Train with each method and compare held-out losses with fp32 master weights.

    Fine-tunes SmolLM2-135M-Instruct, and trains a small model from scratch, on the Python standard
    library's sources; one file in ten is held out. Every method starts from equal weights and sees
    equal batches. ForgeAdamW must end within 0.5 % of the reference (8-bit states: 1 %) and not
    above torch's AdamW in bf16.

    Rows are models x rates x methods x seeds, those that a limit is set for first. --steps and
    --seeds set the time: 1000 steps and 3 seeds are 36 rows of the pretrained model and 18 of the
    small one, planned for fifteen to twenty minutes of an H200, half of it for rows with a limit
    (10 to 35 ms a step; bitsandbytes and FlashOptim, whose own step no graph holds, take longest
    and come last). Half the steps take half of it; one seed takes a third and says nothing about
    noise.

    \b
    Examples:
      forge-bench validate
      forge-bench validate --model smollm2-135m --lr 1e-6 --steps 300 --seeds 1
      forge-bench validate --resume results/runs/FOLDER --jobs 4
    """
    console = options.console(stderr=as_json)
    if resume is not None:
        options.only_resume(context, "jobs")
        folder, settings = resume, options.checked(_load_settings, resume)
        now = options.hardware(options.device(settings.device))
        if now != settings.hardware:
            options.refuse(f"--resume {folder}: was on {settings.hardware}, this is {now}")
    else:
        where = options.device(device)
        names = list(dict.fromkeys(model or TRAINED[where]))
        settings = options.checked(
            Settings,
            run_id="",
            models=names,
            methods=_methods(methods),
            rates=[list(dict.fromkeys(lr or _default_rates(name))) for name in names],
            steps=steps or STEPS[where],
            seeds=seeds,
            batch=batch or BATCH[where],
            seq=seq or SEQ[where],
            device=where,
            hardware=options.hardware(where),
        )
        folder, settings = _create(out, settings)
    try:
        with locked(folder / RECORDS_FILE):
            found, stopped = _execute(folder, settings, jobs, console)
            found = fidelity.in_order(found)
            judged = verdict.verdicts(found)
            verdict.write(folder, found, judged, _title(settings))
    except BlockingIOError:
        options.refuse(f"--resume {folder}: another forge-bench is writing to this run")
    if as_json:
        rows = [{k: v for k, v in asdict(r).items() if k != "train_losses"} for r in found]
        options.show_json(dict(run_id=folder.name, rows=rows, verdicts=verdict.as_json(judged)))
    else:
        options.show_table(console, verdict.table(judged, _title(settings)))
        console.print(f"wrote {folder}", markup=False, highlight=False, soft_wrap=True)
    if stopped:
        raise typer.Exit(stopped)


def _default_rates(model: str) -> Sequence[float]:
    return PRETRAINED_RATES if is_pretrained(model) else SCRATCH_RATES


def _methods(text: str) -> list[str]:
    chosen = list(dict.fromkeys(options.keys(text)))
    if not chosen:
        options.refuse(f"--methods: empty; valid: {', '.join(METHODS)}, or `forge-bench list`")
    for key in chosen:
        try:
            fidelity.method(key)
        except ValueError as error:
            options.refuse(f"--methods: {error}".replace("valid: all,", f"valid: {REFERENCE},"))
    if REFERENCE not in chosen:
        options.refuse(f"--methods: add {REFERENCE}, which every other method is compared with")
    return chosen


def _create(out: Path, settings: Settings) -> tuple[Path, Settings]:
    commit, _ = environment.git_state()
    try:
        workload = "validate" if settings.device == "cuda" else "validate-trial"
        folder = new_folder(out, workload, settings.hardware, commit)
    except OSError as error:
        options.refuse(f"--out {out}: {error}")
    settings = replace(settings, run_id=folder.name)
    text = json.dumps(asdict(settings), indent=1) + "\n"
    try:
        write_atomically(folder / SETTINGS_FILE, text)
    except OSError as error:
        folder.rmdir()
        raise OSError(f"--out {folder}: {error}") from error
    return folder, settings


def _load_settings(folder: Path) -> Settings:
    path = folder / SETTINGS_FILE
    if not path.exists():
        raise ValueError(f"--resume {folder}: holds no {SETTINGS_FILE}, it is no run of validate")
    try:
        return Settings(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"--resume {folder}: unreadable {SETTINGS_FILE} ({error})") from error


def _execute(
    folder: Path, settings: Settings, jobs: int, console: Console
) -> tuple[list[Record], int]:
    """Do what is left of the run. Returns all its records, and the exit code if it was stopped."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} steps"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )

    def say(text: str) -> None:
        progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    found, damaged = fidelity.read(folder)
    plan = list(settings.plan())
    rows = [row for row in plan if row not in {record.done for record in found}]
    known = environment.describe()
    _check_same(folder, found, known)
    for message in damaged:
        say(message)
    say(f"run {folder}: {len(rows)} rows of {settings.steps} steps on {settings.hardware}")
    again = f"forge-bench validate --resume {folder}"
    task = progress.add_task("", total=len(rows) * settings.steps)

    def show(row: Row, steps: int) -> None:
        name = f"{row[0]}/{row[1]}/{row[2]:g}/seed {row[3]}"
        progress.update(task, description=name, advance=steps)

    try:
        with progress, closing(train_rows(rows, settings, known, jobs, show)) as made:
            for number, record in enumerate(made, start=1):
                records.append(folder, record, RECORDS_FILE)
                found.append(record)
                progress.update(task, completed=number * settings.steps)
                say(f"[{number}/{len(rows)}] {_outcome(record)}")
    except KeyboardInterrupt:
        say(f"interrupted; go on with: {again}")
        return found, 130
    except fidelity.DeviceLost as error:
        say(f"the GPU cannot be used any more ({error}); go on with: {again}")
        return found, 1
    except BrokenProcessPool:
        say(f"a process of --jobs {jobs} was killed (memory?); go on with: {again}")
        return found, 1
    return found, 0


def _check_same(folder: Path, earlier: Sequence[Record], now: dict[str, Any]) -> None:
    for record in earlier:
        made, rival = record.environment, fidelity.method(record.key).spec.distribution
        # The text is of this Python's library.
        pairs = {name: (made.get(name), now[name]) for name in (*SAME, "python")}
        if rival:
            pairs[rival] = made.get("rival_version"), environment.package_version(rival)
        for what, (then, current) in pairs.items():
            if then != current:
                options.refuse(
                    f"--resume {folder}: rows would not compare: {what} was "
                    f"{then or 'not there'} and is {current or 'not there'}"
                )


def _outcome(record: Record) -> str:
    if record.status != "ok":
        return f"{record.status:>12}  {record.id}  {record.notes}"
    return (
        f"{record.seconds:10.1f} s  {record.id}  held-out {record.heldout[0][1]:.4f} -> "
        f"{record.heldout_loss:.4f}, train {record.train_loss:.4f} ({record.execution})"
    )


def _title(settings: Settings) -> str:
    s = settings
    title = (
        f"Held-out loss (nats a token, in fp32) after {s.steps} steps of {s.batch} x {s.seq} "
        f"tokens, on {s.hardware}\n"
        "gap: to fp32 master weights, seed by seed, mean (lowest to highest); fall: of the loss, "
        "fp32's is 100; noise: standard deviation of the loss over the seeds"
    )
    if s.device == "cpu":
        title += (
            "\nA CPU run: the reference trains in fp32 throughout. A few steps of a small model "
            "show that every part works, not how training ends."
        )
    return title
