"""What `jaxckpt` shows of a run with a fast tier."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.report.page import page_of
from jaxckpt_train.store.backends import local
from tests.support.commands import json_of, printed, run
from tests.support.report_runs import gathered_of


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that failed at step 17, and continued until step 18, with a step of its own on each tier."""
    folder = tmp_path_factory.mktemp("tiers")
    tier = {"directory": folder / "fast", "interval_steps": 2}
    for last in (17, 18):
        with jct.CheckpointCallback(
            folder / "slow", save_interval_steps=10, save_on_exit=False, fast_tier=tier
        ) as ckpt:
            state = ckpt.resume({"w": np.zeros(1000)})
            for step in ckpt.steps(19):
                if step == last:
                    break
                state = {"w": state["w"] + 1}
                ckpt(state, metrics={"loss": 1 / (step + 1)})
            ckpt.wait_until_finished()
    return folder


def test_report_shows_both_tiers(failed: Path) -> None:
    gathered = gathered_of(failed / "slow")
    assert {save.tier for save in gathered.saves} == {"fast"}
    assert [drain.step for drain in gathered.drains][:2] == [10, 16]
    assert {life.state for life in gathered.steps} == {"kept"}
    assert {life.step for life in gathered.steps} == {drain.step for drain in gathered.drains}
    assert [value.step for value in gathered.metrics["loss"]] == [*range(2, 19, 2)]
    (restore,) = gathered.restores
    assert (restore.step, restore.tier, restore.ahead_steps) == (16, "fast", 6)


def test_page_says_what_the_fast_tier_saved(failed: Path) -> None:
    page = page_of(gathered_of(failed / "slow"))
    assert "6 updates" in page
    assert "Copies to the run directory." in page


def test_ls_shows_the_tier_of_each_step(failed: Path) -> None:
    slow, fast = failed / "slow", failed / "fast"
    steps = json_of("ls", slow, "--fast-tier", fast)["steps"]
    assert [(each["step"], each["tier"]) for each in steps] == [(10, "slow"), (16, "both"), (18, "fast")]
    assert {each["tier"] for each in json_of("ls", slow)["steps"]} == {"slow"}
    assert "tier" not in printed("ls", slow)


def test_ls_shows_steps_of_this_run_alone(failed: Path, tmp_path: Path) -> None:
    tier = jct.FastTierSettings(directory=failed / "fast")
    with jct.StepManager(tmp_path / "other", fast_tier=tier) as manager:
        for step in (1, 2):
            assert manager.save(step, {"x": np.zeros(9)}, fast_only=True)
            manager.wait()
    (one, two) = json_of("ls", tmp_path / "other", "--fast-tier", failed / "fast")["steps"]
    assert (one["step"], one["tier"], two["step"], two["tier"], two["absent_files"]) == (1, "fast", 2, "fast", 0)
    assert len(json_of("ls", failed / "slow", "--fast-tier", failed / "fast")["steps"]) == 3


def test_ls_marks_what_a_roll_back_left_behind(tmp_path: Path) -> None:
    tier = jct.FastTierSettings(directory=tmp_path / "fast", keep=9)
    for steps, restored in (((1, 2, 3), None), ((3,), 1)):
        with jct.StepManager(tmp_path / "slow", fast_tier=tier) as manager:
            if restored is not None:
                manager.restore(step=restored)
            for step in steps:
                assert manager.save(step, {"x": np.full(9, step)}, fast_only=True)
                manager.wait()
    found = json_of("ls", tmp_path / "slow", "--fast-tier", tmp_path / "fast")["steps"]
    assert sorted((each["step"], each["current"]) for each in found) == [(1, True), (2, False), (3, False), (3, True)]


def test_ls_lists_the_run_directory_although_the_fast_tier_is_missing(failed: Path, tmp_path: Path) -> None:
    done = run("ls", failed / "slow", "--fast-tier", tmp_path / "none")
    assert (done.exit_code, str(tmp_path / "none") in done.stderr) == (3, True)
    found = json_of("ls", failed / "slow", "--fast-tier", tmp_path / "none", code=3)
    assert [(each["step"], each["tier"]) for each in found["steps"]] == [(10, "slow"), (16, "slow")]


@pytest.mark.parametrize("command", ["ls", "doctor"])
@pytest.mark.parametrize("directory", ["s3://bucket/fast", ""])
def test_fast_tier_of_a_command_is_a_directory_of_the_host(failed: Path, command: str, directory: str) -> None:
    size = ["--size-mib", 0] if command == "doctor" else []
    found = json_of(command, failed / "slow", "--fast-tier", directory, *size, code=2)
    assert found["error"] == "SettingsError"


def test_commands_name_the_option_for_the_fast_tier(failed: Path, tmp_path: Path) -> None:
    with jct.StepManager(tmp_path / "other") as manager:
        manager.save(1, {"x": np.zeros(9)}, force=True)
    tier = jct.FastTierSettings(directory=tmp_path / "fast")
    with jct.StepManager(tmp_path / "new", fast_tier=tier) as manager:
        manager.save(1, {"x": np.zeros(9)}, fast_only=True)
    for folder, arguments, has_hint in (
        (failed / "slow", [], True),
        (failed / "slow", ["--fast-tier", failed / "fast"], False),
        (tmp_path / "other", [], False),
        (tmp_path / "new", [], True),
    ):
        assert ("--fast-tier" in run("ls", folder, *arguments).stderr) == has_hint
        assert ("--fast-tier" in run("doctor", folder, "--size-mib", 0, *arguments).stdout) == has_hint


def test_doctor_examines_the_fast_tier(failed: Path) -> None:
    found = json_of("doctor", failed / "slow", "--fast-tier", failed / "fast", "--size-mib", 0)
    tier = found["fast_tier"]
    assert (found["warnings"], tier["steps"], tier["newest_step"]) == ([], [16, 18], 18)
    assert (found["at_risk"]["since"], found["at_risk"]["updates"]) == (18, 0)
    assert set(tier["operations"].values()) == {None}
    here = [
        sum(file.stat().st_size for file in step.rglob("*") if file.is_file()) for step in failed.glob("fast/*/step-*")
    ]
    assert tier["step_bytes"] == tier["needed_bytes"] == max(here)
    assert "16, 18" in printed("doctor", failed / "slow", "--fast-tier", failed / "fast", "--size-mib", 0)


def test_doctor_estimates_before_the_first_fast_step(failed: Path, tmp_path: Path) -> None:
    arguments = ("doctor", failed / "slow", "--fast-tier", tmp_path / "new", "--size-mib", 0)
    newest = json_of(*arguments)["run"]["newest_bytes"]
    for hosts, step_bytes in ((1, newest), (2, newest // 2 * 2), (8, newest // 8 * 2)):
        tier = json_of(*arguments, "--hosts", hosts)["fast_tier"]
        assert (tier["step_bytes"], tier["needed_bytes"]) == (step_bytes, 3 * step_bytes)


def test_doctor_warns_of_a_port_in_use(failed: Path) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        (warning,) = json_of("doctor", failed / "slow", "--port", port, "--size-mib", 0, code=1)["warnings"]
    assert str(port) in warning
    assert json_of("doctor", failed / "slow", "--port", port, "--size-mib", 0)["warnings"] == []


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "ext4"])
def test_doctor_warns_of_a_network_file_system(
    failed: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"1 1 0:1 / {failed}/fast rw - {kind} server:/disk rw\n")
    monkeypatch.setattr(local, "MOUNTS", str(mounts))
    arguments = ("doctor", failed / "slow", "--fast-tier", failed / "fast", "--size-mib", 0)
    found = json_of(*arguments, code=int(kind != "ext4"))
    assert found["fast_tier"]["file_system"]["kind"] == kind
    assert len(found["warnings"]) == (kind != "ext4")
