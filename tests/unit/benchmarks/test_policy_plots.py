"""The plots of the policies: the committed files match the current decisions."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.policy_plots import FOLDER, digest_in, digest_of, draw, plots

PLOTS = plots()


@pytest.mark.parametrize("name", list(PLOTS))
def test_plot_was_drawn_from_current_policy(name: str) -> None:
    assert digest_in(FOLDER / f"{name}.svg") == digest_of(PLOTS[name].data()), "make docs-plots"


def test_all_plots_exist_and_are_shown(repo_root: Path) -> None:
    assert {file.stem for file in FOLDER.iterdir()} == set(PLOTS)
    page = (repo_root / "docs" / "reference" / "policies.md").read_text()
    assert [name for name in PLOTS if f"(../plots/{name}.svg)" not in page] == []


def test_plot_is_deterministic_and_has_digest(tmp_path: Path) -> None:
    plot = PLOTS["temporary-lives"]
    first, again = (draw("a", plot, tmp_path).read_bytes() for _ in range(2))
    assert first == again
    assert digest_in(tmp_path / "a.svg") == digest_of(plot.data())


def test_changed_decision_changes_the_digest() -> None:
    lives = PLOTS["latest-n"].data()
    assert digest_of(lives) != digest_of(lives[:-1])
    assert digest_of([1.0]) == digest_of([1.0 + 1e-9])
