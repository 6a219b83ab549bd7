"""The pages of the documentation as text, with their blocks of code and the comments about these."""

from __future__ import annotations

import dataclasses
import re

from tests.support.paths import REPO_ROOT

ROOT = REPO_ROOT
# Comments: a block that is not run, hidden code that is run, and the test file that runs the whole page.
_NOT_RUN = re.compile(r"<!-- not run: (?P<reason>[^>]+?) -->\n\Z")
_PIECE = re.compile(
    r"^<!-- run first:\n(?P<hidden>.*?)^-->$|^```(?P<language>[a-z]*)[^\n]*\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_RUN_BY = re.compile(r"^<!-- run by: (\S+) -->$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        text: its content.
        language: as in the page; "": none.
        line: its first line in the page.
        why_not: the reason why it is not run; None: it is run.
        is_shown: whether readers see it; hidden blocks prepare the next ones.
    """

    text: str
    language: str
    line: int
    why_not: str | None = None
    is_shown: bool = True


@dataclasses.dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        name: its path below the repository.
        text: its whole text.
    """

    name: str
    text: str

    @property
    def run_by(self) -> str | None:
        """The test file that runs its blocks, if the page has its own."""
        found = _RUN_BY.search(self.text)
        return found and found.group(1)

    def blocks(self, *languages: str) -> list[Block]:
        """Return the blocks in these languages, in order; hidden blocks are Python."""
        found = []
        for piece in _PIECE.finditer(self.text):
            before, line = self.text[: piece.start()], self.text.count("\n", 0, piece.start()) + 2
            if piece["hidden"] is not None:
                found.append(Block(piece["hidden"], "python", line, is_shown=False))
            else:
                reason = _NOT_RUN.search(before)
                found.append(Block(piece["text"], piece["language"], line, reason and reason["reason"]))
        return [block for block in found if block.language in languages]


def pages() -> list[Page]:
    """Return README.md and all pages below docs/."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [Page(str(file.relative_to(ROOT)), file.read_text()) for file in files]
