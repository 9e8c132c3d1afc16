"""Runs the rows of a benchmark one after the other, each in a fresh process, and records them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from forge.harness import data, environment, records
from forge.harness.logs import LOG_FILE
from forge.harness.processes import COMMAND, Workers
from forge.harness.records import Record
from forge.harness.rows import Row, cannot_run
from forge.harness.settings import Settings
from forge.harness.turns import Turns
from forge.harness.worker import GATE_FIELDS, Job, Result
from forge.optim.registry import find

# Bytes that a worker needs for its result and output.
ROOM = 2**20
# Versions that rows of one run must share.
SAME = ("torch", "triton", "transformers", "liger_kernel")


@dataclass(frozen=True)
class Run:
    """A run in progress: its settings, its folder, its input, and how workers are started."""

    settings: Settings
    folder: Path
    batches: np.ndarray
    environment: dict[str, Any]
    say: Callable[[str], None]
    worker: Sequence[str] = COMMAND
    gate_only: bool = False

    def log(self, text: str) -> None:
        """Append a line to ``log.txt``."""
        with _log(self.folder) as file:
            file.write(f"{_now()} {text}\n")

    @property
    def source(self) -> str:
        """The input in words: where it is from, and a fingerprint of the tokens."""
        count = len(self.batches)
        return f"{self.settings.data} {data.fingerprint(self.batches)} ({count} batches)"

    def mismatch(self, earlier: Sequence[Record]) -> str:
        """Why rows measured now would not compare with the ``earlier`` ones; empty if they do."""
        for record in earlier:
            made = record.environment
            pairs = {name: (made.get(name), self.environment[name]) for name in SAME}
            pairs["hardware"] = record.hardware, self.settings.hardware
            pairs["input"] = record.data, self.source
            if made.get("rival_version"):
                rival = find(record.key).distribution
                pairs[rival] = made["rival_version"], environment.package_version(rival)
            for what, (then, now) in pairs.items():
                if then != now:
                    return f"{what} was {then or 'not there'} and is {now or 'not there'}"
        return ""

    def remaining(self, earlier: Sequence[Record]) -> list[tuple[int, int, Row]]:
        """``(order, repeat, row)`` of the rows that are not among the ``earlier`` records."""
        done = {(record.repeat, record.row) for record in earlier}
        plan = enumerate(self.settings.schedule())
        return [(i, repeat, row) for i, (repeat, row) in plan if (repeat, row.id) not in done]

    def execute(self, rows: Sequence[tuple[int, int, Row]]) -> Generator[Record, None, None]:
        """Run ``rows``; yields each record after it is on disk."""
        s = self.settings
        self.log(f"{self.environment['command']} seed={s.seed} order={[r.id for _, _, r in rows]}")
        with tempfile.TemporaryDirectory(prefix="forge-bench-") as scratch:
            batches = Path(scratch) / "batches.npy"
            np.save(batches, self.batches)
            with _Session(self, Path(scratch), batches) as session:
                for _, together in groupby(rows, self._pass):
                    for record in session.records(list(together)):
                        records.append(self.folder, record)
                        self.log(
                            f"{record.row} repeat={record.repeat} -> {record.status} {record.notes}"
                        )
                        yield record

    def _pass(self, row: tuple[int, int, Row]) -> tuple[int, ...]:
        """What rows that are measured side by side share."""
        order, repeat, _ = row
        return (repeat,) if repeat and self.settings.in_turns else (repeat, order)


class _Session(ExitStack):
    """Servers of workers, and what rows of a run share."""

    def __init__(self, run: Run, scratch: Path, batches: Path) -> None:
        super().__init__()
        self.run, self.scratch, self.batches = run, scratch, batches
        self.places: list[_Place] = []
        self.reference: Path | None = None
        self.no_reference = ""
        self.gated: dict[str, dict[str, Any]] = {}  # by row: what its gate found in an earlier pass

    def records(self, rows: Sequence[tuple[int, int, Row]]) -> Iterator[Record]:
        """One row by itself; several side by side, their timed steps in turns."""
        for number in range(len(self.places), len(rows)):
            place = _Place(self.run, self.scratch / str(number))
            self.places.append(place)
            self.enter_context(place.workers)
        needed = not all(cannot_run(row, self.run.settings.device) for *_, row in rows)
        if needed and self.reference is None and not self.no_reference:
            self._make_reference()
        if len(rows) == 1:
            yield self.record(*rows[0], self.places[0])
            return
        folder = Path(tempfile.mkdtemp(prefix="turns-", dir=self.scratch))
        turns = [Turns(folder, i, len(rows)) for i in range(len(rows))]
        with ThreadPoolExecutor(len(rows)) as threads:
            found = [
                threads.submit(self.record, *row, place, own)
                for row, place, own in zip(rows, self.places, turns, strict=False)
            ]
            try:
                for one in found:
                    yield one.result()
            except BaseException:
                for place in self.places:
                    place.workers.close()
                raise

    def record(
        self, order: int, repeat: int, row: Row, place: _Place, turns: Turns | None = None
    ) -> Record:
        """Have a worker measure the row, and wait for it."""
        try:
            return self._make(order, repeat, row, self._result(row, place, turns))
        finally:
            if turns is not None:
                turns.leave()  # also if its worker was killed

    def _result(self, row: Row, place: _Place, turns: Turns | None) -> Result:
        settled = cannot_run(row, self.run.settings.device)
        if settled:
            return Result(*settled)
        if self.no_reference:
            return Result("failed", self.no_reference)
        result = self._start(row, place, self.gated.get(row.id), turns)
        if result.status == "ok":
            self.gated[row.id] = {key: result.fields[key] for key in GATE_FIELDS}
        return result

    def _make_reference(self) -> None:
        self.run.say("gate: training the fp32 reference")
        result = self._start(None, self.places[0])
        if result.status != "ok":
            self.no_reference = f"gate: no fp32 reference ({result.status}: {result.notes})"
            return
        self.reference = self.scratch / "reference.json"
        self.reference.write_text(json.dumps(result.fields["trajectory"]), encoding="utf-8")

    def _start(
        self,
        row: Row | None,
        place: _Place,
        gated: dict[str, Any] | None = None,
        turns: Turns | None = None,
    ) -> Result:
        s = self.run.settings
        job = Job(
            row=asdict(row) if row else None,
            model=s.model,
            weights=s.weights,
            batch=s.batch,
            seq=s.seq,
            device=s.device,
            dtype=s.dtype,
            attention=s.attention,
            data=str(self.batches),
            seed=s.seed,
            warmup=s.warmup,
            steps=s.steps,
            hardware=s.hardware,
            reference=str(self.reference) if self.reference else None,
            gated=gated,
            gate_only=self.run.gate_only,
            turns=turns.as_json() if turns else None,
        )
        job_path, result_path = place.folder / "job.json", place.folder / "result.json"
        result_path.unlink(missing_ok=True)
        job_path.write_text(json.dumps(asdict(job)), encoding="utf-8")
        output_path = place.folder / "output.txt"
        ending = place.workers.run(job_path, result_path, output_path, s.timeout_s)
        output = (
            output_path.read_text(encoding="utf-8", errors="replace")
            if output_path.exists()
            else ""
        )
        with _log(self.run.folder) as log:
            log.write(f"{_now()} === {row.id if row else 'fp32 reference'}\n{output}")
        try:
            return Result(**json.loads(result_path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            reason = f"worker {ending}: {_last_line(output)}"
        except (ValueError, TypeError) as error:
            reason = f"worker {ending}, its result cannot be read: {error}"
        # No row's fault, and a row that failed would not be measured again.
        if shutil.disk_usage(self.scratch).free < ROOM:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.scratch))
        return Result("failed", reason[:300])

    def _make(self, order: int, repeat: int, row: Row, result: Result) -> Record:
        s, spec = self.run.settings, row.spec
        fields = dict(result.fields)
        env = {**self.run.environment, "rival_version": fields.pop("rival_version", "")}
        record = Record(
            run_id=s.run_id,
            row=row.id,
            key=row.key,
            method=spec.method,
            status=result.status,  # type: ignore[arg-type]
            notes=result.notes,
            date=_now(),
            hardware=s.hardware,
            gpu_count=int(s.device == "cuda"),
            model=s.model_name,
            batch=s.batch,
            seq=s.seq,
            precision={"bfloat16": "bf16", "float32": "fp32"}[s.dtype],
            states=spec.states,
            kernels=row.kernels,
            execution=row.execution,
            attention_request=s.attention,
            repeat=repeat,
            order=order,
            warmup=s.warmup,
            data=self.run.source,
            environment={**env, "seed": s.seed, "summary": spec.summary},
        )
        return replace(record, **fields)


class _Place:
    """A server of workers, and the folder of their files."""

    def __init__(self, run: Run, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        environment = _worker_environment(run.settings)
        device = run.settings.device
        self.workers = Workers(device, folder / "server.txt", environment, run.worker)


def _log(folder: Path) -> TextIO:
    # The name of a folder, and what a worker prints, need not be text.
    return (folder / LOG_FILE).open("a", encoding="utf-8", errors="backslashreplace")


def _worker_environment(settings: Settings) -> dict[str, str]:
    env = dict(os.environ, TOKENIZERS_PARALLELISM="false")
    # A worker imports an optimizer of another package from where this process does.
    env["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    hub_id = settings.weights is not None and not Path(settings.weights).exists()
    if not hub_id:
        env["HF_HUB_OFFLINE"] = "1"
    return env


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no output"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
