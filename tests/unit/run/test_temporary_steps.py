"""Temporary steps: which saves make them, that the next commit replaces them, and that permanent saves go on."""

from __future__ import annotations

import datetime
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from jaxckpt_train.config import callback_arguments
from jaxckpt_train.errors import SettingsError
from jaxckpt_train.policies.context import CheckpointInfo, DecisionContext, decide
from jaxckpt_train.policies.save import has_temporary
from tests.support.runs import START, Clock, state_of, step_of, step_path

EVERY_MINUTE = jct.TemporarySavePolicy(jct.EverySecondsPolicy(60))
BOTH = jct.AnySavePolicy([EVERY_MINUTE, jct.FixedIntervalPolicy(10)])  # the temporary one first, on purpose


def at(seconds: float) -> datetime.datetime:
    return START + datetime.timedelta(seconds=seconds)


def decided(policy: Any, step: int, seconds: float, previous: list[CheckpointInfo]) -> tuple[bool, bool, str]:
    found = decide(policy, CheckpointInfo(step, at(seconds)), previous, DecisionContext(at(seconds), run_started=START))
    return found.save, found.temporary, found.reason


def test_time_saves_are_temporary_and_interval_saves_permanent() -> None:
    permanent, temporary = CheckpointInfo(10, at(0)), CheckpointInfo(11, at(61), temporary=True)
    assert decided(BOTH, 11, 30, [permanent])[0] is False
    assert decided(BOTH, 11, 61, [permanent]) == (True, True, "temporary: EverySecondsPolicy(seconds=60)")
    assert decided(BOTH, 12, 62, [permanent, temporary])[0] is False  # a minute since any save
    assert decided(BOTH, 20, 62, [permanent, temporary]) == (True, False, "FixedIntervalPolicy(interval=10)")
    assert decided(BOTH, 20, 999, [permanent, temporary])[1] is False  # due for both reasons, so it is permanent


def test_permanent_saves_do_not_starve() -> None:
    policy = jct.AnySavePolicy([EVERY_MINUTE, jct.EverySecondsPolicy(600)])
    previous: list[CheckpointInfo] = []
    kinds = []
    for second in range(1, 1300):
        save, temporary, _ = decided(policy, second, second, previous)
        if save:
            previous = [info for info in previous if not info.temporary]
            previous.append(CheckpointInfo(second, at(second), temporary=temporary))
            kinds.append("t" if temporary else "S")
    assert "".join(kinds) == "tttttttttStttttttttSt"


def test_temporary_policy_sees_temporary_steps() -> None:
    inner = jct.AnySavePolicy([jct.EverySecondsPolicy(60), jct.InitialSavePolicy()])
    temporary = CheckpointInfo(1, at(50), temporary=True)
    assert decided(jct.TemporarySavePolicy(inner), 2, 100, [temporary])[0] is False
    assert decided(inner, 2, 100, [temporary])[0] is True  # outside of it, only permanent steps count


def test_all_policy_with_temporary_part_is_temporary() -> None:
    assert decided(jct.AllSavePolicy([EVERY_MINUTE, jct.FixedIntervalPolicy(10)]), 10, 70, [])[:2] == (True, True)
    assert has_temporary(jct.AllSavePolicy([jct.FixedIntervalPolicy(1), BOTH]))
    assert not has_temporary(jct.FixedIntervalPolicy(1))
    assert not has_temporary(None)


def test_temporary_step_goes_after_next_commit_across_restarts(tmp_path: Path) -> None:
    policy = jct.AnySavePolicy([jct.FixedIntervalPolicy(5), jct.TemporarySavePolicy(jct.FixedIntervalPolicy(1))])
    found = []
    for step in range(1, 12):  # a new manager each time, as after a restart
        with jct.StepManager(tmp_path, save_decision_policy=policy, clock=Clock()) as manager:
            if step > 1:
                assert step_of(manager.restore({"state": state_of(0)})) == step - 1
            assert manager.save(step, {"state": state_of(step)}).saved
        found.append(jct.StepManager(tmp_path).steps)
    assert found == [[1], [2], [3], [4], [5], [5, 6], [5, 7], [5, 8], [5, 9], [5, 10], [5, 10, 11]]


def run(directory: Path, updates: int, leaves_at: int | None = None, **options: Any) -> list[int]:
    ckpt = jct.CheckpointCallback(directory, on_preemption="raise", progress=False, **options)
    try:
        with ckpt:
            state = ckpt.resume(state_of(0))
            for step in ckpt.steps(updates):
                state = state_of(step + 1)
                if step + 1 == leaves_at:
                    os.kill(os.getpid(), signal.SIGTERM)
                ckpt(state)
    except jct.Preempted:
        pass
    return jct.StepManager(directory).steps


def is_temporary(directory: Path, step: int) -> bool:
    manifest = json.loads((step_path(directory, step) / "manifest.json").read_text())
    return bool(manifest["info"]["temporary"])


def test_preemption_save_is_temporary_if_configured(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_interval_steps": 10, "temporary_interval_secs": 3600.0}
    for leaves_at in (3, 7, 13, 17):
        steps = run(tmp_path, 20, leaves_at, **options)
        assert steps == ([10] if leaves_at > 10 else []) + [leaves_at]
        assert is_temporary(tmp_path, leaves_at)
    assert run(tmp_path, 25, **options) == [10, 20, 25]
    assert not is_temporary(tmp_path, 25)  # the end of the loop


def test_preemption_save_stays_by_default(tmp_path: Path) -> None:
    assert run(tmp_path, 20, 3, save_interval_steps=10) == [3]
    assert run(tmp_path, 20, 7, save_interval_steps=10) == [3, 7]
    assert not is_temporary(tmp_path, 3)


def test_temporary_policy_checks_its_arguments() -> None:
    node = {"_target_": "jaxckpt_train.TemporarySavePolicy", "policy": {"_target_": "jaxckpt_train.InitialSavePolicy"}}
    assert callback_arguments({"save_policy": node})["save_policy"] == jct.TemporarySavePolicy(jct.InitialSavePolicy())
    wrong: Any = jct.LatestN(2)
    with pytest.raises(SettingsError, match=r"TemporarySavePolicy\.policy: expected"):
        jct.TemporarySavePolicy(wrong)
    with pytest.raises(SettingsError, match="temporary_interval_secs: expected"):
        jct.CheckpointCallback("x", temporary_interval_secs=0)
