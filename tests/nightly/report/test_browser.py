"""Pages in a real browser: opened from a file, drawn, read, searched and recoloured; nothing leaves them."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import jaxckpt_train as jct
from jaxckpt_train.report.changes import LeafSize, TreeSizes
from jaxckpt_train.report.gather import Gathered
from jaxckpt_train.report.page import page_of
from tests.support.chromium import Browser, Tab
from tests.support.history_events import at
from tests.support.report_pages import HOSTILE
from tests.support.report_runs import gathered_of, write_history
from tests.support.runs import flip_a_payload_byte, made_run, step_path, truncate_the_manifest

LIGHT, DARK = (255, 255, 255), (0x14, 0x18, 0x1F)
GREEN, ORANGE, BLUE = (0x2E, 0x9B, 0x6F), (0xDD, 0x84, 0x32), (0x3F, 0x7F, 0xBF)
RED, GREY, PURPLE = (0xCF, 0x4A, 0x5A), (0x8B, 0x91, 0x9B), (0x8B, 0x6F, 0xC4)
TWO_FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
CHARTS = ["changes", "disk-use", "metric-0", "retention", "save-times", "throughput", "time-spent", "timeline"]


def opened(tab: Tab, directory: Path, gathered: Gathered) -> Path:
    """Open the page of a run in the browser."""
    file = directory / "report.html"
    file.write_text(page_of(gathered))
    tab.open(file)
    return file


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


def pixels_of(tab: Tab, selector: str) -> np.ndarray:
    """Return the pixels of an element."""
    box = tab.value(
        f"(box => [box.x + scrollX, box.y + scrollY, box.width, box.height])"
        f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
    )
    x, y, width, height = map(round, box)
    return pixels(tab.screenshot(whole=True))[y : y + height, x : x + width]


def like(image: np.ndarray, colour: Sequence[int], within: int = 3) -> np.ndarray:
    """Return which pixels have this colour."""
    return (np.abs(image - np.asarray(colour)) <= within).all(axis=2)


def places(tab: Tab) -> list[str]:
    """Return the charts that contain a canvas."""
    return sorted(
        tab.value("""[...document.querySelectorAll(".chart")].filter(place => {
          const inner = node => [...node.children, ...(node.shadowRoot?.children ?? [])];
          const look = node => node.tagName === "CANVAS" || inner(node).some(look);
          return look(place);
        }).map(place => place.id.replace("chart-", ""))""")
    )


def text_of(tab: Tab, selector: str) -> str:
    return str(tab.value(f"document.querySelector({json.dumps(selector)}).innerText"))


def pointed_at(tab: Tab, selector: str, right: int, down: int) -> str:
    """Return the tooltip for a pointer over an element, `right` and `down` pixels from its corner."""
    place = f"document.querySelector({json.dumps(selector)})"
    tab.value(f"{place}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    tab.value(TWO_FRAMES)
    box = tab.value(f"(box => [box.x, box.y])({place}.getBoundingClientRect())")
    tab.ask("Input.dispatchMouseEvent", type="mouseMoved", x=round(box[0]) + right, y=round(box[1]) + down)
    cells = (
        "[...(document.querySelector('.bk-Tooltip')?.shadowRoot?.querySelectorAll('[class^=bk-tooltip-row]') ?? [])]"
    )
    tab.wait_for(f"{cells}.length > 1")
    return str(tab.value(f"{cells}.map(cell => cell.textContent.trim()).join(' ')"))


def rows_of(tab: Tab) -> list[str]:
    """Return the names of the visible leaves and branches."""
    return list(
        tab.value(
            '[...document.querySelectorAll("#leaves summary, #leaves .leaf:not(.head)")]'
            ".filter(row => row.checkVisibility()).map(row => row.firstChild.textContent)"
        )
    )


@pytest.fixture
def page_tab(tab: Tab, preempted_page: Path) -> Tab:
    """The page of the preempted run."""
    tab.open(preempted_page)
    return tab


@pytest.fixture(scope="module")
def seen_tab(browser: Browser, preempted_page: Path) -> Iterator[Tab]:
    """That page, shared by the tests that only read it or search in it: drawing it takes seconds."""
    made = browser.open_tab()
    made.show_as("light")
    made.open(preempted_page)
    yield made
    made.close()


def test_page_makes_no_requests_and_errors(seen_tab: Tab, preempted_page: Path) -> None:
    assert seen_tab.requests == [preempted_page.as_uri()]
    assert seen_tab.errors == []


def test_tab_records_requests_and_errors(tab: Tab, tmp_path: Path) -> None:
    file = tmp_path / "bad.html"
    file.write_text(
        '<html data-ready="true"><img src="http://127.0.0.1:9/x.png"><script>console.error("text"); missing()</script>'
    )
    tab.open(file)
    assert "http://127.0.0.1:9/x.png" in tab.requests
    assert any("text" in error for error in tab.errors)
    assert any("missing is not defined" in error for error in tab.errors)


def test_all_charts_are_drawn(seen_tab: Tab) -> None:
    assert places(seen_tab) == CHARTS
    image = pixels(seen_tab.screenshot())
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 100
    assert like(image, LIGHT).mean() > 0.3


def test_bar_lengths_match_the_times(seen_tab: Tab, preempted_run: Path) -> None:
    totals = gathered_of(preempted_run).totals
    image = pixels_of(seen_tab, "#chart-time-spent")
    parts = {"useful": GREEN, "lost": RED, "blocked": ORANGE, "resume": BLUE, "between": GREY, "other": PURPLE}
    in_row = {name: like(image, colour, within=6).sum(axis=1) for name, colour in parts.items()}
    (bars,) = np.nonzero(sum(in_row.values()) > 700)
    middle = int(bars[0]) + 5  # of the bar of the whole run, which comes first
    seen = {name: int(counts[middle]) for name, counts in in_row.items()}
    whole = sum(seen.values())
    room = seen_tab.value("Bokeh.documents[0].roots().find(chart => chart.name === 'time-spent').inner_width")
    assert whole == pytest.approx(room, abs=6)
    shown = {
        "useful": totals.useful_s, "lost": totals.lost_s, "blocked": totals.blocked_s, "resume": totals.to_resume_s,
        "between": totals.between_s, "other": totals.other_s,
    }  # fmt: skip
    for name, seconds in shown.items():
        assert seen[name] / whole == pytest.approx(seconds / totals.wall_s, abs=0.01), name


def test_saves_and_processes_are_in_the_timeline(seen_tab: Tab) -> None:
    image = pixels_of(seen_tab, "#chart-timeline")
    assert like(image, ORANGE, within=20).sum() > 50
    assert like(image, GREEN, within=40).sum() > 500
    assert like(image, BLUE, within=40).sum() > 500
    assert like(image, RED, within=40).sum() > 500


def test_pointer_shows_a_tooltip(page_tab: Tab) -> None:
    found = pointed_at(page_tab, "#chart-timeline", 300, 20)
    assert found.startswith("process: 1 began (UTC): ")
    assert " ended: preempted where: " in found
    assert " steps: 0-24 " in found


def test_legend_buttons_hide_and_show_a_series(page_tab: Tab) -> None:
    button = ".legend:has(+ #chart-timeline) button:nth-child(1)"
    assert text_of(page_tab, button).endswith("finished")
    before = like(pixels_of(page_tab, "#chart-timeline"), GREEN, within=40).sum()
    page_tab.click(button)
    page_tab.wait_for(f"document.querySelector('{button}').getAttribute('aria-pressed') === 'false'")
    page_tab.value(TWO_FRAMES)
    hidden = like(pixels_of(page_tab, "#chart-timeline"), GREEN, within=40).sum()
    page_tab.click(button)
    page_tab.value(TWO_FRAMES)
    shown = like(pixels_of(page_tab, "#chart-timeline"), GREEN, within=40).sum()
    assert hidden < 0.3 * before
    assert shown == before
    assert page_tab.errors == []


def test_tree_is_opened_and_closed_by_click(page_tab: Tab) -> None:
    assert rows_of(page_tab) == ["state", "params", "step"]
    page_tab.click("#leaves details details summary")
    page_tab.wait_for("document.querySelectorAll('#leaves .leaf:not(.head)').length === 3")
    assert rows_of(page_tab) == ["state", "params", "bias", "kernel", "step"]
    page_tab.click("#leaf-close")
    assert rows_of(page_tab) == ["state"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("KERN", ["state/params/kernel"]),
        ("state/*", ["state/step"]),
        ("params/*", ["state/params/bias", "state/params/kernel"]),
        ("**/b?as", ["state/params/bias"]),
        ("state/**", ["state/params/bias", "state/params/kernel", "state/step"]),
        ("(", []),
        ("[a-z]*", []),
    ],
)
def test_leaves_are_found_by_a_pattern(seen_tab: Tab, pattern: str, found: list[str]) -> None:
    seen_tab.click("#leaf-close")
    seen_tab.click("#leaf-pattern")
    seen_tab.type(pattern)
    seen_tab.wait_for(f"document.querySelector('#leaf-count').textContent.startsWith('{len(found)} of 3 leaves')")
    assert rows_of(seen_tab) == found
    assert seen_tab.errors == []


def test_leaves_are_sorted_by_size_when_asked(page_tab: Tab) -> None:
    page_tab.click("#leaf-pattern")
    page_tab.type("state")
    page_tab.wait_for("document.querySelector('#leaf-count').textContent.startsWith('3 of 3')")
    page_tab.click("#leaf-order")
    assert rows_of(page_tab) == ["state/params/kernel", "state/params/bias", "state/step"]


def test_ten_thousand_leaves_stay_usable(tab: Tab, tmp_path: Path) -> None:
    leaves = {f"layer_{number // 100}": {} for number in range(10_000)}
    for number in range(10_000):
        leaves[f"layer_{number // 100}"][f"w{number}"] = np.full(number % 7 + 1, number, np.float32)
    with jct.StepManager(tmp_path / "run") as manager:
        manager.save(1, {"state": leaves, "flat": {f"x{number}": np.zeros(1) for number in range(3000)}})
        manager.wait()
    opened(tab, tmp_path, gathered_of(tmp_path / "run"))
    assert rows_of(tab)[:2] in (["state", "layer_0"], ["flat", "x0"])
    assert tab.value("document.querySelectorAll('#leaves .leaf, #leaves summary').length") <= 420
    took_ms = tab.value("""new Promise(done => {
      const field = document.querySelector("#leaf-pattern"), count = document.querySelector("#leaf-count");
      const began = performance.now();
      field.value = "layer_?/**7";
      field.dispatchEvent(new Event("input"));
      const isDone = () => count.textContent.startsWith("100 of 13,000 leaves");
      const look = () => isDone() ? done(performance.now() - began) : setTimeout(look, 5);
      look();
    })""")
    assert took_ms < 3000
    assert tab.value("document.querySelectorAll('#leaves .leaf:not(.head)').length") == 100
    tab.value(
        "(field => { field.value = 'w'; field.dispatchEvent(new Event('input')); })"
        "(document.querySelector('#leaf-pattern'))"
    )
    tab.wait_for("document.querySelector('#leaf-count').textContent.startsWith('10,000 of 13,000 leaves')")
    tab.click("#leaves .more")
    tab.wait_for("document.querySelectorAll('#leaves .leaf:not(.head)').length === 400")
    assert text_of(tab, "#leaves .more") == "Show 200 of 9,600 more"


def test_theme_follows_system_until_it_is_chosen(page_tab: Tab) -> None:
    assert tuple(pixels(page_tab.screenshot())[0, 0]) == LIGHT
    page_tab.show_as("dark")
    page_tab.wait_for("document.querySelector('#theme').getAttribute('aria-pressed') === 'true'")
    assert tuple(pixels(page_tab.screenshot())[0, 0]) == DARK
    page_tab.click("#theme")
    assert tuple(pixels(page_tab.screenshot())[0, 0]) == LIGHT
    assert page_tab.value("document.querySelector('#theme').getAttribute('aria-pressed')") == "false"


def test_click_makes_page_and_its_charts_dark(page_tab: Tab) -> None:
    light = pixels_of(page_tab, "#chart-time-spent")
    page_tab.click("#theme")
    assert page_tab.value("document.documentElement.dataset.theme") == "dark"
    page_tab.value(TWO_FRAMES)
    dark = pixels_of(page_tab, "#chart-time-spent")
    assert like(light, LIGHT).mean() > 0.3
    assert like(dark, DARK).mean() > 0.3
    assert like(dark, LIGHT).sum() == 0
    of_light, of_dark = (0xE6, 0xE9, 0xEE), (0x26, 0x2D, 0x38)  # lines of the grid
    assert (like(light, of_light).sum() > 50, like(light, of_dark).sum()) == (True, 0)
    assert (like(dark, of_dark).sum() > 50, like(dark, of_light).sum()) == (True, 0)
    np.testing.assert_array_equal(like(light, GREEN).sum(axis=1) > 30, like(dark, GREEN).sum(axis=1) > 30)
    assert page_tab.errors == []


def test_page_can_be_used_with_keyboard(page_tab: Tab) -> None:
    def focused() -> str:
        return str(page_tab.value("document.activeElement.id || document.activeElement.textContent.trim()"))

    page_tab.press("Tab")
    assert focused() == "Skip to the report"
    page_tab.press("Tab")
    assert focused() == "theme"
    page_tab.press("Enter", "\r")
    assert page_tab.value("document.documentElement.dataset.theme") == "dark"
    reached = []
    for _ in range(120):
        page_tab.press("Tab")
        reached.append(focused())
        if reached[-1] == "leaf-close":
            break
    assert reached[:7] == ["Timeline", "Throughput", "Goodput", "Steps", "Metrics", "Tree", "Changes"]
    assert {"Data: saves", "Data: processes", "leaf-pattern", "leaf-order"} <= set(reached)
    page_tab.press("Tab")
    page_tab.press("Tab")
    page_tab.press("Enter", "\r")  # on the branch below the first one, perhaps in a scrolled place
    page_tab.wait_for("[...document.querySelectorAll('#leaves details')].filter(branch => branch.open).length !== 1")


def test_screen_readers_get_names_of_buttons(seen_tab: Tab) -> None:
    seen_tab.ask("Accessibility.enable")
    nodes = seen_tab.ask("Accessibility.getFullAXTree")["nodes"]
    elements = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]
    for role in ("button", "searchbox", "link", "region", "image", "heading", "table", "navigation", "main", "banner"):
        names = [name for found, name in elements if found == role]
        assert names or role == "region", role
        assert all(names) or role in ("main", "banner"), (role, names)
    assert ("heading", "Timeline") in elements
    assert sum(role == "image" for role, _ in elements) >= len(CHARTS)


def test_tables_hold_the_data_of_charts(page_tab: Tab, preempted_run: Path) -> None:
    page_tab.click("#steps ~ figure .data summary")
    rows = text_of(page_tab, "#steps ~ figure .data tbody").splitlines()
    assert len(rows) == len(gathered_of(preempted_run).steps)
    assert rows[-1].startswith("60\tstep-0000000060\tkept\t")


def test_without_javascript_the_data_is_there(tab: Tab, preempted_page: Path) -> None:
    tab.ask("Emulation.setScriptExecutionDisabled", value=True)
    tab.go_to(preempted_page)
    page = tab.value("document.body.textContent")
    assert "Without JavaScript there are no charts" in page
    assert "state/params/kernel" in page


HOSTILE_LEAVES = [f"state/{text}/w" for text in HOSTILE]


def test_hostile_texts_run_no_script(tab: Tab, tmp_path: Path) -> None:
    events = [at(0, "start", host=HOSTILE[0], pid=3), at(0.5, "resumed", step=0)]
    for number, text in enumerate(HOSTILE, 1):
        text = text.replace("alert(1)", "window.hacked=1")
        fields = {
            "name": f"step-{number:010d}",
            "reason": text,
            "metrics": {text: 1.0, "x": 2.0},
            "bytes_per_s": 1 << 20,
        }
        events += [
            at(number, "save", ok=True, step=number, save_s=0.5, bytes=9, **fields),
            at(number, "save", ok=False, step=number, error=text),
            at(number, "restore", step=number, name=text, skipped=[text], bytes_per_s=7),
            at(number, "preempted", step=number, reason=text), at(number, text),
        ]  # fmt: skip
    events.append(at(99, "end", how=HOSTILE[1], step=9))
    gathered = gathered_of(write_history(tmp_path / "run", *events))
    tree = TreeSizes(9, HOSTILE[0], tuple(LeafSize(name, HOSTILE[0], 4) for name in HOSTILE_LEAVES))
    file = opened(tab, tmp_path, dataclasses.replace(gathered, tree=tree, warnings=tuple(HOSTILE)))
    assert tab.value("window.hacked") is None
    assert tab.requests == [file.as_uri()]
    assert tab.errors == []
    assert {"timeline", "save-times", "throughput", "retention"} <= set(places(tab))
    assert f"ended: {HOSTILE[1]} where: {HOSTILE[0]}, process 3" in pointed_at(tab, "#chart-timeline", 300, 20)
    assert (tab.value("window.hacked"), tab.errors) == (None, [])
    assert HOSTILE[1] in text_of(tab, "body")
    tab.click("#leaf-pattern")
    tab.type("<script>")
    tab.wait_for("document.querySelector('#leaf-count').textContent.startsWith('1 of')")
    assert rows_of(tab) == [HOSTILE_LEAVES[0]]


@pytest.mark.parametrize("kind", ["empty", "one step", "no metrics", "damaged", "no history"])
def test_small_and_damaged_runs_are_shown(tab: Tab, tmp_path: Path, kind: str) -> None:
    run = tmp_path / "run"
    if kind == "empty":
        write_history(run)
    else:
        made_run(run, *([1] if kind == "one step" else [1, 2, 3]))
    if kind == "damaged":
        truncate_the_manifest(step_path(run, 3))
        flip_a_payload_byte(step_path(run, 2))
    if kind == "no history":
        (run / "history.jsonl").unlink()
    file = opened(tab, tmp_path, gathered_of(run))
    assert (tab.requests, tab.errors) == ([file.as_uri()], [])
    saved = {"disk-use", "retention", "save-times", "throughput", "time-spent", "timeline"}
    wanted = {
        "empty": set(), "one step": saved, "no metrics": saved | {"changes"}, "damaged": saved,
        "no history": {"disk-use", "retention", "changes"},
    }  # fmt: skip
    assert set(places(tab)) == wanted[kind]
    assert tab.value("document.querySelectorAll('.chart').length") == len(wanted[kind])
    assert len(np.unique(pixels(tab.screenshot()).reshape(-1, 3), axis=0)) > 20


def test_a_narrow_window_is_not_scrolled_sideways(tab: Tab, preempted_page: Path) -> None:
    tab.show_as("light", width=390, height=800)
    tab.open(preempted_page)
    assert tab.value("document.documentElement.scrollWidth") <= 390
