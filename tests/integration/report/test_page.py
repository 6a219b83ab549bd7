"""The page of a real run: its sections, charts and sentences, and its content policy."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from jaxckpt_train.report.page import MARK, NAMES
from tests.support.report_pages import Seen, data_of, words_of
from tests.support.report_runs import gathered_of


def test_each_section_has_heading_and_link(preempted_page: Path) -> None:
    page = preempted_page.read_text()
    assert page.startswith(MARK)
    ids = [attributes["id"] for _, attributes in Seen(page).elements if "id" in attributes]
    assert [name for name, count in Counter(ids).items() if count > 1] == []
    links = [attributes["href"] for tag, attributes in Seen(page).elements if tag == "a"]
    assert links == ["#report", *(f"#{name}" for name, _ in NAMES)]
    assert {link.removeprefix("#") for link in links if link} <= set(ids)
    assert [title for _, title in NAMES] == re.findall(r"<h2[^>]*>([^<]*)</h2>", page)


def test_each_chart_has_name_and_table(preempted_page: Path) -> None:
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
    for text in ("signal SIGTERM", "preempted", "killed", "finished", "24-", "step-0000000060", "0.2"):
        assert text in words
    assert f"{gathered.totals.share:.1%}" in words
    assert f"{len(gathered.steps)} steps: 5 kept, {len(gathered.steps) - 5} deleted." in words


def test_content_policy_names_every_script(preempted_page: Path) -> None:
    page = preempted_page.read_text()
    (policy,) = (a["content"] for _, a in Seen(page).elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert len(re.findall("'sha256-", policy)) == len(re.findall(r"<script>", page)) == 3
    assert "unsafe-eval" not in policy
