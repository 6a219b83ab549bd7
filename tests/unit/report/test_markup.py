"""Texts are shown as they are, and never become markup."""

from __future__ import annotations

import pytest

from jaxckpt_train.report.page import Html, element, escaped, joined
from tests.support.report_pages import HOSTILE, NO_UNICODE, Seen


def shown(text: str) -> str:
    """Return the text as a page shows it."""
    plain = text.encode("utf-8", "backslashreplace").decode()
    return plain.replace("\x00", "\ufffd").replace("\x1b", "\ufffd")


@pytest.mark.parametrize("text", [*HOSTILE, NO_UNICODE])
def test_texts_are_escaped(text: str) -> None:
    seen = Seen(element("td", text, title=text))
    assert seen.elements == [("td", {"title": shown(text)})]
    assert seen.text == shown(text)


def test_nested_elements_are_not_escaped_again() -> None:
    assert element("p", element("b", "<"), " & ", [Html("<i></i>"), None]) == "<p><b>&lt;</b> &amp; <i></i></p>"
    assert joined(["a", ["<"]], None, 3) == "a&lt;3"
    assert escaped(Html("<b>")) == "<b>"


def test_attributes_follow_their_values() -> None:
    found = element("input", class_="a", aria_label="b", disabled=True, hidden=False, id=None)
    assert found == '<input class="a" aria-label="b" disabled>'
