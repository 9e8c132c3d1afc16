"""``forge-bench validate``: does training with a method end where fp32 master weights end?"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache, lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from forge.harness import data, environment, fidelity, options, records, verdict
from forge.harness.execution import Batch
from forge.harness.fidelity import METHODS, RECORDS_FILE, REFERENCE, Method, Record
from forge.harness.files import locked, write_atomically
from forge.harness.options import RESULTS
from forge.harness.pool import side_by_side
from forge.harness.runner import MOST, MOST_PASSES, SAME, new_folder
from forge.harness.validate_models import (
    PRETRAINED_RATES,
    SCRATCH_RATES,
    SMOLLM,
    check_model,
    is_pretrained,
    judge,
    load,
    missing,
)
from forge.harness.workloads import MODELS

SETTINGS_FILE = "validate.json"
# Batches of held-out text. Methods are compared on the same ones, so its size only matters for how
# well it stands for other text.
HELD_OUT = {"cuda": 16, "cpu": 4}
TRAINED = {"cuda": [SMOLLM, "qwen3-tiny"], "cpu": ["qwen3-tiny"]}
STEPS, BATCH, SEQ = {"cuda": 1000, "cpu": 20}, {"cuda": 4, "cpu": 2}, {"cuda": 512, "cpu": 64}


# Model, method, learning rate, seed.
Row = tuple[str, str, float, int]


@dataclass(frozen=True)
class Settings:
    """Everything that defines a run; kept in ``validate.json`` so that ``--resume`` can go on.

    Attributes:
        rates: learning rates of each model, in the order of ``models``.
        seeds: how many; they are 0, 1, ...
    """

    run_id: str
    models: list[str]
    methods: list[str]
    rates: list[list[float]]
    steps: int
    seeds: int
    batch: int
    seq: int
    device: str
    hardware: str

    def __post_init__(self) -> None:
        records.check_kinds(self)
        for name in ("steps", "seeds", "batch", "seq"):
            if not 1 <= getattr(self, name) <= MOST:
                raise ValueError(f"{name} must be 1 to {MOST}, got {getattr(self, name)}")
        if self.seeds > MOST_PASSES:
            raise ValueError(f"seeds must be at most {MOST_PASSES}, got {self.seeds}")
        data.check_tokens(self.batch, self.seq)
        if len(self.rates) != len(self.models) or self.device not in HELD_OUT:
            raise ValueError("models and rates do not fit, or the device is unknown")
        for rate in chain.from_iterable(self.rates):
            if not (isinstance(rate, int | float) and 0 <= rate < math.inf):
                raise ValueError(f"--lr must be a number from 0 on, got {rate!r}")
        for name in self.models:
            check_model(name)
        for key in self.methods:
            fidelity.method(key)

    def plan(self) -> Iterator[Row]:
        """All rows.

        What a promise is about comes first, then the other methods; in each, model by model and
        seed by seed: what was interrupted has whole comparisons.
        """
        promised = [key for key in self.methods if key in verdict.PROMISED]
        others = [key for key in self.methods if key not in promised]
        for keys in (promised, others):
            for model, rates in zip(self.models, self.rates, strict=True):
                for seed in range(self.seeds):
                    for lr in rates:
                        for key in keys:
                            yield model, key, lr, seed


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
            found = _in_order(settings, found)
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


def _in_order(settings: Settings, found: Sequence[Record]) -> list[Record]:
    places = {row: i for i, row in enumerate(settings.plan())}
    return sorted(found, key=lambda record: places.get(record.done, len(places)))


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
        with progress, closing(_records(rows, settings, known, jobs, show)) as made:
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


def _records(
    rows: Sequence[Row],
    settings: Settings,
    known: dict[str, Any],
    jobs: int,
    show: Callable[[Row, int], None],
) -> Generator[Record]:
    """The rows' records, as they come; ``show(row, steps)`` says what has been done."""
    if jobs > 1 and len(rows) > 1:
        yield from side_by_side(_row_beside, [(row, settings, known) for row in rows], jobs)
        return
    for row in rows:
        show(row, 0)
        yield _timed_row(row, settings, known, partial(show, row))
        fidelity.release(settings.device)


def _row_beside(row: Row, settings: Settings, known: dict[str, Any]) -> Record:
    fidelity.release(settings.device)  # what the process' row before left
    return _timed_row(row, settings, known)


def _timed_row(
    row: Row, settings: Settings, known: dict[str, Any], tick: Any = lambda _: None
) -> Record:
    if settings.device == "cpu":
        torch.set_num_threads(1)  # on a busy machine more of them take much longer
    begin = time.monotonic()
    record = _row(row, settings, known, tick)
    return replace(record, seconds=round(time.monotonic() - begin, 2))


def _row(row: Row, settings: Settings, known: dict[str, Any], tick: Any) -> Record:
    name, key, lr, seed = row
    chosen = fidelity.method(key)
    rival = chosen.spec.distribution
    base: dict[str, Any] = dict(
        run_id=settings.run_id,
        model=name,
        model_name=MODELS[name].name if name in MODELS else Path(name).stem,
        key=key,
        method=chosen.name,
        states=chosen.states,
        lr=lr,
        seed=seed,
        steps=settings.steps,
        batch=settings.batch,
        seq=settings.seq,
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        hardware=settings.hardware,
        device=settings.device,
        environment={**known, "rival_version": environment.package_version(rival)},
    )
    absent = missing(name)
    if absent:
        return Record(**base, status="skipped", notes=absent)
    return Record(**base, **_train(name, chosen, lr, seed, settings, tick))


def _train(
    name: str, chosen: Method, lr: float, seed: int, settings: Settings, tick: Any
) -> dict[str, Any]:
    s = settings
    shape = (s.batch, s.seq)
    try:
        subject = load(name)
        train = _tokens(name, "train", *shape, s.steps, seed, s.device)
        held = _tokens(name, "heldout", *shape, HELD_OUT[s.device], 0, s.device)
        torch.manual_seed(seed)
        model, lent = subject.make(seed), judge(name, s.device)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        return dict(status="failed", notes=environment.one_line(error))
    fields = fidelity.measure(chosen, model, lent, lr, s.steps, train[0], held[0], s.device, tick)
    epochs = round(s.steps / len(train[0]), 2)
    return fields | dict(epochs=epochs, data=f"train {train[1]}, held out {held[1]}")


@cache
def _text(name: str, part: str) -> np.ndarray:
    return data.split_tokens(load(name).encode, part)


# Of two models: all rows of a seed read the same.
@lru_cache(maxsize=4)
def _tokens(
    name: str, part: str, batch: int, seq: int, count: int, seed: int, device: str
) -> tuple[list[Batch], str]:
    """Batches on ``device``, and the fingerprint of their tokens."""
    made = data.shuffled_batches(_text(name, part), batch, seq, count, seed)
    ids = torch.from_numpy(made.astype(np.int64)).to(device)
    return [{"input_ids": one, "labels": one} for one in ids], data.fingerprint(made)


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
