"""`jaxckpt report`: which libraries it imports, and what it says where one is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import RunPython
from tests.support.runs import made_run


@pytest.mark.parametrize("package", ["bokeh", "jinja2"])
def test_page_without_its_packages_names_the_extra(tmp_path: Path, run_python: RunPython, package: str) -> None:
    run = made_run(tmp_path / "run", 1)
    program = f"""
import sys
sys.modules["{package}"] = None  # as where it is not installed
from jaxckpt_train.cli.main import main
main()
"""
    done = run_python(program, "report", run, "-o", tmp_path / "page.html", fresh=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"jaxckpt: report: a page needs the package {package}: ")
    assert "pip install 'jaxckpt-train[report]'" in done.stderr
    done = run_python(program, "report", run, "--json", check=True, fresh=True)
    assert json.loads(done.stdout)["run"] == str(run)


def test_json_report_imports_no_library_of_the_page(tmp_path: Path, run_python: RunPython) -> None:
    run = made_run(tmp_path / "run", 1, 2)
    program = """
import sys
from jaxckpt_train.cli.main import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    assert end.code == 0, end.code
print(sorted({"jax", "bokeh", "jinja2"} & {name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""
    assert run_python(program, "report", run, "--json", check=True, fresh=True).stderr == "[]\n"
    done = run_python(program, "report", run, "-o", tmp_path / "a.html", check=True, fresh=True)
    assert done.stderr == "['bokeh', 'jinja2']\n"
