"""The language check finds banned words and phrases, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_language import find, main


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The process is told of it.", "told"),  # language: allow
        ("BESIDES, it waits.", "BESIDES"),  # language: allow
        ("def test_peer_is_told() -> None:", "told"),  # language: allow
        ("no_word_of_ours = 1", "of ours"),  # language: allow
        ("how_manieth", "manieth"),  # language: allow
    ],
)
def test_banned_words_are_found(text: str, found: str) -> None:
    assert list(find(f"First line.\n{text}\n")) == [(2, found)]


def test_phrase_is_found_across_lines_of_a_comment() -> None:
    text = "# There are so\n    # many.\n"  # language: allow
    assert list(find(text)) == [(1, "so many")]  # language: allow


@pytest.mark.parametrize(
    "text",
    [
        "Attach errors raised during cleanup as notes instead of masking the original error.",
        "Both sides of the untold story hold.",
        "So there are many further runs; one has just begun.",
    ],
)
def test_other_words_are_not_found(text: str) -> None:
    assert list(find(text)) == []


def test_marked_line_is_allowed() -> None:
    assert list(find("handler.told()  # language: allow\nfine\n")) == []


def test_files_and_their_names_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, named = tmp_path / "notes.md", tmp_path / "test_told.py"  # language: allow
    text.write_text("Fine.\nNobody was told.\n")  # language: allow
    named.write_text("")
    (tmp_path / "test_untold.py").write_text("")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "notes.md").write_text("told")  # language: allow
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{text}:2: told\n{named}: told (in the file's name)\n"  # language: allow
    assert main([str(tmp_path / "test_untold.py")]) == 0


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ("store: write segments in order\n\nThe body may be as long as it needs to be: " + "x" * 80, 0),
        ("store: " + "x" * 64, 1),
        ("store: let go of the lock\n", 1),  # language: allow
    ],
)
def test_commit_subject_is_checked(tmp_path: Path, message: str, status: int) -> None:
    file = tmp_path / "message"
    file.write_text(message)
    assert main(["--commit-message", str(file)]) == status
