"""Targets of a proof: functions, modules and scripts run in a new process."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxckpt_train.testing.processes import FunctionTarget, Target, target_of


def at_the_top(directory: Path, word: str = "default") -> None:
    """A target at the top level."""
    (directory / "ran.txt").write_text(f"{word} {__name__}")


class Holder:
    """A class with a target."""

    @staticmethod
    def inside(directory: Path) -> None:
        at_the_top(directory, "inside")


RUN = """
import json, sys
import msgspec
from pathlib import Path
from jaxckpt_train.testing import processes
target = msgspec.json.decode(sys.argv[1], type=processes.Target)
processes.run(target, Path(sys.argv[2]))
"""


def ran(target: Target, directory: Path, run_python: Any, **more: Any) -> subprocess.CompletedProcess[str]:
    done: subprocess.CompletedProcess[str] = run_python(
        RUN, msgspec.json.encode(target).decode(), directory, check=True, **more
    )
    return done


def test_function_of_test_module_runs_elsewhere(run_python: Any, tmp_path: Path) -> None:
    ran(target_of(at_the_top), tmp_path, run_python)
    assert (tmp_path / "ran.txt").read_text() == f"default {__name__}"


def test_arguments_follow_the_directory(run_python: Any, tmp_path: Path) -> None:
    ran(target_of(functools.partial(at_the_top, word="given")), tmp_path, run_python)
    assert (tmp_path / "ran.txt").read_text().startswith("given ")


def test_a_function_in_a_class_is_found(run_python: Any, tmp_path: Path) -> None:
    ran(target_of(Holder.inside), tmp_path, run_python)
    assert (tmp_path / "ran.txt").read_text().startswith("inside ")


@pytest.mark.parametrize("name", ["not_on_the_path", "json", "__main__"])
def test_module_is_found_by_its_file(name: str, run_python: Any, tmp_path: Path) -> None:
    file = tmp_path / "test_somewhere.py"
    file.write_text("def train(directory):\n    print(__name__, directory.name)\nif __name__ == '__main__': 1 / 0\n")
    done = ran(FunctionTarget(str(file), name, "train", {}), tmp_path, run_python)
    assert done.stdout.split() == ["__mp_main__" if name == "__main__" else name, tmp_path.name]


def test_script_gets_arguments_and_imports_neighbours(
    run_python: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "helper.py").write_text("import json, sys\ndef show(name): print(json.dumps([name, sys.argv[1:]]))\n")
    (tmp_path / "script.py").write_text("import helper\nhelper.show(__name__)\n")
    monkeypatch.chdir(tmp_path)
    for command in (["script.py"], [sys.executable, "script.py"], ["python", "script.py"], ["-m", "script"]):
        target = target_of([*command, "--to={directory}/a", "b"])
        done = ran(target, Path("/somewhere"), run_python, cwd=tmp_path)
        assert json.loads(done.stdout) == ["__main__", ["--to=/somewhere/a", "b"]]
