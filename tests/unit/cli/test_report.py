"""`jaxckpt report`: the page, the data as JSON, what it refuses, and how it ends."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import jaxckpt_train as jct
from jaxckpt_train.cli.main import app
from jaxckpt_train.report.page import MARK
from tests.support.commands import all_commands
from tests.support.report_runs import write_history
from tests.support.runs import Counter, made_run, state_of, step_path, truncate_the_manifest


def report(*arguments: object) -> tuple[int, str, str]:
    """Return the exit code of `jaxckpt report`, and what it prints to both outputs."""
    return invoked("report", *arguments)


def invoked(*arguments: object) -> tuple[int, str, str]:
    """Return the same for any command."""
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def test_page_is_written_and_size_printed(tmp_path: Path) -> None:
    run, page = made_run(tmp_path / "run", 1, 2), tmp_path / "page.html"
    code, out, error = report(run, "-o", page)
    assert (code, error) == (0, "")
    assert out == f"{page}: {page.stat().st_size / (1 << 20):.1f} MiB\n"
    assert page.read_text().startswith(MARK)
    assert "step-0000000002" in page.read_text()


def test_page_is_written_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path / "run", 1)
    monkeypatch.chdir(tmp_path)
    assert report(run)[0] == 0
    assert (tmp_path / "report.html").read_text().startswith(MARK)
    assert report(run)[0] == 0  # again


def test_json_is_data_and_no_page_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path / "run", 1, 2)
    monkeypatch.chdir(tmp_path)
    code, out, _ = report(run, "--json")
    found = json.loads(out)
    assert code == 0
    assert [step["step"] for step in found["steps"]] == [1, 2]
    assert [save["ok"] for save in found["saves"]] == [True, True]
    assert [(pair["before"], pair["after"]) for pair in found["changes"]["pairs"]] == [(1, 2)]
    assert list(tmp_path.iterdir()) == [run]


def test_sizes_match_ls_for_deleted_steps_too(tmp_path: Path) -> None:
    sizes = {}
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(2)) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"state": state_of(step), "data": Counter()})
            manager.wait()
            sizes[step] = sum(file.stat().st_size for file in step_path(tmp_path, step).glob("*/*"))
    found, listed = json.loads(report(tmp_path, "--json")[1]), json.loads(invoked("ls", tmp_path, "--json")[1])
    assert {step["step"]: (step["state"], step["bytes"]) for step in found["steps"]} == {
        1: ("deleted", sizes[1]), 2: ("kept", sizes[2]), 3: ("kept", sizes[3])
    }  # fmt: skip
    assert {step["step"]: step["bytes"] for step in listed["steps"]} == {2: sizes[2], 3: sizes[3]}
    assert [save["bytes"] for save in found["saves"]] == [*sizes.values()]
    assert found["disk_use"][-1]["bytes"] == sizes[2] + sizes[3]


def test_json_and_page_may_be_combined(tmp_path: Path) -> None:
    run, page = made_run(tmp_path / "run", 1), tmp_path / "page.html"
    code, out, _ = report(run, "--json", "-o", page)
    assert (code, json.loads(out)["run"]) == (0, str(run))
    assert page.read_text().startswith(MARK)


def test_changes_option_limits_the_pairs(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", *range(1, 9))
    for wanted, found in (("0", 0), ("2", 2), ("7", 7), ("99", 7)):
        changes = json.loads(report(run, "--json", "--changes", wanted)[1])["changes"]
        assert len(changes["pairs"]) == found
        assert bool(changes["left_out"]) == (found < 7)
    assert report(run, "--changes", "-1")[0] == 2


def test_damaged_step_does_not_stop_the_page(tmp_path: Path) -> None:
    run, page = made_run(tmp_path / "run", 1, 2), tmp_path / "page.html"
    step = step_path(run, 2)
    truncate_the_manifest(step)
    code, _, error = report(run, "-o", page)
    assert code == 1
    assert error.startswith(f"jaxckpt: {step.name}: ")
    assert error.count("\n") == 1
    assert page.read_text().startswith(MARK)
    code, out, error = report(run, "--json")
    assert (code, error) == (1, "")
    assert json.loads(out)["steps"][1]["state"] == "damaged"


def test_run_with_empty_history_has_a_page(tmp_path: Path) -> None:
    run, page = write_history(tmp_path / "run"), tmp_path / "page.html"
    assert report(run, "-o", page)[0] == 0
    assert "The history has no events yet." in page.read_text()


@pytest.mark.parametrize("as_json", [True, False])
def test_path_without_a_run_exits_with_3(tmp_path: Path, as_json: bool) -> None:
    (tmp_path / "nothing").mkdir()
    code, out, error = report(tmp_path / "nothing", "-o", tmp_path / "page.html", *(["--json"] if as_json else []))
    assert code == 3
    message = json.loads(out)["message"] if as_json else error.removeprefix("jaxckpt: ").rstrip("\n")
    assert message.startswith(f"{tmp_path / 'nothing'}: expected the directory of a run")
    assert "\n" not in message
    assert not (tmp_path / "page.html").exists()


def test_other_file_is_not_replaced(tmp_path: Path) -> None:
    run, page = made_run(tmp_path / "run", 1), tmp_path / "weights.safetensors"
    page.write_bytes(b"precious")
    code, _, error = report(run, "-o", page)
    assert (code, page.read_bytes()) == (4, b"precious")
    assert error.startswith(f"jaxckpt: {page}: ")
    assert "found another file" in error
    assert error.count("\n") == 1


def test_missing_directory_of_page_exits_with_4(tmp_path: Path) -> None:
    code, _, error = report(made_run(tmp_path / "run", 1), "-o", tmp_path / "none" / "page.html")
    assert code == 4
    assert "No such file" in error


def test_all_options_and_keys_are_documented(tmp_path: Path, repo_root: Path) -> None:
    page = (repo_root / "docs" / "how-to" / "report.md").read_text()
    options = page.partition("## Options")[2].partition("## ")[0]
    assert set(re.findall(r"^\| `.*?(--[a-z-]+)` \|", options, re.MULTILINE)) == {
        option for each in all_commands()["report"].params for option in each.opts if "--" in option
    }  # fmt: skip
    keys = set(
        re.findall(r"`([a-z_]+)`", "".join(re.findall(r"^\| (`[^|]+) \|", page.partition("## The data")[2], re.M)))
    )
    assert keys == set(json.loads(report(made_run(tmp_path, 1), "--json")[1]))
