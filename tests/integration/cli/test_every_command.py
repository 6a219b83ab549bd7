"""Properties of every command of `jaxckpt`: what it imports, how it starts, and closed pipes."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.cli import __main__ as start
from tests.conftest import REPO_ROOT, RunPython
from tests.support.commands import CALLS
from tests.support.runs import made_run
from tests.support.same_trees import raw

GOLDEN = REPO_ROOT / "tests" / "golden"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and a checkpoint with enough leaves to fill a pipe with their names."""
    folder = tmp_path_factory.mktemp("some")
    made_run(folder / "run", 1, 2, 3)
    jct.save(folder / "many", {f"leaf-{number:05d}": np.zeros(1) for number in range(3000)})
    return folder


PROGRAM = """
import json, sys
from jaxckpt_train.cli.main import main
try:
    main()
except SystemExit as ended:
    print("\\n" + json.dumps([ended.code, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def test_each_command_imports_only_its_module(directory: Path, run_python: RunPython) -> None:
    program = PROGRAM.replace('{name.partition(".")[0] for name in sys.modules}', "sys.modules")
    done = run_python(program, "ls", "run", cwd=directory, check=True, fresh=True)
    modules = set(json.loads(done.stdout.splitlines()[-1])[1])
    assert "jaxckpt_train.cli.inspect" in modules
    assert not {"jaxckpt_train.cli.maintain", "jaxckpt_train.transforms", "jaxckpt_train.formats.detect"} & modules
    done = run_python(program, "--help", cwd=directory, check=True, fresh=True)
    modules = set(json.loads(done.stdout.splitlines()[-1])[1])
    assert "jaxckpt_train.cli.main" in modules
    assert not {"jaxckpt_train.cli.inspect", "numpy"} & modules


IN_ORDER = """
import json, sys
from jaxckpt_train.cli.main import main
for name, arguments in json.loads(sys.argv[1]).items():
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, name
    loaded = {"jax", "jaxlib", "flax", "tensorstore", "orbax", "grain"} & sys.modules.keys()
    assert not loaded, (name, loaded)
"""


def test_no_command_imports_jax(directory: Path, run_python: RunPython) -> None:
    run_python(IN_ORDER, json.dumps(CALLS), cwd=directory, check=True, fresh=True)


WITHOUT_JAX = """
import json, sys
for name in ("jax", "jaxlib", "flax", "orbax"):
    sys.modules[name] = None  # as where it is not installed
from jaxckpt_train.cli.main import main
codes = []
for sys.argv[1:] in json.loads(sys.argv[1]):
    try:
        main()
    except SystemExit as ended:
        codes.append(ended.code or 0)
print("\\n" + json.dumps(codes))
"""


def test_format_commands_work_without_jax(directory: Path, run_python: RunPython) -> None:
    """Checkpoints of Orbax are read and written by TensorStore alone."""
    golden = str(GOLDEN / "orbax" / "0.11.40" / "default" / "saved")
    calls = [
        ["export", "run", "hf", "--to", "safetensors", "--step", "3"],
        ["export", "run", "orbax/3", "--to", "orbax", "--step", "3"],
        ["import", "hf", "from-hf", "--op", "nest"],
        ["import", "orbax", "from-orbax", "--step", "3"],
        ["import", golden, "from-golden"],
        *([command, path] for command in ("show", "stats") for path in ("hf", "orbax/3", golden)),
        ["diff", "run", "orbax", "--step-a", "3", "--step-b", "3"],
        ["diff", "hf", "hf"],
        ["report", "run"],
    ]
    done = run_python(WITHOUT_JAX, json.dumps(calls), cwd=directory, check=True, fresh=True)
    codes = json.loads(done.stdout.splitlines()[-1])
    assert [(code, call) for code, call in zip(codes, calls, strict=True) if code] == [], done.stderr
    states = [jct.load(directory / name)["w"] for name in ("orbax/3", "from-orbax", "from-hf")]
    assert [raw(each) for each in states] == [raw(jct.load(directory / "run" / "step-0000000003")["w"])] * 3


@pytest.mark.parametrize(
    "arguments", [["ls", "run"], ["show", "many"], ["show", "many", "--json"], ["--help"]], ids=" ".join
)
def test_closed_pipe_gives_no_traceback(directory: Path, arguments: list[str]) -> None:
    """`head` closes its pipe early; a pipe may even be closed before anything is printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxckpt_train.cli", *arguments],
        cwd=directory,
        env={"PYTHONPATH": str(REPO_ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=60), errors) == (0, b"")


def test_undecodable_names_are_printed_as_ascii(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path / "run-") + b"\xff"
    made_run(Path(os.fsdecode(folder)), 1)
    for arguments in (["show", folder], ["stats", folder], ["ls", folder], ["verify", folder], ["ls", folder + b"-"]):
        done = subprocess.run(
            [sys.executable, "-m", "jaxckpt_train.cli", *arguments],
            env={"PYTHONPATH": str(REPO_ROOT), "PYTHONIOENCODING": "ascii"},
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert b"Traceback" not in done.stderr, done.stderr.decode()
        assert done.returncode == (3 if arguments[1] != folder else 0)
        assert b"\\udcff" in done.stdout + done.stderr or arguments[0] in ("stats", "ls")


def test_script_is_installed_and_is_same_as_module(directory: Path, run_python: RunPython) -> None:
    project = tomllib.loads((REPO_ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["jaxckpt"].partition(":")
    assert getattr(importlib.import_module(module), name) is start.main
    done = run_python(
        "import runpy; runpy.run_module('jaxckpt_train.cli', run_name='__main__')",
        "ls",
        "run",
        cwd=directory,
        fresh=True,
    )
    assert (done.returncode, done.stdout.splitlines()[0].split()) == (0, ["step", "size", "age", "state"])
