"""The size of a page is limited, however long the run and its texts are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jaxckpt_train.report.changes import LeafSize, TreeSizes
from jaxckpt_train.report.page import page_of
from jaxckpt_train.report.series import MOST_BYTES
from tests.support.history_events import at
from tests.support.report_pages import data_of, words_of
from tests.support.report_runs import gathered_of, write_history


def long_run(saves: int, text: str = "forced") -> list[dict[str, Any]]:
    """Return the history of a process that saved and deleted very often."""
    events = [at(0, "start", host=text, pid=1), at(1, "resumed", step=0)]
    for number in range(1, saves + 1):
        second, name = 60.0 * number, f"step-{number:010d}"
        fields = {"step": number, "name": name, "ok": number % 10 > 0, "reason": text, "error": text, "bytes": 1 << 30}
        times = {"blocked_s": 0.5, "save_s": 20.0, "bytes_per_s": 1 << 27}
        metrics = {f"{text}-{metric}": number / 7 for metric in range(30)}
        events.append(at(second, "save", **fields, **times, metrics=metrics))
        events.append(at(second + 1, "delete", name=name))
    return events


def leaves(count: int, text: str = "kernel") -> TreeSizes:
    return TreeSizes(3, "step-0000000003", tuple(
        LeafSize(f"state/layer_{number // 100}/{text}/{number}", "float32[64,64]", 16384 + number)
        for number in range(count)
    ))  # fmt: skip


def test_page_of_very_long_run_is_limited(tmp_path: Path) -> None:
    gathered = gathered_of(write_history(tmp_path, *long_run(6000)))
    page = page_of(dataclasses.replace(gathered, tree=leaves(30_000)))
    assert len(page.encode()) < MOST_BYTES
    words = words_of(page)
    assert "of 6,000 saves are drawn: of neighbours the longest." in words
    assert "The last 150 of 6,000; --json has all of them." in words
    assert "more metrics left out; --json has them." in words
    shown = len(data_of(page)["tree"]["leaves"])
    assert 5000 <= shown <= 20_000
    assert f"The {30_000 - shown:,} smallest leaves" in words


def test_long_texts_do_not_exceed_the_limit(tmp_path: Path) -> None:
    gathered = gathered_of(write_history(tmp_path, *long_run(2000, text="w" * 5000)))
    page = page_of(dataclasses.replace(gathered, tree=leaves(3000, text="v" * 3000)))
    assert len(page.encode()) < MOST_BYTES


def test_page_is_smaller_under_a_lower_limit(preempted_run: Path) -> None:
    gathered = dataclasses.replace(gathered_of(preempted_run), tree=leaves(10_000))
    whole = page_of(gathered)
    less = page_of(gathered, len(whole.encode()) - 100_000)
    assert len(data_of(whole)["tree"]["leaves"]) == 10_000
    assert len(data_of(less)["tree"]["leaves"]) == 5_000
    assert len(less.encode()) <= len(whole.encode()) - 100_000
