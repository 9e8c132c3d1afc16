"""One profiled row as data: :class:`Profile` is the schema of ``profile.json``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from forge.harness import records
from forge.harness.files import write_atomically

PROFILE_FILE = "profile.json"


@dataclass(frozen=True)
class Profile:
    """Where the time of one row's step went. Times are milliseconds of a step.

    Attributes:
        run_id: name of its folder.
        row, method, model, batch, seq, precision, hardware, gpu_count, date, environment: as of
            :class:`~forge.harness.records.Record`.
        steps: profiled steps.
        wall_ms: of a step; on a GPU without the profiler.
        launches: calls of a step that gave the device work; 0 on a CPU.
        parts: ``part`` (a key of ``trace.PARTS``, or ``idle``), ``ms``, ``share_pct`` of the wall
            time, ``pieces`` of work, ``floor_ms`` (``None``: not known) and ``gain_pct``; what
            could be gained most comes first.
    """

    run_id: str
    row: str
    method: str
    model: str
    batch: int
    seq: int
    precision: str
    hardware: str
    gpu_count: int
    date: str
    steps: int
    wall_ms: float
    launches: float
    parts: list[dict[str, Any]]
    environment: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        records.check_kinds(self)
        if not self.wall_ms > 0:
            raise ValueError(f"wall_ms must be positive, got {self.wall_ms}")
        for part in self.parts:
            floor = part.get("floor_ms", 0.0)
            if not isinstance(part.get("part"), str) or not _is_time(part.get("ms")):
                raise TypeError(f"parts must have a name and ms, got {part!r:.60}")
            if floor is not None and not _is_time(floor):
                raise TypeError(f"floor_ms must be a time or null, got {floor!r:.60}")


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def save(folder: Path, profile: Profile) -> None:
    """Write ``profile.json``."""
    write_atomically(folder / PROFILE_FILE, json.dumps(asdict(profile), indent=1) + "\n")


def load_all(runs: Path) -> tuple[list[Profile], list[str]]:
    """The profiles in the folders of ``runs``, and a message for each that cannot be read."""
    found, damaged = [], []
    known = {f.name for f in fields(Profile)}
    for path in sorted(runs.glob(f"*/{PROFILE_FILE}")):
        try:
            raw = json.loads(path.read_bytes(), parse_constant=records.no_constant)
            found.append(Profile(**{k: v for k, v in raw.items() if k in known}))
        except (ValueError, TypeError, AttributeError) as error:
            line = getattr(error, "lineno", 1)
            damaged.append(f"{path}:{line}: unreadable profile ignored ({error})")
    return found, damaged
