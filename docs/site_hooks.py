"""Hooks for MkDocs: pages for files outside docs/, blank lines before lists, and the arguments of the callback."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

OUTSIDE = {"CHANGELOG.md": "changes.md", "README.md": "index.md"}  # by its path in the repository, which page it is
SOURCES = "source/"
_LINK = re.compile(r"(?<=\]\()([^()\s#]+)(?=[)#])")
_ITEM = re.compile(r"(?:[-*+]|\d+[.)]) ")
_FENCE = re.compile(r"\s*(?:```|~~~)")


class FieldsAsArguments(griffe.Extension):
    """Show a method with the decorator `takes_fields_of(Options)` with the fields of that class as its arguments."""

    def on_package(self, *, pkg: griffe.Module, **options: Any) -> None:
        """Called when the sources of the package are read."""
        griffe.DataclassesExtension().on_package(pkg=pkg, **options)  # finds the fields
        arguments = pkg["config.CallbackOptions"].parameters
        pkg["callback.CheckpointCallback.__init__"].parameters = griffe.Parameters(*arguments)


def on_files(files: Files, *, config: Any) -> Files:
    """Take in the changelog, and each file outside docs/ that a page links to."""
    root = Path(config.config_file_path).parent
    if (root / "CHANGELOG.md").exists():
        files.append(File.generated(config, OUTSIDE["CHANGELOG.md"], abs_src_path=str(root / "CHANGELOG.md")))
    linked = set[str]()
    for page in list(files.documentation_pages()):
        paths = (_path_of(root, page, link) for link in _LINK.findall(page.content_string))
        linked.update(path for path in paths if path is not None and _page_of(path).startswith(SOURCES))
    for path in sorted(linked):
        text = (root / path).read_text()
        content = f"# {path}\n\n``````{path.rpartition('.')[2].replace('py', 'python')}\n{text}``````\n"
        files.append(File.generated(config, _page_of(path), content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """The text as Python-Markdown has to have it, with links to pages of the site."""
    if page.file.src_uri.startswith(SOURCES):
        return markdown
    root, folder = Path(config.config_file_path).parent, posixpath.dirname(page.file.src_uri)

    def rewritten(link: re.Match[str]) -> str:
        path = _path_of(root, page.file, link[0])
        return link[0] if path is None else posixpath.relpath(_page_of(path), folder or ".")

    return with_blank_lines(_LINK.sub(rewritten, markdown))


def _path_of(root: Path, page: File, link: str) -> str | None:
    """The path in the repository of a file that a page links to; None: it is none, or one that MkDocs finds itself."""
    source = Path(str(page.abs_src_path))
    target = Path(posixpath.normpath(source.parent / link))
    if not target.is_file() or not target.is_relative_to(root):
        return None
    path = target.relative_to(root).as_posix()
    return path if not path.startswith("docs/") or source.parent == root else None


def _page_of(path: str) -> str:
    """The page of the site for a file of the repository."""
    return path.removeprefix("docs/") if path.startswith("docs/") else OUTSIDE.get(path, f"{SOURCES}{path}.md")


def with_blank_lines(markdown: str) -> str:
    """A blank line before each list and table that follows a line of text, where GitHub needs none."""
    lines: list[str] = []
    is_code = is_list = False
    for line in markdown.splitlines():
        before = lines[-1] if lines else ""
        if _FENCE.match(line):
            is_code = not is_code
        elif not is_code:
            begins_list = bool(_ITEM.match(line)) and not is_list
            begins_table = line.startswith("|") and not before.startswith("|")
            if (begins_list or begins_table) and before.strip() and not before.startswith("#"):
                lines.append("")
            is_list = bool(_ITEM.match(line)) or (is_list and bool(line.strip()) and not line.startswith("#"))
        lines.append(line)
    return "\n".join(lines) + "\n"
