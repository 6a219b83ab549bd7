"""`jaxckpt report`: the page, the data as JSON, what it refuses, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from jaxckpt_train.cli.main import app
from tests.conftest import RunPython
from tests.support.runs import made_run


def report(*arguments: object) -> tuple[int, str, str]:
    """The exit code of the command, and what it prints to both outputs."""
    return invoked("report", *arguments)


def invoked(*arguments: object) -> tuple[int, str, str]:
    """The same of any command."""
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def test_without_the_library_it_says_what_to_install_and_json_works(tmp_path: Path, run_python: RunPython) -> None:
    run = made_run(tmp_path / "run", 1)
    program = """
import sys
sys.modules["bokeh"] = None  # as where it is not installed
from jaxckpt_train.cli.main import main
main()
"""
    done = run_python(program, "report", run, "-o", tmp_path / "page.html", fresh=True)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "jaxckpt: report: a page needs the package bokeh: pip install 'jaxckpt-train[report]'"
    )
    done = run_python(program, "report", run, "--json", check=True, fresh=True)
    assert json.loads(done.stdout)["run"] == str(run)


def test_neither_jax_nor_for_json_library_is_imported(tmp_path: Path, run_python: RunPython) -> None:
    run = made_run(tmp_path / "run", 1, 2)
    program = """
import sys
from jaxckpt_train.cli.main import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    assert end.code == 0, end.code
print(sorted({"jax", "bokeh"} & {name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""
    assert run_python(program, "report", run, "--json", check=True, fresh=True).stderr == "[]\n"
    assert run_python(program, "report", run, "-o", tmp_path / "a.html", check=True, fresh=True).stderr == "['bokeh']\n"
