"""Workers that take their timed steps in turns, whatever happens to one of them."""

import threading

import pytest

from command_line import forge_bench
from forge.harness import records, timing
from forge.harness.settings import load_settings
from forge.harness.turns import BURST, Turns


class Recorder:
    """Steps of several threads, in the order in which they were taken."""

    def __init__(self, folder, count):
        self.turns = [Turns(folder, i, count) for i in range(count)]
        self.order = []
        self.threads = []

    def start(self, index, steps, fails_after=None):
        def step(batch):
            if fails_after is not None and self.order.count(index) == fails_after:
                raise ValueError("a step failed")
            self.order.append(index)

        def work():
            try:
                timing.time_steps(step, [None], steps, "cpu", turns=self.turns[index])
            except ValueError:
                pass
            finally:
                self.turns[index].leave()

        self.threads.append(threading.Thread(target=work, daemon=True))
        self.threads[-1].start()

    def wait(self):
        for thread in self.threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in self.threads), "somebody waits for ever"


def test_each_takes_some_steps_then_the_next(tmp_path):
    seen = Recorder(tmp_path, 3)
    for i in (2, 0, 1):
        seen.start(i, 2 * BURST)
    seen.wait()
    assert seen.order == [i for _ in range(2) for i in range(3) for _ in range(BURST)]


def test_nobody_begins_before_all_have_warmed_up(tmp_path):
    seen = Recorder(tmp_path, 2)
    seen.start(0, 1)
    seen.threads[0].join(0.2)
    assert seen.order == []
    seen.start(1, 1)
    seen.wait()
    assert seen.order == [0, 1]


@pytest.mark.parametrize("when", ["before it began", "in its turn", "early"])
def test_who_is_gone_is_not_waited_for(tmp_path, when):
    seen = Recorder(tmp_path, 2)
    if when == "before it began":
        seen.turns[0].leave()
    else:
        seen.start(0, 3 * BURST, fails_after=BURST + 1 if when == "in its turn" else BURST)
    seen.start(1, 3 * BURST)
    seen.wait()
    assert seen.order.count(1) == 3 * BURST


def test_rows_have_different_numbers_of_steps(tmp_path):
    seen = Recorder(tmp_path, 2)
    seen.start(0, 1)
    seen.start(1, 5 * BURST)
    seen.wait()
    assert seen.order == [0] + [1] * 5 * BURST


def test_a_run_in_turns(tmp_path, monkeypatch):
    code = forge_bench(
        monkeypatch, "--optimizers", "adamw-fused,forge-bf16,adamw", "--device", "cpu",
        "--seq", "16", "--steps", "9", "--data", "random", "--repeat", "2",
        "--repeat-only", "adamw-fused,forge-bf16", "--in-turns", "--out", str(tmp_path), "--json",
    )  # fmt: skip
    assert code == 0
    (folder,) = tmp_path.iterdir()
    found, _ = records.load(folder)
    assert load_settings(folder).in_turns
    again = [r for r in found if r.repeat == 1]
    assert {r.key for r in again} == {"adamw-fused", "forge-bf16"} and len(found) == 5
    assert all(r.status == "ok" and len(r.samples_ms) == 9 for r in found)
