"""Predicted deletions: they equal the decisions of the owner, and each has a reason."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jaxckpt_train.policies.context import DecisionContext
from jaxckpt_train.policies.preservation import EveryNSteps, LatestN
from jaxckpt_train.run.entry import Entry, RollBack, left_behind, step_name
from jaxckpt_train.run.maintenance import Fate, Pruning, current_line, fates
from jaxckpt_train.run.retention import expired_names, replaced
from tests.support.runs import START

NOW = START + datetime.timedelta(days=1)


def entry(step: int, sequence: int, generation: int = 0, **more: Any) -> Entry:
    time = START + datetime.timedelta(minutes=sequence)
    return Entry(step_name(step, generation), step, generation, sequence, time, None, **{"temporary": False, **more})


def predicted(entries: list[Entry], pruning: Pruning, roll_back: RollBack | None = None) -> dict[str, Fate]:
    return fates(entries, roll_back or RollBack(), pruning, NOW)


def latest(number: int) -> Pruning:
    return Pruning({"the latest": LatestN(number)})


def test_generations_and_temporary_steps_have_reasons() -> None:
    entries = [entry(1, 0), entry(1, 1, 1), entry(2, 2, temporary=True), entry(3, 3)]
    found = predicted(entries, latest(9))
    assert found["step-0000000001"] == Fate(True, ("saved again as step-0000000001.g1",))
    assert found["step-0000000002"] == Fate(True, ("temporary, and a later step is committed",))
    assert (found["step-0000000001.g1"].goes, found["step-0000000003"].why) == (False, ("newest", "the latest"))


def test_highest_and_newest_step_always_stay() -> None:
    late = dataclasses.replace(entry(1, 0), time=NOW)  # the clock was set back afterwards
    entries = [late, entry(5, 1), entry(2, 2), entry(3, 3)]
    found = predicted(entries, Pruning({"none": EveryNSteps(100)}))
    assert {name: fate.why for name, fate in found.items() if not fate.goes} == {
        "step-0000000005": ("highest",),
        "step-0000000003": ("newest",),
    }


def test_all_reasons_are_reported() -> None:
    pruning = Pruning({"the latest": LatestN(3), "even": EveryNSteps(2)})
    pruning.safe[2] = "because"
    entries = [entry(1, 0, damaged="a flipped bit"), entry(2, 1, pinned=True), entry(3, 2, is_held=True), entry(4, 3)]
    found = predicted(entries, pruning)
    assert found["step-0000000001"].why == ("set aside as damaged",)
    assert found["step-0000000002"].why == ("pinned", "because", "the latest", "even")
    assert found["step-0000000003"].why == ("its manifest or its notes cannot be read",)


def test_unsynced_step_replaces_nothing() -> None:
    found = predicted([entry(1, 0), entry(2, 1, is_unsynced=True)], latest(1))
    assert found["step-0000000001"] == Fate(False, ("the disk refused to sync the step that replaces it",))


flags = st.fixed_dictionaries(
    {name: st.sampled_from([False, False, True]) for name in ("temporary", "pinned", "is_held", "is_unsynced")}
    | {"damaged": st.sampled_from([None, None, "a flipped bit"])}
)
saves = st.lists(st.tuples(st.integers(0, 6), flags), min_size=1, max_size=12)


@given(saves, st.integers(1, 3), st.sets(st.integers(0, 6)), st.sets(st.integers(0, 11)))
def test_prediction_equals_decision_of_owner(
    saved: list[tuple[int, dict[str, Any]]], number: int, safe: set[int], left: set[int]
) -> None:
    counts: dict[int, int] = {}
    entries = []
    for sequence, (step, more) in enumerate(saved):
        entries.append(entry(step, sequence, counts.get(step, 0), **more))
        counts[step] = counts.get(step, 0) + 1
    pruning = latest(number)
    pruning.safe |= dict.fromkeys(safe, "safe")
    roll_back = RollBack(len(entries), frozenset(each.name for each in entries[:-1] if each.sequence in left))
    behind = left_behind(entries, roll_back)
    line, whole = current_line(entries, roll_back), [each for each in entries if each.damaged is None]
    expired = expired_names(entries, line, behind, pruning, DecisionContext(NOW))
    deletable, _ = replaced(expired, whole, line)
    found = fates(entries, roll_back, pruning, NOW)
    going = {name for name, fate in found.items() if fate.goes}
    assert [*found] == [each.name for each in entries]
    assert going == deletable
    assert all(fate.why for fate in found.values())
    assert not going & {each.name for each in entries if each.damaged or each.is_held}
    newest = [each for each in line if not each.is_held][-1:]
    assert not going & {each.name for each in newest}
    refused = "the disk refused to sync the step that replaces it"
    assert all(any(each.is_unsynced for each in entries) for fate in found.values() if refused in fate.why)
