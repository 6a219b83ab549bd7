"""The examples as users start them: each in a new process and directory, with the Hydra plugin installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.support import compiled_once


class RunExample(Protocol):
    """Runs an example to its end and returns what it printed."""

    def __call__(self, name: str, *arguments: str, cwd: Path, code: int = 0) -> str:
        """Fail with the whole output unless the exit code is `code`."""


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Path:
    """A folder with the plugin, as an install makes it; an editable install may have an older copy or none."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "hydra_plugins").mkdir()
    shutil.copy(
        repo_root / "jaxckpt_train" / "integrations" / "hydra_search_path.py",
        folder / "hydra_plugins" / "jaxckpt_train_plugin.py",
    )
    return folder


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a shared compilation cache."""
    return compiled_once.environment(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="session")
def run_example(repo_root: Path, run_python: Any, plugin: Path, compiled: dict[str, str]) -> RunExample:
    """See RunExample. Warnings are errors in the example too."""
    # JAX writes its cache in place: a concurrent training may find half of a program, and then compiles it itself.
    half_written = "ignore:Error reading persistent compilation cache entry"
    variables = {"PYTHONWARNINGS": f"error,{half_written}", **compiled}

    def run(name: str, *arguments: str, cwd: Path, code: int = 0) -> str:
        cwd.mkdir(parents=True, exist_ok=True)
        script = repo_root / "examples" / name
        done: subprocess.CompletedProcess[str] = run_python(script, *arguments, cwd=cwd, path=[plugin], env=variables)
        assert done.returncode == code, f"{name} left with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
