"""A report of a very long history takes little memory, and its totals are exact."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxckpt_train.report.series import MOST_KEPT
from tests.support.history_events import at
from tests.support.runs import made_run

SAVES = 60_000
SAVES_OF_A_PROCESS = 7001
BYTES = 1 << 20
# Reads the history in a new process, and prints the report with the memory that it took.
READ = """
import dataclasses, datetime, json, sys
from jaxckpt_train.report.changes import plan_changes
from jaxckpt_train.report.gather import gather
from jaxckpt_train.report.gather import read_run
from jaxckpt_train.store.backends.local import LocalBackend

def most_bytes():
    lines = open("/proc/self/status").read().splitlines()  # ru_maxrss would count the parent before exec
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024

before, now = most_bytes(), datetime.datetime(2026, 6, 1, tzinfo=datetime.UTC)
read = read_run(LocalBackend(), sys.argv[1])
found = gather(LocalBackend(), read, plan_changes(read.looks, 0), now, print)
print(json.dumps({
    "taken": most_bytes() - before,
    "events": found.events, "counts": dataclasses.asdict(found.counts),
    "totals": dataclasses.asdict(dataclasses.replace(found.totals, attempts=())),
    "warnings": found.warnings, "processes": [[each.how, each.first_step, each.last_step] for each in found.processes],
    "there": sorted(step.step for step in found.steps if step.is_there),
    "uses": [use.steps for use in found.disk_use],
    "kept": [len(found.saves), len(found.steps), len(found.disk_use)],
    "last": [save.step for save in found.saves[-200:]],
    "values": {name: len(values) for name, values in found.metrics.items()},
}))
"""


class LongRun:
    """Writes the history of a run, and counts what a report should show."""

    def __init__(self, path: Path) -> None:
        self.events: dict[str, int] = {}
        self.blocked_s, self.failed, self.redone = 0.0, 0, 0
        self.ends: list[tuple[str, int, int]] = []
        self.size = 0
        with path.open("w") as self._file:
            self._write()
            self._file.write('{"event":"save","time":"2026-03-01T00:')

    def _add(self, second: float, event: str, **fields: Any) -> None:
        self.events[event] = self.events.get(event, 0) + 1
        self.size += self._file.write(json.dumps(at(second, event, **fields)) + "\n")

    def _write(self) -> None:
        there, saves, second, pid = list[int](), 0, 0.0, 0
        while saves < SAVES:
            step, pid = there[-1] if there else 0, pid + 1
            first = step
            self._add(second, "start", host="node", pid=pid)
            if there:
                self._add(second, "restore", step=step, name=f"step-{step:010d}", restore_s=0.5, bytes=BYTES)
            self._add(second, "resumed", step=step, resume_s=1.0)
            for number in range(min(SAVES_OF_A_PROCESS, SAVES - saves)):
                saves, second, step = saves + 1, second + 20, step + 10
                self._save(second, step, ok=number % 97 != 5, loss=1 / saves)
                if number % 97 != 5:
                    there.append(step)
                    if len(there) > 3:
                        self._add(second, "delete", name=f"step-{there.pop(0):010d}")
            self._end(second, pid, first, step)
            self.redone += 5 if pid % 2 and saves < SAVES else 0
            if pid == 2:
                self._file.write("[3]\n" + json.dumps(at(second, "save", step="x")) + "\n")
        self.last, self.seconds = step, second

    def _save(self, second: float, step: int, ok: bool, loss: float) -> None:
        blocked_s = step % 70 / 100
        self.blocked_s, self.failed = self.blocked_s + blocked_s, self.failed + (not ok)
        outcome = {"bytes_per_s": 1e9} if ok else {"error": "no space left on device"}
        times = {"blocked_s": blocked_s, "save_s": 1.0, "write_s": 0.5, "decide_s": 1e-6, "commit_s": 0.25}
        reason, metrics = f"FixedIntervalPolicy(interval=10) at {step}", {"loss": loss, "accuracy": step / 7}
        self._add(
            second, "save", step=step, name=f"step-{step:010d}", ok=ok, bytes=BYTES, reason=reason, metrics=metrics,
            **times, **outcome,
        )  # fmt: skip

    def _end(self, second: float, pid: int, first: int, step: int) -> None:
        if pid % 2:  # killed
            self._add(second, "progress", step=step + 5)
            self.ends.append(("killed", first, step + 5))
        else:
            self._add(second, "preempted", step=step, reason="SIGTERM")
            self._add(second, "end", how="preempted", step=step)
            self.ends.append(("preempted", first, step))


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read from /proc")
def test_totals_are_exact_and_memory_is_bounded(tmp_path: Path) -> None:
    made_run(tmp_path, 1, 2)  # these stay, and the history does not mention them
    run = LongRun(tmp_path / "history.jsonl")
    assert run.size > 20 << 20
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)], capture_output=True, text=True, check=True, timeout=300
    )
    found = json.loads(done.stdout)
    assert found["taken"] < 110 << 20  # to hold all events takes twice as much
    counts, totals = found["counts"], found["totals"]
    assert found["events"] == run.events
    assert (counts["saves"], counts["failed_saves"]) == (SAVES, run.failed)
    assert counts["states"] == {"kept": 2, "deleted": run.events["delete"], "gone": 3}
    assert counts["steps"] == SAVES - run.failed + 2
    assert counts["values"] == {"loss": SAVES - run.failed, "accuracy": SAVES - run.failed}
    assert counts["changes"] == 2 * run.events["delete"] + 2
    assert [counts["blocked_s"], totals["blocked_s"]] == pytest.approx([run.blocked_s] * 2, rel=1e-9)
    assert (totals["saves"], totals["failed_saves"]) == (SAVES - run.failed, run.failed)
    assert (totals["redone_steps"], totals["useful_steps"]) == (run.redone, run.ends[-1][2])
    assert totals["wall_s"] == run.seconds + 1  # the first process began a second before it had its state
    assert [tuple(each) for each in found["processes"]] == run.ends
    assert len([text for text in found["warnings"] if "left out" in text]) == 3
    # The items that remain are the newest ones.
    assert found["there"] == [1, 2]
    assert found["last"] == [*range(run.ends[-1][2] // 10 * 10 - 1990, run.ends[-1][2] + 1, 10)]
    assert set(found["uses"][:-10]) <= {2, 3}  # a step is deleted in the second in which another is saved
    assert found["kept"] == [MOST_KEPT, MOST_KEPT + 5, MOST_KEPT]  # of the steps, 2 exist and 3 are gone
    assert found["values"] == {"loss": MOST_KEPT, "accuracy": MOST_KEPT}
