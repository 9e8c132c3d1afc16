"""One measured row as data: :class:`Record` is the schema of ``records.jsonl``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

Status = Literal["ok", "oom", "unsupported", "skipped", "failed"]
STATUSES: tuple[str, ...] = get_args(Status)
RECORDS_FILE = "records.jsonl"
# What all records of a run have in common.
WORK = ("model", "batch", "seq", "precision", "hardware", "gpu_count")


@dataclass(frozen=True)
class Record:
    """What one row of one run measured, with everything needed to judge and repeat it.

    Times are wall-clock milliseconds of a whole step, memory is GiB (2^30 bytes). A number is
    ``None`` when it was not measured; rows that are not ``ok`` carry no latency.

    Attributes:
        row: ``key/kernels/execution``, what the row is.
        repeat: 0-based pass of an interleaved ``--repeat`` run.
        order: position in the shuffled order.
        attention: what ran, ``sdpa:cudnn`` say; ``attention_request`` is what was asked for.
        peak_memory_gib: highest allocated during the timed steps; ``memory_kind`` says of what.
        peak_warmup_gib: highest allocated during warm-up (first-step costs, GaLore's SVD).
        ofu_pct: share of the tensor cores' peak in use (:mod:`forge.harness.ofu`), over a window of
            ``utilisation_window_s`` of steps after the timed ones, with the activity of tensor
            cores and device memory in percent, the mean clock, and joules a step;
            ``ofu_adjusted_pct`` is without the linears' work on padding.
        loss: loss at the gate's last step: the same number of steps for every method.
        grad_bytes: gradients in memory when the optimizer's step begins; ``None``: not known.
        slow_steps: indices into ``samples_ms`` of steps above five times the median.
        environment: versions, machine, command, commit.
    """

    run_id: str
    row: str
    key: str
    method: str
    status: Status
    notes: str
    date: str
    hardware: str
    model: str
    batch: int
    seq: int
    precision: str
    states: str
    kernels: str
    execution: str
    attention_request: str
    repeat: int = 0
    order: int = 0
    gpu_count: int = 0
    attention: str = ""
    params: int | None = None
    latency_ms: float | None = None
    latency_p20_ms: float | None = None
    latency_p80_ms: float | None = None
    peak_memory_gib: float | None = None
    peak_reserved_gib: float | None = None
    peak_warmup_gib: float | None = None
    memory_kind: str = ""
    state_bytes: int | None = None
    grad_bytes: int | None = None
    state_bytes_per_param: float | None = None
    tokens_per_s: float | None = None
    mfu_pct: float | None = None
    ofu_pct: float | None = None
    ofu_adjusted_pct: float | None = None
    tensor_active_pct: float | None = None
    dram_active_pct: float | None = None
    sm_clock_mhz: float | None = None
    energy_j: float | None = None
    utilisation_window_s: float | None = None
    loss: float | None = None
    gate: str = ""
    gate_detail: dict[str, Any] = field(default_factory=dict)
    warmup: int = 0
    steps: int = 0
    samples_ms: list[float] = field(default_factory=list)
    warmup_ms: list[float] = field(default_factory=list)
    slow_steps: list[int] = field(default_factory=list)
    data: str = ""
    environment: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status must be one of {', '.join(STATUSES)}, got {self.status!r}")
        check_kinds(self)
        for name in ("samples_ms", "warmup_ms", "slow_steps"):
            if not all(_is(item, (int, float)) for item in getattr(self, name)):
                raise TypeError(f"{name} must be numbers")
        if self.latency_ms is not None and (self.status != "ok" or self.gate != "pass"):
            raise ValueError(f"{self.row}: a latency needs status ok and gate pass")
        if self.latency_ms is not None and self.latency_ms <= 0:
            raise ValueError(f"{self.row}: latency_ms must be positive, got {self.latency_ms}")


def check_kinds(data: Any) -> None:
    """Raise TypeError unless the fields of the dataclass ``data`` are of the kinds it declares.

    What is JSON but not what was written must fail where it is read, not where it is used.
    """
    for name, kinds in _kinds_of(data.__class__).items():
        value = getattr(data, name)
        if not _is(value, kinds):
            raise TypeError(f"{name} must be {kinds[0].__name__}, got {value!r:.60}")


@cache
def _kinds_of(kind: type) -> dict[str, tuple[type, ...]]:
    hints = get_type_hints(kind).items()
    return {name: _kinds(hint) for name, hint in hints if get_origin(hint) is not Literal}


def _is(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _kinds(hint: Any) -> tuple[type, ...]:
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kinds = tuple(get_origin(option) or option for option in options)
    return (*kinds, int) if float in kinds else kinds


def append(folder: Path, record: Any, name: str = RECORDS_FILE) -> None:
    """Add ``record``, a dataclass, to the run in ``folder``, on disk when this returns."""
    path = folder / name
    line = (json.dumps(asdict(record), allow_nan=False) + "\n").encode()
    with path.open("ab+") as file:
        if file.tell() and not _ends_with_newline(file):
            line = b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def _ends_with_newline(file: Any) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def load(folder: Path) -> tuple[list[Record], list[str]]:
    """Read the records of the run in ``folder``.

    Returns:
        The records, and one message for every line that could not be read (a run killed in the
        middle of a write leaves one), has the row and pass of an earlier line, or is of other work
        than its run's first record: the rows of a run are ranked together.
    """

    works: dict[str, tuple] = {}

    def identity(record: Record) -> tuple[tuple, str]:
        work = tuple(getattr(record, name) for name in WORK)
        if work != works.setdefault(record.run_id, work):
            raise ValueError(f"of other work or hardware than the run's first record: {work}")
        key = (record.run_id, record.row, record.repeat)
        return key, f"pass {record.repeat + 1} of {record.row}"

    return load_lines(folder / RECORDS_FILE, Record, identity)


Kind = TypeVar("Kind")


def load_lines(
    path: Path, kind: Callable[..., Kind], identity: Callable[[Kind], tuple[tuple, str]]
) -> tuple[list[Kind], list[str]]:
    """Read a file that :func:`append` wrote; no file: no records.

    Args:
        kind: the dataclass. Fields that it does not have are ignored.
        identity: what two records of a file must not share, and its name in a message.

    Returns:
        As :func:`load`.
    """
    found: list[Kind] = []
    damaged: list[str] = []
    if not path.exists():
        return found, damaged
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    seen: set[tuple] = set()
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line, parse_constant=no_constant)
            record = kind(**{k: v for k, v in raw.items() if k in known})
            key, name = identity(record)
            if key in seen:
                raise ValueError(f"{name} is recorded above")
            seen.add(key)
            found.append(record)
        except (ValueError, TypeError, AttributeError) as error:
            damaged.append(f"{path}:{number}: unreadable record ignored ({error})")
    return found, damaged


def no_constant(name: str) -> NoReturn:
    """Refuse NaN and infinity, which Python's JSON reads: ``parse_constant`` of ``json.loads``."""
    raise ValueError(f"{name} is not a number")


def by_run(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records of each run."""
    return _grouped(records, lambda record: record.run_id)


def by_row(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records of each row: one a pass."""
    return _grouped(records, lambda record: record.row)


def _grouped(records: Iterable[Record], key: Callable[[Record], str]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups
