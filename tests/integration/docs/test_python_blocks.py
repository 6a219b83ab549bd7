"""The Python of every page runs unchanged, from top to bottom, in a directory of its own."""

from __future__ import annotations

import gc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.integration.docs.test_readme import names
from tests.support.pages import Page, pages

README = "README.md"  # tests/integration/docs/test_readme.py runs its blocks, one by one
SLOW = {"docs/how-to/evaluation.md"}  # it takes most of a minute
WITH_PYTHON = [
    pytest.param(page, id=page.name, marks=pytest.mark.nightly if page.name in SLOW else ())
    for page in pages()
    if page.name != README and page.run_by is None and page.blocks("python")
]


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_blocks_run_unchanged(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(page)
    gc.collect()  # a callback that a block has not closed releases its directory here


def run(page: Page) -> dict[str, object]:
    """Run its blocks in order, with the same namespace, which defines a few names at first."""
    used = names(jax=jax, jnp=jnp, np=np, __name__="__main__")
    for block in page.blocks("python"):
        if block.why_not is None:
            # Errors name the page and the line in it.
            exec(compile("\n" * (block.line - 1) + block.text, page.name, "exec"), used)
    return used


def test_failing_block_names_page_and_line() -> None:
    page = Page("docs/broken.md", "One\n```python\nstate\nnothing_of_this_name\n```\n")
    with pytest.raises(NameError, match="nothing_of_this_name") as caught:
        run(page)
    last = caught.traceback[-1]
    assert (str(last.path).endswith("docs/broken.md"), last.lineno + 1) == (True, 4)
