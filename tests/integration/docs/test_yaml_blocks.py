"""YAML with `checkpoint` on pages is a configuration that the callback accepts, and JSON is valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxckpt_train.config import callback_arguments
from jaxckpt_train.errors import SettingsError
from tests.support.page_commands import PRESETS
from tests.support.pages import Block, Page, pages

YAML = [(page, block) for page in pages() for block in page.blocks("yaml")]
JSON = [(page, block) for page in pages() for block in page.blocks("json")]


def place(value: Any) -> str:
    return value.name.replace("docs/", "") if isinstance(value, Page) else f"line {value.line}"


def check(text: str) -> None:
    for document in yaml.safe_load_all(text):
        found = document if isinstance(document, dict) else {}
        presets = [each["checkpoint"] for each in found.get("defaults", []) if "checkpoint" in each]
        assert set(presets) <= PRESETS
        if "checkpoint" in found:
            callback_arguments(found["checkpoint"])


@pytest.mark.parametrize(("page", "block"), YAML, ids=place)
def test_yaml_is_an_accepted_configuration(
    page: Page, block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # what a node makes may open files
    if block.why_not is None and page.run_by is None:
        check(block.text)
    else:
        list(yaml.safe_load_all(block.text))


@pytest.mark.parametrize(("page", "block"), JSON, ids=place)
def test_json_is_json(page: Page, block: Block) -> None:
    for line in block.text.splitlines():
        json.loads(line)


def test_invalid_configuration_is_found() -> None:
    with pytest.raises(SettingsError, match="save_every"):
        check("checkpoint:\n  save_every: 5\n")
    with pytest.raises(SettingsError, match="expected a finite number of seconds"):
        check("checkpoint:\n  save_policy: {_target_: jaxckpt_train.EverySecondsPolicy, seconds: 0}\n")
    with pytest.raises(AssertionError):
        check("defaults:\n  - checkpoint: cheapest\n")
    with pytest.raises(yaml.YAMLError):
        check("a: [1\n")
