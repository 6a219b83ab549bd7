"""Whatever a text holds, it is shown and not followed."""

from __future__ import annotations

import html.parser

import pytest

from jaxckpt_train.report.page import Html, element, escaped, joined

HOSTILE = [
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "' onclick='x", "</td></table>", "&lt;", "<!-- ",
    "a\x00b\x1b[1m", "]]>", "$$x^2$$", "@{reason}",
]  # fmt: skip
NO_UNICODE = "\udc80"  # as a path within an error may have it


class Seen(html.parser.HTMLParser):
    """Which elements a parser sees, and the text between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def shown(text: str) -> str:
    """The text as a page can have it."""
    plain = text.encode("utf-8", "backslashreplace").decode()
    return plain.replace("\x00", "\ufffd").replace("\x1b", "\ufffd")


@pytest.mark.parametrize("text", [*HOSTILE, NO_UNICODE])
def test_a_text_is_a_text_and_nothing_else(text: str) -> None:
    seen = Seen(element("td", text, title=text))
    assert seen.elements == [("td", {"title": shown(text)})]
    assert seen.text == shown(text)


def test_what_was_built_here_is_taken_as_it_is() -> None:
    assert element("p", element("b", "<"), " & ", [Html("<i></i>"), None]) == "<p><b>&lt;</b> &amp; <i></i></p>"
    assert joined(["a", ["<"]], None, 3) == "a&lt;3"
    assert escaped(Html("<b>")) == "<b>"


def test_attributes_are_named_and_left_out() -> None:
    found = element("input", class_="a", aria_label="b", disabled=True, hidden=False, id=None)
    assert found == '<input class="a" aria-label="b" disabled>'
