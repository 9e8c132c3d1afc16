"""forge-bench validate: what its records say of a method, and what of them is shown."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from forge.harness import fidelity, options, plots, validate, verdict
from forge.harness.fidelity import REFERENCE, Record


def record(key, seed, after, before=4.0, lr=1e-3, status="ok", notes=""):
    chosen = fidelity.method(key)
    ok = status == "ok"
    return Record(
        run_id="r", model="m", model_name="m", key=key, method=chosen.name, states=chosen.states,
        lr=lr, seed=seed, steps=10, batch=1, seq=8, status=status, notes=notes,
        date="2026-11-30T00:00:00Z", hardware="H", device="cuda",
        train_loss=after if ok else None, heldout_loss=after if ok else None,
        train_losses=[before] * 9 + [after] if ok else [], tail=1,
        heldout=[[0, before], [10, after]] if ok else [],
    )  # fmt: skip


def judged(**losses):
    """Verdicts by key: of fp32-master at 3.00, 3.10 and 3.05 over three seeds, and of ``losses``
    relative to it, in %, for each seed."""
    base = (3.0, 3.1, 3.05)
    rows = [record(REFERENCE, seed, loss) for seed, loss in enumerate(base)]
    for key, gaps in losses.items():
        key = key.replace("_", "-")
        pairs = zip(base, gaps, strict=False)
        rows += [record(key, i, loss * (1 + gap / 100)) for i, (loss, gap) in enumerate(pairs)]
    return {one.key: one for one in verdict.verdicts(rows)}


def test_gaps_are_taken_seed_by_seed():
    found = judged(forge_int8=(0.1, 0.2, 0.3))
    one = found["forge-int8"]
    assert (one.gap.mean, one.gap.low, one.gap.high) == pytest.approx((0.2, 0.1, 0.3))
    # The losses themselves differ far more between the seeds.
    assert found[REFERENCE].noise_pct == pytest.approx(100 * 0.05 / 3.05)
    assert one.ok and one.text == "within 1 %"
    assert 98 < one.fall_pct < 100 and found[REFERENCE].fall_pct == pytest.approx(100)


@pytest.mark.parametrize(
    ("key", "gaps", "ok", "text"),
    [
        ("forge_bf16", (0.4, 0.5, 0.55), True, "within 0.5 %"),
        ("forge_bf16", (0.6, 0.5, 0.7), False, "FALLS SHORT: 0.60 % above, 0.5 % is allowed"),
        ("forge_bf16", (-0.6, -0.5, -0.7), False, "FALLS SHORT: 0.60 % below"),
        ("forge_int8", (0.9, 1.2, 0.8), True, "within 1 %"),
        ("forge_int8", (1.1, 1.2, 0.9), False, "FALLS SHORT: 1.07 % above, 1 % is allowed"),
        ("adamw_fused", (9, 9, 9), None, ""),
    ],
)
def test_limits(key, gaps, ok, text):
    one = judged(**{key: gaps})[key.replace("_", "-")]
    assert one.ok is ok and one.text.startswith(text)


@pytest.mark.parametrize(
    ("ours", "theirs", "ok", "text"),
    [
        ((0.1, 0.1, 0.1), (0.2, 0.3, 0.2), True, "not worse than fused AdamW"),
        ((0.2, 0.3, 0.2), (0.1, 0.1, 0.1), False, "FALLS SHORT: worse than fused AdamW by +0.13"),
        ((0.2, 0.3, 0.1), (0.1, 0.1, 0.2), True, "as fused AdamW within the noise over seeds"),
        ((0.2,), (0.1,), False, "FALLS SHORT: worse than fused AdamW by +0.100 %"),
    ],
)
def test_never_worse_than_bf16(ours, theirs, ok, text):
    one = judged(forge_bf16=ours, adamw_fused=theirs)["forge-bf16"]
    assert one.ok is ok and text in one.text and "within 0.5 %" in one.text


def test_the_readme_shows_the_run_that_ended_last():
    rows = [record(REFERENCE, 0, 2.0), record("forge-bf16", 0, 2.01)]
    later = [replace(row, run_id="later", date="2027-01-01T00:00:00Z") for row in rows]
    later.append(replace(later[1], key="adamw-fused", method="fused AdamW", heldout_loss=2.2))
    lines = verdict.markdown([*later, *rows]).splitlines()
    assert "`later`" in lines[0] and len(lines) == 7
    assert "4.0000 to 2.0000 |  | 100 |" in lines[4]
    assert "4.0000 to 2.0100 | +0.500 |" in lines[5] and "2.2000 | +10.000 |" in lines[6]


def test_what_could_not_be_judged_is_said():
    rows = [record("forge-bf16", 0, 3.0), record(REFERENCE, 0, 0, status="oom", notes="too big")]
    first, one = verdict.verdicts(rows)
    assert first.key == REFERENCE and first.text == "oom: too big" and first.after is None
    assert one.ok is False and "NOT TESTED: the reference has no loss" in one.text
    rows = [record(REFERENCE, 0, 3.0), record("forge-bf16", 0, 3.0)]
    rows.append(record("forge-bf16", 1, 0, status="failed", notes="the loss is not finite"))
    one = verdict.verdicts(rows)[1]
    assert one.ok is False and one.seeds == 1 and "failed: the loss is not finite" in one.text
    rows.append(record("adamw-fused", 0, 0, status="failed", notes="x"))
    assert "NOT TESTED against fused AdamW" in verdict.verdicts(rows)[1].text


def test_a_method_that_learns_nothing_is_seen_though_it_is_close():
    rows = [record(REFERENCE, 0, 3.99), record("forge-int8", 0, 4.0)]
    one = verdict.verdicts(rows)[1]
    assert one.ok and one.fall_pct == pytest.approx(0)
    assert verdict.verdicts([record(REFERENCE, 0, 4.0)])[0].fall_pct is None
    shown = options.console()
    with shown.capture() as capture:
        shown.print(verdict.table(verdict.verdicts(rows), "title"))
    assert "FORGE" in capture.get()


def test_records_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="status must be one of"):
        record(REFERENCE, 0, 3.0, status="fine")
    with pytest.raises(ValueError, match="m/fp32-master/0.001/seed 0: status ok needs losses"):
        replace(record(REFERENCE, 0, 3.0), heldout_loss=None)


def test_runs_of_a_gpu_are_collected_and_nothing_trained_has_no_plot(tmp_path):
    for name in ("b", "a"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        row = replace(record(REFERENCE, 0, 3.0), run_id=name)
        failed = record("bnb-adamw8bit", 0, 0, status="failed", notes="x")
        for one in (row, replace(failed, run_id=name), replace(row, seed=1, device="cpu")):
            validate.records.append(tmp_path / "runs" / name, one, fidelity.RECORDS_FILE)
    found = verdict.measured(tmp_path / "runs")
    assert [(r.run_id, r.status) for r in found] == [
        ("a", "ok"), ("a", "failed"), ("b", "ok"), ("b", "failed"),
    ]  # fmt: skip
    verdict.write(tmp_path / "runs" / "a", found[:2], verdict.verdicts(found[:2]), "title")
    rows = list(csv.DictReader((tmp_path / "fidelity.csv").open()))
    assert len(rows) == 4 and rows[1]["heldout_loss"] == ""
    assert plots.loss_curves([found[1]], "t") is None
