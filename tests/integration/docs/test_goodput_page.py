"""The events, fields and plans that docs/explanation/goodput.md lists are those that a run writes."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import NonFiniteError, Preempted
from jaxckpt_train.policies.cost_model import plan_last_save
from jaxckpt_train.preemption.shutdown import NOTHING_NEW
from jaxckpt_train.run import history as run_log
from jaxckpt_train.run.maintenance import owned_run
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.pages import ROOT, Page, pages
from tests.support.runs import Clock, Counter, flip_a_payload_byte, state_of, step_path

OTHERS_DEATH = "import os, sys, jaxckpt_train as jct; run = jct.StepManager(sys.argv[1]); run.own(); os._exit(0)"
PLANS = (
    plan_last_save(1200, 1000, 5.0, None),
    plan_last_save(1200, 1000, None, 25.0),
    plan_last_save(1200, 1000, 5.0, 25.0),
    plan_last_save(1200, 1000, 30.0, 25.0),
)


@pytest.fixture(scope="module")
def page() -> Page:
    (found,) = (page for page in pages() if page.name == "docs/explanation/goodput.md")
    return found


def events_of(page: Page) -> dict[str, set[str]]:
    """The fields of each event, as the tables of the page say."""
    names = re.compile(r"`([a-z_]+)`")
    rows = re.findall(r"^\| `([a-z_]+)` \| [^|]+ \| ([^|]+) \|$", page.text, re.MULTILINE)
    found = {event: set(names.findall(fields)) for event, fields in rows}
    fields = page.text.partition("The fields of a `save`")[2].partition("`progress` comes")[0]
    found["save"] = {
        name for row in re.findall(r"^\| (`[^|]+) \|", fields, re.MULTILINE) for name in names.findall(row)
    }
    return found


def train(directory: Path, num_steps: int, **options: Any) -> jct.CheckpointCallback:
    with jct.CheckpointCallback(directory, save_interval_steps=8, keep_latest=2, **options) as ckpt:
        _, data = ckpt.resume(state_of(0), Counter())
        for _ in ckpt.steps(num_steps):
            ckpt(state_of(int(next(data))), metrics={"loss": 1.0})
            ckpt.wait_until_finished()  # so that there are updates without a save, with which those with one compare
    return ckpt


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The fields of each event of a run that writes every kind of event."""
    directory = tmp_path_factory.mktemp("run") / "a"
    environment = {"PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", OTHERS_DEATH, str(directory)], env=environment, check=True, timeout=60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_log, "_resumes", itertools.count())  # only the first loop of a process has the age of it
        ckpt = train(directory, 32)
    flip_a_payload_byte(step_path(directory, 32))
    notice = directory.parent / "leave"
    notice.touch()
    with pytest.raises(Preempted):
        train(directory, 60, notice_file=notice, on_preemption="raise")
    with jct.StepManager(directory, settings=jct.StoreSettings(nonfinite="reject")) as manager:
        manager.restore()  # before it takes the directory
        with pytest.raises(NonFiniteError):
            manager.save(100, {"state": {"w": jnp.array([jnp.nan])}})
            manager.wait()
        manager.restore()  # a roll-back
        log = run_log.RunLog(manager.history, Clock(), iter([0.0, 100.0]).__next__)
        log.started()
        log.completed = 24
        log.beat()
    tier = jct.FastTierSettings(directory=directory.parent / "fast")
    with jct.StepManager(directory, fast_tier=tier) as manager:
        manager.restore()
        assert manager.save(101, {"state": {"w": jnp.zeros(3)}})
        assert manager.save(102, {"state": {"w": jnp.zeros(3)}}, fast_only=True)
        manager.wait()
        manager.restore()
    with owned_run(LocalBackend(), str(directory)):  # as `jaxckpt pin` does
        pass
    found: dict[str, set[str]] = {}
    for event in ckpt.manager.history.events():
        found.setdefault(event["event"], set()).update(event.keys() - {"event", "time"})
    return found


def test_page_lists_exactly_the_fields_of_events(page: Page, written: dict[str, set[str]]) -> None:
    assert events_of(page) == written


def test_no_event_is_left_out(page: Page) -> None:
    found = set()
    for file in (ROOT / "jaxckpt_train" / "run").glob("*.py"):
        for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
            for named, name in itertools.pairwise([call.func, *call.args]):
                if ast.unparse(named).endswith(("history.add", "_note")) and isinstance(name, ast.Constant):
                    found.add(name.value)
    assert {"start", "save", "set_aside", "take_over"} <= found <= set(events_of(page))


def test_page_shows_the_chosen_plans(page: Page) -> None:
    (plans,) = (block.text.splitlines() for block in page.blocks("") if "nothing new to save" in block.text)
    assert plans == [NOTHING_NEW.reason, *(plan.why for plan in PLANS)]
