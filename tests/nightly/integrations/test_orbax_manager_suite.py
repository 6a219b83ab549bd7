"""Orbax's own tests of its manager: the script that runs them, and a run if their file is available."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.nightly.integrations.orbax_manager_suite import find_file, reason_of
from tests.support.paths import REPO_ROOT

COMMAND = [sys.executable, "-m", "tests.nightly.integrations.orbax_manager_suite"]
ROOT = REPO_ROOT
TESTS = """
from absl.testing import parameterized
from orbax.checkpoint import args, checkpoint_manager
from orbax.checkpoint._src.testing import multiprocess_test
from jaxckpt_train.integrations import orbax_manager


class CheckpointManagerTest(parameterized.TestCase, multiprocess_test.MultiProcessTest):
  @parameterized.parameters((1,), (2.5,))
  def test_saves(self, value):
    with checkpoint_manager.CheckpointManager(self.multiprocess_create_tempdir(name='a')) as manager:
      if issubclass(checkpoint_manager.CheckpointManager, orbax_manager.CheckpointManager):
        self.assertTrue(manager.save(1, args=args.StandardSave({'n': value})))
        self.assertEqual(manager.restore(1), {'n': value})

  def test_refusals(self):
    with checkpoint_manager.CheckpointManager(self.multiprocess_create_tempdir(name='c')) as manager:
      with self.assertRaisesRegex(FileNotFoundError, 'a sentence that only Orbax has'):
        manager.restore(3)
      self.assertIsNone(manager._default_item.get())
      self.assertEmpty(manager._checkpoints)
      with self.assertRaises(ValueError):
        manager._root_metadata_file_path()

  def test_privates(self):
    manager = checkpoint_manager.CheckpointManager(self.multiprocess_create_tempdir(name='b'))
    manager._checkpointer
"""


def test_script_counts_results_and_reasons(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint_manager_test.py"
    file.write_text(TESTS)
    done = subprocess.run([*COMMAND, file], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.stdout.splitlines()[-1].startswith("4 tests: {'failed': 1, 'passed': 3}"), done.stderr
    assert "'privates of Orbax': 1" in done.stdout
    assert done.returncode == 1


def test_script_skips_without_the_file(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, tmp_path / "none.py"], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout.split(":")[0]) == (77, "SKIP")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("manager._checkpointer", "privates of Orbax"),
        ("atomicity.COMMIT_SUCCESS_FILE", "files of Orbax"),
        ("", "other"),
    ],
)
def test_reason_is_found_in_text_of_test(text: str, reason: str) -> None:
    assert reason_of(text) == reason


@pytest.mark.timeout(2000)
def test_enough_tests_of_orbax_pass(run_python: Any) -> None:
    path = find_file(None)
    if path is None:
        pytest.skip("the installed Orbax has no checkpoint_manager_test.py")
    subprocess.run([*COMMAND, path], cwd=ROOT, check=True, timeout=1900)
