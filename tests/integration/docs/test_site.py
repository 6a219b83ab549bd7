"""The site is built from the pages, strictly and without a network, and its pages fetch nothing from elsewhere."""

from __future__ import annotations

import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

from docs.site_hooks import with_blank_lines

# What a browser fetches by itself, which a link is not.
FETCHED = re.compile(r"""(?:<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=|url\(|@import )["']?(?:https?:)?//""")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the site is built without a network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def build_site(root: Path, site: Path) -> Path:
    build(load_config(str(root / "mkdocs.yml"), strict=True, site_dir=str(site)))
    return site


@pytest.fixture(scope="module")
def site(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_site(repo_root, tmp_path_factory.mktemp("site"))


def test_every_page_is_built(site: Path, repo_root: Path) -> None:
    sources = {file.relative_to(repo_root / "docs").with_suffix(".html") for file in (repo_root / "docs").rglob("*.md")}
    built = {file.relative_to(site) for file in site.rglob("*.html") if not file.is_relative_to(site / "source")}
    assert built == sources | {Path("changes.html"), Path("404.html"), Path("search.html")}


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    files = [file for kind in ("*.html", "*.css") for file in site.rglob(kind)]
    assert {str(file.relative_to(site)): found for file in files if (found := FETCHED.search(file.read_text()))} == {}
    assert FETCHED.search('<link rel="stylesheet" href="https://fonts.example/css">')
    assert FETCHED.search('<script async src="//example/a.js">')


def test_lists_and_tables_are_rendered(site: Path) -> None:
    text = (site / "explanation" / "scale.html").read_text()
    assert "<p>|" not in text
    assert "<li><strong>Simulated</strong>" in text


@pytest.fixture
def small(repo_root: Path, tmp_path: Path) -> Path:
    """The sources of a site of three pages with these settings."""
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in ("index.md", "format.md", "faq.md"):
        (docs / name).write_text("# A page\n")
    shutil.copy(repo_root / "docs" / "site_hooks.py", docs)
    settings = (repo_root / "mkdocs.yml").read_text().partition("nav:\n  - ")[0]
    (tmp_path / "mkdocs.yml").write_text(settings + "nav: [index.md, format.md, faq.md]\n")
    return tmp_path


def test_links_to_other_folders_lead_to_pages(small: Path) -> None:
    (small / "CHANGELOG.md").write_text(
        "# Changes\nSee [the format](docs/format.md#a-page) and [one](examples/one.py).\n"
    )
    (small / "README.md").write_text("# Read this\n")
    (small / "examples").mkdir()
    (small / "examples" / "one.py").write_text('"""Has a\n- list and a ```fence``` in it."""\n')
    (small / "docs" / "adr").mkdir()
    (small / "docs" / "adr" / "1.md").write_text(
        "# One\n[a](../../CHANGELOG.md), [b](../../README.md#read-this), [c](../faq.md)\n"
    )
    (small / "mkdocs.yml").write_text(
        (small / "mkdocs.yml").read_text().replace("faq.md]", "faq.md, adr/1.md, changes.md]")
    )
    with open(small / "docs" / "index.md", "a") as file:
        file.write("## Read this\n[one](../examples/one.py)\n")
    site = build_site(small, small / "site")
    links = {
        page: re.findall(r'<a href="([^"]+)">(?:a|b|c|one|the format)</a>', (site / page).read_text())
        for page in ("index.html", "changes.html", "adr/1.html")
    }
    assert links == {
        "index.html": ["source/examples/one.py.html"],
        "changes.html": ["format.html#a-page", "source/examples/one.py.html"],
        "adr/1.html": ["../changes.html", "../index.html#read-this", "../faq.html"],
    }
    assert "list and a ```fence```" in re.sub("<[^>]+>", "", (site / "source/examples/one.py.html").read_text())


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("faq.md", "[nowhere](nowhere.md)"),
        ("faq.md", "[no such part](format.md#no-such-part)"),
        ("faq.md", "![no plot](plots/none.svg)"),
        ("faq.md", "[outside](../README.md)"),
        ("not-in-the-nav.md", "# A page"),
    ],
)
def test_what_leads_nowhere_fails_the_build(small: Path, page: str, text: str) -> None:
    with open(small / "docs" / page, "a") as file:
        file.write(text + "\n")
    with pytest.raises(Abort, match="Aborted with 1 warnings"):
        build_site(small, small / "site")


def test_lists_and_tables_get_a_blank_line() -> None:
    assert with_blank_lines("Text\n- a\n  more\n- b\n") == "Text\n\n- a\n  more\n- b\n"
    assert with_blank_lines("Text\n| a |\n|---|\n| b |\n") == "Text\n\n| a |\n|---|\n| b |\n"
    assert with_blank_lines("# Head\n1. a\nlazily on\n2. b\n") == "# Head\n1. a\nlazily on\n2. b\n"
    assert with_blank_lines("```\nText\n- a\n| b |\n```\n") == "```\nText\n- a\n| b |\n```\n"
