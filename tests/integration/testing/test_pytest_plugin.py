"""The pytest plugin: its fixture proves loops of test files, and it imports little."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TEST_FILE = """
import sys
import jaxckpt_train as jct

def train(directory, updates=3):
    with jct.CheckpointCallback(directory, save_interval_steps=1) as ckpt:
        count = ckpt.resume({"count": 0})
        for _ in ckpt.steps(updates):
            count = {"count": count["count"] + 1}
            ckpt(count)

def test_it_resumes(resume_proof):
    assert resume_proof(train, kill_at=2).resumed_at == (1,)
    assert "jax" not in sys.modules

def test_it_is_long_enough(resume_proof):
    resume_proof(train, kill_at=4)
"""


def test_fixture_proves_loop_of_test_file(run_python: Any, tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "deeper"
    folder.mkdir(parents=True)
    (folder / "test_loop.py").write_text(TEST_FILE)
    more = ["-p", "no:cacheprovider", "-p", "jaxckpt_train.pytest_plugin", "--import-mode=importlib"]
    program = "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
    # Without installed plugins: this plugin may be installed, and it cannot be registered twice.
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = run_python(
        program, "-q", *more, f"--basetemp={tmp_path / 'temp'}", tmp_path, cwd=tmp_path, env=alone, fresh=True
    )
    assert done.stdout.splitlines()[-1].startswith("1 failed, 1 passed"), done.stdout
    assert (
        "E       jaxckpt_train.testing.resume_proof.ResumeNotProvenError: the interrupted run, process 1" in done.stdout
    )
    assert "resume_proof(train, kill_at=4)" in done.stdout
    assert "testing/resume_proof.py" not in done.stdout  # the traceback ends at the line of the test
    left = {file.name for file in (tmp_path / "temp").glob("*/resume-proof-1/interrupted/*")}
    assert left == {"process-1", "run"}  # of the failed test


def test_plugin_imports_little(run_python: Any) -> None:
    program = """
import pytest, sys, json
before = set(sys.modules)
import jaxckpt_train.pytest_plugin
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    loaded = json.loads(run_python(program, check=True, fresh=True).stdout)
    assert [name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names] == [
        "jaxckpt_train",
        "jaxckpt_train.pytest_plugin",
    ]
