"""The text of a page: what it says, that it is one file of a limited size, and that no text ends what it stands in."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from jaxckpt_train.report.page import MARK, NAMES, page_of
from tests.support.report_runs import gathered_of
from tests.unit.report.test_markup import Seen


def data_of(page: str) -> Any:
    """What the scripts of a page are given."""
    found = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def words_of(page: str) -> str:
    """What a reader sees, without scripts and styles."""
    return Seen(re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)).text


def test_each_section_is_there_once_with_its_heading_and_a_link_to_it(preempted_page: Path) -> None:
    page = preempted_page.read_text()
    assert page.startswith(MARK)
    ids = [attributes["id"] for _, attributes in Seen(page).elements if "id" in attributes]
    assert [name for name, count in Counter(ids).items() if count > 1] == []
    links = [attributes["href"] for tag, attributes in Seen(page).elements if tag == "a"]
    assert links == ["#report", *(f"#{name}" for name, _ in NAMES)]
    assert {link.removeprefix("#") for link in links if link} <= set(ids)
    assert [title for _, title in NAMES] == re.findall(r"<h2[^>]*>([^<]*)</h2>", page)


def test_each_chart_has_a_name_and_its_data_in_a_table(preempted_page: Path) -> None:
    page = preempted_page.read_text()
    figures = re.findall(r"<figure>.*?</figure>", page, re.DOTALL)
    places = set(data_of(page)["places"])
    assert {re.findall(r'id="chart-([^"]+)"', figure)[0] for figure in figures} == places
    assert places >= {
        "timeline",
        "save-times",
        "throughput",
        "time-spent",
        "retention",
        "disk-use",
        "metric-0",
        "changes",
    }
    for figure in figures:
        assert re.search(r'role="img" aria-label="[^"]{10,}"', figure)
        assert re.search(r"<table>.*<tbody><tr><td", figure, re.DOTALL)


def test_page_describes_what_happened(preempted_run: Path, preempted_page: Path) -> None:
    gathered = gathered_of(preempted_run)
    words = words_of(preempted_page.read_text())
    for told in ("signal SIGTERM", "preempted", "killed", "finished", "24-", "step-0000000060", "0.2"):
        assert told in words
    assert f"{gathered.totals.share:.1%}" in words
    assert f"{len(gathered.steps)} steps: 5 kept, {len(gathered.steps) - 5} deleted." in words


def test_every_script_is_one_that_the_policy_of_the_page_knows(preempted_page: Path) -> None:
    page = preempted_page.read_text()
    (policy,) = (a["content"] for _, a in Seen(page).elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert len(re.findall("'sha256-", policy)) == len(re.findall(r"<script>", page)) == 3
    assert "unsafe-eval" not in policy


def words(directory: Path) -> str:
    return words_of(page_of(gathered_of(directory)))
