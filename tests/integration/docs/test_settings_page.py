"""docs/reference/settings.md is up to date, and docs/reference/overview.md lists every public name."""

from __future__ import annotations

import jaxckpt_train as jct
from tests.support.pages import ROOT
from tools.settings_page import PAGE, written

OVERVIEW = (ROOT / "docs" / "reference" / "overview.md").read_text()


def test_settings_page_is_what_the_dataclasses_state() -> None:
    """If this fails, run `python -m tools.settings_page`."""
    page = PAGE.read_text()
    assert written(page) == page


def test_overview_names_every_public_name() -> None:
    policies = (ROOT / "docs" / "reference" / "policies.md").read_text()
    assert [name for name in vars(jct)["__all__"] if name not in OVERVIEW + policies] == []
