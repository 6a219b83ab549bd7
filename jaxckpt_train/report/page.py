"""Puts a report together: one HTML page that needs nothing else, and that no text from a file can change."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from jaxckpt_train.report import sections
from jaxckpt_train.report.drawing import Drawing, draw, library
from jaxckpt_train.report.explorer import explorer, explorer_data
from jaxckpt_train.report.gathering import Gathered
from jaxckpt_train.report.limits import MOST_BYTES, Limits
from jaxckpt_train.report.markup import Html, element, joined
from jaxckpt_train.report.page_files import own_file
from jaxckpt_train.report.quantities import time_text

MARK = "<!doctype html>\n<!-- a report by jaxckpt_train -->\n"
"""How each page begins: what begins otherwise is not replaced by one."""


def page_of(gathered: Gathered, most_bytes: int = MOST_BYTES) -> str:
    """The page; as much is left out as it takes to keep it below so many bytes."""
    limits = Limits()
    while len((page := _page(gathered, limits)).encode()) > most_bytes and limits.leaves > 1:
        limits = limits.halved()
    return page


def _page(gathered: Gathered, limits: Limits) -> str:
    drawing = draw(gathered, limits)
    scripts = [library(), own_file("explorer.js"), own_file("page.js")] if drawing.places else [
        own_file("explorer.js"), own_file("page.js")
    ]  # fmt: skip
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(scripts)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{_short(gathered.run)}: report"),
        element("style", Html(own_file("page.css"))),
    )
    data = {"document": drawing.document, "places": drawing.places, "tree": explorer_data(gathered, limits)}
    body = element(
        "body",
        element("a", "Skip to the report", href="#report", class_="skip"),
        _header(gathered),
        element("main", _content(gathered, drawing, limits), id="report"),
        element("footer", element("p", "Made by jaxckpt_train. This page fetches nothing.")),
        element("script", _json(data), type="application/json", id="report-data"),
        [element("script", Html(script)) for script in scripts],
    )
    return MARK + element("html", head, body, lang="en") + "\n"


def _short(run: str) -> str:
    return "/".join(run.split("/")[-2:])


def _header(gathered: Gathered) -> Html:
    links = [element("a", title, href=f"#{name}") for name, title in sections.NAMES]
    made = f"made at {time_text(gathered.made)} UTC"
    return element(
        "header",
        element(
            "div",
            element("h1", "Report of ", element("span", _short(gathered.run))),
            element("button", "Dark", id="theme", type="button", aria_pressed="false", class_="needs-script"),
            class_="title",
        ),
        element("p", element("code", gathered.run), " \u00b7 ", made, class_="quiet"),
        element("nav", links, aria_label="Sections"),
    )


def _content(gathered: Gathered, drawing: Drawing, limits: Limits) -> Html:
    before = (sections.timeline, sections.throughput, sections.goodput, sections.steps, sections.metrics)
    return joined(
        sections.summary(gathered),
        element("noscript", element("p", "Without JavaScript there are no charts; their data is in the tables.")),
        [make(gathered, drawing) for make in before],
        explorer(gathered, limits),
        sections.changes(gathered, drawing),
    )


def _json(value: Any) -> Html:
    """JSON that no text in it can end: within a script element nothing is escaped."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Html(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _policy(scripts: list[str]) -> str:
    """Nothing is fetched, and no script runs but these."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
