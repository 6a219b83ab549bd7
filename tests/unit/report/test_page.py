"""The text of a page: its sentences, its data, and that no text of a run becomes markup."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from jaxckpt_train.report.changes import LeafSize, TreeSizes
from jaxckpt_train.report.gather import Gathered
from jaxckpt_train.report.page import page_of
from tests.support.history_events import at
from tests.support.report_pages import HOSTILE, NO_UNICODE, Seen, data_of, words_of
from tests.support.report_runs import gathered_of, write_history
from tests.support.runs import flip_a_payload_byte, made_run, step_path, truncate_the_manifest
from tests.support.tiers import nightly_after


def leaves(count: int, text: str = "kernel") -> TreeSizes:
    return TreeSizes(3, "step-0000000003", tuple(
        LeafSize(f"state/layer_{number // 100}/{text}/{number}", "float32[64,64]", 16384 + number)
        for number in range(count)
    ))  # fmt: skip


def events_with(text: str) -> list[dict[str, Any]]:
    """Return a history with the text in each field that holds one."""
    return [
        at(0, "start", host=text, pid=3), at(1, text, name=text),
        at(2, "save", ok=False, step=1, reason=text, error=text), at(3, "preempted", reason=text, plan=text),
        at(4, "save", ok=True, step=2, name="step-0000000002", reason=text, metrics={text: 1.0}, bytes_per_s=5),
        at(5, "restore", step=1, name=text, bytes_per_s=3, skipped=[text]), at(6, "end", how=text),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def plain_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page whose texts are one plain word."""
    return page_of(gathered_of(write_history(tmp_path_factory.mktemp("plain"), *events_with("plain"))))


@pytest.mark.parametrize("text", nightly_after(5, HOSTILE))
def test_hostile_texts_add_no_elements(tmp_path: Path, text: str, plain_page: str) -> None:
    gathered = gathered_of(write_history(tmp_path / "run", *events_with(text)))
    tree = TreeSizes(1, text, (LeafSize(f"state/{text}", text, 4),))
    page = page_of(dataclasses.replace(gathered, tree=tree, warnings=(text,)))
    kinds = Counter(tag for tag, _ in Seen(page).elements)
    assert kinds["script"] == Counter(tag for tag, _ in Seen(plain_page).elements)["script"]
    assert {"img", "table"} & set(kinds) == {"table"}
    assert all(not name.startswith("on") for _, attributes in Seen(page).elements for name in attributes)
    assert page.count("</script>") == page.count("<script")
    assert data_of(page)["tree"]["leaves"][0][2] == 4


def test_invalid_unicode_is_shown_with_escapes(tmp_path: Path) -> None:
    gathered = gathered_of(made_run(tmp_path, 1))
    tree = TreeSizes(1, NO_UNICODE, (LeafSize(f"state/{NO_UNICODE}", "float32[1]", 4),))
    page = page_of(dataclasses.replace(gathered, tree=tree, warnings=(NO_UNICODE,)))
    assert "\\udc80" in words_of(page)
    assert page.encode()


def test_only_style_and_scripts_are_not_escaped(repo_root: Path) -> None:
    template = (repo_root / "jaxckpt_train" / "report" / "page.html").read_text()
    assert re.findall(r"\{\{([^}]*)\| *safe\b", template) == [" style ", " script "]
    assert "autoescape" not in template


@pytest.mark.parametrize("text", [*HOSTILE, NO_UNICODE])
def test_text_of_a_run_is_shown_as_it_is(tmp_path: Path, text: str) -> None:
    plain = text.encode("utf-8", "backslashreplace").decode().replace("\x00", "\ufffd").replace("\x1b", "\ufffd")
    gathered = dataclasses.replace(gathered_of(write_history(tmp_path)), warnings=(text,), run=text)
    page = Seen(page_of(gathered))
    assert page.text.count(plain) >= 2  # the path and the warning


def test_tree_has_changes_of_its_step_only(tmp_path: Path) -> None:
    made_run(tmp_path, 1, 2, 3)
    tree = data_of(page_of(gathered_of(tmp_path)))["tree"]
    assert tree["pair"] == [2, 3]
    assert {name: change for name, _, _, change in tree["leaves"]} == {
        "state/step": 0.5,
        "state/w": pytest.approx(5.77e-4),
    }
    without = data_of(page_of(gathered_of(tmp_path, changes=0)))["tree"]
    assert without["pair"] is None
    assert [leaf[3] for leaf in without["leaves"]] == [None, None]


def words(directory: Path) -> str:
    return words_of(page_of(gathered_of(directory)))


def test_empty_history_is_described(tmp_path: Path) -> None:
    said = words(write_history(tmp_path))
    for sentence in (
        "The history has no events yet.", "No save or restore has recorded its rate.",
        "The history has no process.", "No step has been saved yet.", "No known step has metrics.",
        "There is no valid step.", "There are no two steps to compare.",
    ):  # fmt: skip
        assert sentence in said


def test_run_of_one_step_is_described(tmp_path: Path) -> None:
    said = words(made_run(tmp_path, 3))
    assert "1 step: 1 kept." in said
    assert "No known step has metrics." in said
    assert "There are no two steps to compare." in said


def test_damaged_steps_come_first(tmp_path: Path) -> None:
    made_run(tmp_path, 1, 2, 3)
    truncate_the_manifest(step_path(tmp_path, 3))
    flip_a_payload_byte(step_path(tmp_path, 2))
    said = words(tmp_path)
    assert said.index("Problems") < said.index("Step 3, step-0000000003: ") < said.index("Times are in UTC")
    assert "3 steps: 2 kept, 1 damaged." in said
    assert "Could not be compared" in said
    assert "step-0000000002" in said.partition("Could not be compared")[2]


def test_first_of_many_damaged_steps_are_listed(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"step-{number:010d}").mkdir()
    said = words(tmp_path)
    assert "40 steps: 40 not committed." in said
    assert "Step 24, step-0000000024: " in said
    assert "Step 25, step-0000000025: " not in said
    assert "and 15 more" in said


def test_failed_save_comes_first(tmp_path: Path) -> None:
    said = words(write_history(tmp_path, at(0, "start"), at(5, "save", ok=False, step=7, error="no space left")))
    assert "Step 7 was not saved at 2026-03-01 00:00:05: no space left" in said
    assert "1 failed" in said


def test_a_step_that_was_set_aside_is_marked(tmp_path: Path) -> None:
    made_run(tmp_path, 1, 2)
    flip_a_payload_byte(step_path(tmp_path, 2))
    with jct.StepManager(tmp_path) as manager:
        manager.own()
        manager.restore()
    gathered = gathered_of(tmp_path)
    assert [step.state for step in gathered.steps] == ["kept", "damaged"]
    assert gathered.steps[1].set_aside is not None
    assert "set aside as damaged" in words_of(page_of(gathered))


def test_page_times_are_in_utc(tmp_path: Path) -> None:
    gathered: Gathered = gathered_of(made_run(tmp_path, 1))
    zone = datetime.timezone(datetime.timedelta(hours=9))
    moved = gathered_of(tmp_path, made=gathered.made.astimezone(zone))
    assert moved.made == gathered.made
    assert "made at 2026-03-02 00:00:00 UTC" in words_of(page_of(moved))
