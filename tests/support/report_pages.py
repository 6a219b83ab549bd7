"""Pages of reports as a parser sees them, and texts that could become markup."""

from __future__ import annotations

import html.parser
import json
import re
from typing import Any

HOSTILE = [
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "' onclick='x", "<!-- ", "a\x00b\x1b[1m",
    "</td></table>", "&lt;", "]]>", "$$x^2$$", "@{reason}",
]  # fmt: skip
NO_UNICODE = "\udc80"  # as in a path within an error


class Seen(html.parser.HTMLParser):
    """Collects the elements that a parser sees, and the text between them."""

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


def data_of(page: str) -> Any:
    """Return the data that the scripts of a page read."""
    found = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def words_of(page: str) -> str:
    """Return the text that a reader sees, without scripts and styles."""
    return Seen(re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)).text
