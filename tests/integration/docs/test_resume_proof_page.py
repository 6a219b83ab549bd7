"""The test of docs/how-to/resume-proof.md passes unchanged, and a failure looks as the page says."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

from jaxckpt_train.testing import ResumeNotExactError
from tests.support.in_one_process import prove_here
from tests.support.training_loops import train_with_key


def block(repo_root: Path, language: str) -> str:
    page = (repo_root / "docs" / "how-to" / "resume-proof.md").read_text()
    (found,) = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
    return str(found)


@pytest.mark.nightly  # tests/integration/testing/test_resume_proof.py proves other loops
def test_the_example_is_a_test_that_passes(repo_root: Path, run_python: Any, tmp_path: Path) -> None:
    (tmp_path / "test_example.py").write_text(block(repo_root, "python"))
    program = "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
    plugins = ["-p", "no:cacheprovider", "-p", "jaxckpt_train.pytest_plugin"]
    env = {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    done = run_python(program, "-q", *plugins, f"--basetemp={tmp_path / 'temp'}", tmp_path, cwd=tmp_path, env=env)
    assert done.stdout.splitlines()[-1].startswith("1 passed"), done.stdout


def test_page_shows_a_real_failure(repo_root: Path, tmp_path: Path) -> None:
    with pytest.raises(ResumeNotExactError) as caught:
        prove_here(functools.partial(train_with_key, kept=False), tmp_path / "proof", 5)
    assert str(caught.value).startswith(block(repo_root, "text"))
