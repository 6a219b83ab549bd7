"""Find words that this project's texts avoid: `python tools/check_language.py PATH...`.

Print `path:line: word` for each occurrence in the given files and folders, and exit with status 1 if there is any.
The check covers identifiers, file names, and phrases that continue on the next line. A line that must quote such a
word, for example as the name of a function in another library, ends with the comment `language: allow`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

WORDS = (
    "told", "tells of", "whoever", "who waits", "beside", "besides", "heeded", "so many",  # language: allow
    "manieth", "of ours", "let go of", "lets go of", "any further", "one after the other",  # language: allow
    "gone on from", "has begun",  # language: allow
)  # fmt: skip
MARKER = "language: allow"
SUFFIXES = {".c", ".cff", ".css", ".md", ".py", ".pyi", ".sh", ".toml", ".txt", ".yaml", ".yml"}
SUBJECT_LENGTH = 70

# The words of a phrase are separated by white space, by underscores, or by the start of a comment on the next line.
_PHRASES = "|".join(word.replace(" ", r"[\s_#]+") for word in WORDS)
_BANNED = re.compile(rf"(?<![a-z])(?:{_PHRASES})(?![a-z])", re.IGNORECASE)


def find(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of each banned word."""
    lines = text.splitlines()
    for match in _BANNED.finditer(text):
        number = text.count("\n", 0, match.start()) + 1
        if MARKER not in lines[number - 1]:
            yield number, re.sub(r"[\s_#]+", " ", match[0])


def text_files(path: Path) -> list[Path]:
    """Return the file itself, or the text files below a folder, except those in hidden folders."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"no such file or folder: {path}")
    below = sorted(each for each in path.rglob("*") if each.suffix in SUFFIXES and each.is_file())
    return [each for each in below if not any(part.startswith(".") for part in each.relative_to(path).parts)]


def problems_in_files(paths: list[Path]) -> list[str]:
    """Return a line for each banned word in the files, and in their names."""
    problems = []
    for path in paths:
        for file in text_files(path):
            problems += [f"{file}: {word} (in the file's name)" for _, word in find(file.name)]
            problems += [f"{file}:{number}: {word}" for number, word in find(file.read_text(encoding="utf-8"))]
    return problems


def problems_in_subject(message: Path) -> list[str]:
    """Return what is wrong with the first line of a commit message."""
    subject = message.read_text(encoding="utf-8").partition("\n")[0]
    problems = [f"commit subject: {word}" for _, word in find(subject)]
    if len(subject) > SUBJECT_LENGTH:
        problems.append(f"commit subject: expected at most {SUBJECT_LENGTH} characters, found {len(subject)}")
    return problems


def main(arguments: list[str] | None = None) -> int:
    """Run the check and return the exit status."""
    parser = argparse.ArgumentParser(description="Find words that this project's texts avoid.")
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="files and folders to check")
    parser.add_argument("--commit-message", type=Path, metavar="FILE", help="check the subject of this message")
    options = parser.parse_args(arguments)
    problems = problems_in_files(options.paths)
    if options.commit_message is not None:
        problems += problems_in_subject(options.commit_message)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
