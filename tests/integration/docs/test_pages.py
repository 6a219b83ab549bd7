"""Blocks of code are found in pages, with the comments that belong to them."""

from __future__ import annotations

import re

from tests.support.pages import ROOT, Page, pages

TEXT = """\
# A page
<!-- run first:
x = 1
-->
```python
y = x
```
<!-- not run: it needs a network -->
```python
fetch()
```

<!-- not run: of the block right below only -->

```yaml
a: 1
```
"""


def test_blocks_have_their_lines_and_comments() -> None:
    hidden, shown, refused = Page("page.md", TEXT).blocks("python")
    assert (hidden.text, hidden.is_shown, hidden.line) == ("x = 1\n", False, 3)
    assert (shown.text, shown.is_shown, shown.line, shown.why_not) == ("y = x\n", True, 6, None)
    assert (refused.text, refused.why_not) == ("fetch()\n", "it needs a network")
    assert [block.why_not for block in Page("page.md", TEXT).blocks("yaml")] == [None]


def test_every_fence_belongs_to_a_block() -> None:
    for page in pages():
        fences = re.findall(r"^\s*```", page.text, re.MULTILINE)
        languages = set(re.findall(r"^```([a-z]*)", page.text, re.MULTILINE))
        blocks = [block for block in page.blocks(*languages, "python") if block.is_shown]
        assert len(fences) == 2 * len(blocks), page.name


def test_page_that_is_run_elsewhere_is_named_there() -> None:
    for page in pages():
        if page.run_by is not None:
            assert page.name.rpartition("/")[2] in (ROOT / page.run_by).read_text(), page.name
    assert Page("page.md", "<!-- run by: tests/test_x.py -->\n").run_by == "tests/test_x.py"
