"""The files for contributors agree with the project: versions, make targets and paths exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture(scope="module")
def project(repo_root: Path) -> dict[str, Any]:
    return tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]


def workflow(repo_root: Path, name: str) -> dict[str, Any]:
    return yaml.safe_load((repo_root / ".github/workflows" / f"{name}.yml").read_text())


def test_tested_pythons_are_those_of_the_classifiers(repo_root: Path, project) -> None:
    prefix = "Programming Language :: Python :: "
    classified = [each.removeprefix(prefix) for each in project["classifiers"] if each.startswith(f"{prefix}3.")]
    matrix = workflow(repo_root, "test")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == classified
    assert project["requires-python"] == f">={classified[0]}"


def test_citation_has_the_version_of_the_package(repo_root: Path, project) -> None:
    citation = yaml.safe_load((repo_root / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


@pytest.mark.parametrize(
    "pattern", [".github/workflows/*.yml", ".github/*.md", ".pre-commit-config.yaml", "CONTRIBUTING.md", "SECURITY.md"]
)
def test_make_targets_exist(repo_root: Path, pattern: str) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (repo_root / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join(file.read_text() for file in sorted(repo_root.glob(pattern)))
    calls = re.findall(r"(?:run: |entry: |`|^)make((?: --?[a-z-]+| [a-z][a-z-]*)+)", text, re.MULTILINE)
    called = {word for call in calls for word in call.split() if not word.startswith("-")}
    assert called
    assert called - targets == set()


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", ".github/pull_request_template.md"])
def test_named_paths_exist(repo_root: Path, name: str) -> None:
    text = (repo_root / name).read_text()
    paths = {*re.findall(r"`([\w.-]+/[\w./-]*)`", text), *re.findall(r"\]\(([\w./-]+)\)", text)}
    assert [path for path in sorted(paths) if not (repo_root / path).exists()] == []


def test_hooks_download_nothing(repo_root: Path) -> None:
    config = yaml.safe_load((repo_root / ".pre-commit-config.yaml").read_text())
    assert [repository["repo"] for repository in config["repos"]] == ["local"]
    assert {hook["language"] for repository in config["repos"] for hook in repository["hooks"]} == {"system"}


def test_bug_report_asks_for_a_command_that_works(repo_root: Path, tmp_path: Path) -> None:
    text = (repo_root / ".github/ISSUE_TEMPLATE/bug_report.yml").read_text()
    (arguments,) = re.findall(r"label: \"Output of `jaxckpt (.+) RUN`\"", text)
    command = [sys.executable, "-m", "jaxckpt_train.cli", *arguments.split(), str(tmp_path), "--size-mib", "0"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert {"python", "jax", "jaxckpt-train"} <= json.loads(found.stdout)["versions"].keys()
