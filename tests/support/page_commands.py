"""Errors in the commands that pages show: unknown targets, modules, options, extras and keys."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Iterator

from jaxckpt_train.config import CheckpointConfig
from jaxckpt_train.settings import FastTierSettings, ObjectStoreSettings, StoreSettings
from tests.support.pages import ROOT, Page

SHELL = ("", "bash", "sh", "console")
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
PRESETS = {file.stem for file in (ROOT / "configs" / "checkpoint").glob("*.yaml")}
KEYS = {field.name for field in dataclasses.fields(CheckpointConfig)}
KEYS |= {f"store.{field.name}" for field in dataclasses.fields(StoreSettings)}
KEYS |= {f"fast_tier.{field.name}" for field in dataclasses.fields(FastTierSettings)}
KEYS |= {f"object_store.{field.name}" for field in dataclasses.fields(ObjectStoreSettings)}
_COMMAND = re.compile(r"(?:\$ )?(?:make|pip|timeout|srun|(?:\S*/)?python[0-9.]*)\s")
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def commands(page: Page) -> Iterator[str]:
    """The commands of a page: lines of its shell blocks, and code within the text."""
    for block in page.blocks(*SHELL):
        yield from (line for line in block.text.splitlines() if _COMMAND.match(line))
    text = re.sub(r"^```.*?^```$", "", page.text, flags=re.DOTALL | re.MULTILINE)
    yield from (span for span in _SPAN.findall(text) if _COMMAND.match(span) or re.match(r"checkpoint[.=]", span))


def problems(command: str) -> list[str]:
    """Return the unknown names in a command."""
    text = command.partition(" #")[0]
    found = []
    for target in re.findall(r"\bmake ([a-z][a-z-]*)", text):
        found += [] if target in TARGETS else [f"no target {target}"]
    for extras in re.findall(r"(?:\.|jaxckpt-train)\[([a-z,]+)\]", text):
        found += [f"no extra {extra}" for extra in extras.split(",") if extra not in EXTRAS]
    for preset in re.findall(r"\bcheckpoint=([a-z0-9]+)", text):
        found += [] if preset in PRESETS else [f"no preset {preset}"]
    for key in re.findall(r"\bcheckpoint\.([a-z_.]+)=", text):
        found += [] if key in KEYS else [f"no key checkpoint.{key}"]
    return found + _of_python(text)


def _of_python(text: str) -> list[str]:
    """Return unknown modules, scripts and options of a Python command."""
    name = re.search(r"python[0-9.]* (?:-m )?((?:benchmarks|tests|examples)[./]\S+)", text)
    if name is None:
        return []
    path = name[1] if name[1].endswith(".py") else name[1].replace(".", "/") + ".py"
    if not (ROOT / path).exists():
        return [f"no {path}"]
    # Some modules parse their arguments in another module of their folder.
    sources = "".join(file.read_text() for file in sorted((ROOT / path).parent.glob("*.py")))
    return [f"{path} has no option {each}" for each in re.findall(r" (--[a-z-]+)", text) if f'"{each}"' not in sources]
