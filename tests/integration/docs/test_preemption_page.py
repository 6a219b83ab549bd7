"""The files that docs/how-to/preemption.md gives to be copied: they fit the presets, and they work."""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import jaxckpt_train as jct
from jaxckpt_train.config import callback_arguments
from tests.conftest import REPO_ROOT
from tests.support.cluster_programs import PATH, can_be_process_1, in_a_container, in_slurm_job, put_on_path

PAGE = REPO_ROOT / "docs" / "how-to" / "preemption.md"
TRAIN = """
import threading
import hydra
import numpy as np
import jaxckpt_train as jct

@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(cfg):
    pause = threading.Event()
    with jct.CheckpointCallback.from_config(cfg.checkpoint) as ckpt:
        state = ckpt.resume({"w": np.zeros(1000)})
        print("resumed", ckpt.completed_steps, flush=True)
        for step in ckpt.steps(ckpt.completed_steps + 5 if ckpt.completed_steps else 10**9):
            pause.wait(0.001)  # an update
            state = {"w": state["w"] + 1}
            ckpt(state)
            if step == 3:
                print("training", flush=True)

main()
"""


def block(language: str, part: str) -> str:
    """The one block of this language that has this in it."""
    found = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL) if part in text]
    assert len(found) == 1
    return str(found[0])


def preset(name: str) -> dict[str, Any]:
    """A preset without Hydra, which would only add defaults."""
    node = yaml.safe_load((REPO_ROOT / "configs" / "checkpoint" / f"{name}.yaml").read_text())
    return callback_arguments({key: value for key, value in node.items() if key != "defaults"})


def job() -> Any:
    return yaml.safe_load(block("yaml", "kind: Job"))


def test_the_job_of_kubernetes_fits_its_preset() -> None:
    spec, arguments = job()["spec"], preset("kubernetes")
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    codes, disruptions = spec["podFailurePolicy"]["rules"]
    assert codes == {
        "action": "Ignore",
        "onExitCodes": {"containerName": container["name"], "operator": "In", "values": [arguments["exit_code"]]},
    }
    assert disruptions == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    assert spec["podReplacementPolicy"] == "Failed"
    assert pod["restartPolicy"] == "Never"
    assert arguments["grace_period_s"] + 5 <= pod["terminationGracePeriodSeconds"]
    assert "SIGTERM" in arguments["signals"]
    assert container["command"][0] == "python", "no shell is process 1"
    assert container["args"][0] == "checkpoint=kubernetes"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert container["args"][1].startswith(f"checkpoint.directory={mounts['checkpoints']}/")
    assert [volume["name"] for volume in pod["volumes"]] == list(mounts)


def test_the_script_of_slurm_fits_its_preset() -> None:
    script, arguments = block("bash", "#SBATCH"), preset("slurm")
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", script, re.MULTILINE))
    name, _, seconds = options["signal"].partition("@")
    assert f"SIG{name}" in arguments["signals"]
    assert arguments["grace_period_s"] + 30 <= int(seconds)
    assert "requeue" in options
    assert [type(source) for source in arguments["notices"]] == [jct.SlurmNotice]


def test_the_service_of_systemd_fits_its_preset() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # as they are written
    unit.read_string(block("ini", "[Service]"))
    service, arguments = unit["Service"], preset("gce")
    assert service["RestartPreventExitStatus"] == str(arguments["exit_code"])
    assert float(service["TimeoutStopSec"]) >= arguments["grace_period_s"]
    assert "checkpoint=gce" in shlex.split(service["ExecStart"])
    assert preset("aws")["grace_period_s"] < 120


def test_the_table_has_what_the_presets_say() -> None:
    rows = re.findall(r"`checkpoint=(\w+)` \|.*\| (\d+) \|$", PAGE.read_text(), re.MULTILINE)
    assert sorted(name for name, _ in rows) == ["aws", "gce", "kubernetes", "preemptible", "slurm"]
    for name, grace_s in rows:
        assert preset(name)["grace_period_s"] == float(grace_s), name
        assert preset(name)["exit_code"] == 75, name


def test_yaml_with_arguments_is_accepted() -> None:
    config = yaml.safe_load(block("yaml", "poll_s"))["checkpoint"]
    assert [type(source) for source in callback_arguments(config)["notices"]] == [jct.SlurmNotice, jct.GceNotice]


def test_custom_notice_source_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    used: dict[str, Any] = {"__name__": "page"}
    exec(block("python", "class Budget"), used)
    budget = used["Budget"](100, 30)
    assert budget.notice() is None
    budget.ends_at = time.monotonic()
    assert budget.notice() == "the budget"
    assert [*used["ckpt"]._shutdown._sources.notices()] == []


@contextlib.contextmanager
def started(tmp_path: Path, command: list[str], **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Write `train.py`, and run a command in its directory with the presets of this checkout."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "conf").mkdir(exist_ok=True)
    (tmp_path / "conf" / "train.yaml").write_text("defaults:\n  - checkpoint: default\n  - _self_\n")
    plugins = tmp_path / "plugins" / "hydra_plugins"
    plugins.mkdir(parents=True, exist_ok=True)
    (plugins / "jaxckpt_train_plugin.py").write_text(
        (REPO_ROOT / "jaxckpt_train" / "integrations" / "hydra_search_path.py").read_text()
    )
    path = f"{tmp_path / 'plugins'}:{REPO_ROOT}"
    environment = {**os.environ, "PYTHONPATH": path, "JAX_NUM_CPU_DEVICES": "1", **variables}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True, **pipes)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):  # no process is left
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def left_with(process: subprocess.Popen[str], directory: Path, code: int = 75) -> tuple[int, str]:
    """Check that the process saved one whole step, and return the step and its log."""
    log = "\n".join(process.communicate(timeout=60))
    assert process.returncode == code, log
    (path,) = directory.glob("step-*")
    step = int(path.name.removeprefix("step-"))
    assert jct.load(path)["w"].tobytes() == np.full(1000, float(step)).tobytes()
    return step, log


def line(process: subprocess.Popen[str]) -> str:
    """Return the next line of its output that is none of Hydra's log."""
    assert process.stdout is not None
    found = "["
    while found.startswith("["):
        found = process.stdout.readline().strip()
    assert found, process.communicate(timeout=60)[1]
    return found


SRUN = 'echo $$ > $LOG; exec "$@"'
# Slurm ends the rest of the job once it is requeued. The script records its arguments, and the steps and locks by then.
SCONTROL = """
echo "$@" >> $LOG; ls checkpoints/train | grep step- >> $LOG; ls -a checkpoints/train | grep -c owner >> $LOG
(while kill -TERM $PPID; do sleep 0.002; done) >/dev/null 2>&1 &
"""


def test_slurm_script_requeues_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    srun = put_on_path(tmp_path / "bin", "srun", SRUN, monkeypatch)
    scontrol = put_on_path(tmp_path / "bin", "scontrol", SCONTROL, monkeypatch)
    in_slurm_job(monkeypatch)
    (tmp_path / "train.sbatch").write_text(block("bash", "#SBATCH"))
    variables = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NAME": "train"}
    command, directory = ["bash", "train.sbatch"], tmp_path / "checkpoints" / "train"
    with started(tmp_path, command, **variables) as process:
        assert (line(process), line(process)) == ("resumed 0", "training")
        asked_at = time.monotonic()
        os.kill(int(srun.read_text()), signal.SIGUSR1)  # of --signal=USR1@120
        step, log = left_with(process, directory)
        assert time.monotonic() - asked_at < 90
    assert scontrol.read_text() == f"requeue Incomplete 1234\nstep-{step:010d}\n0\n"
    assert re.search(rf"requeue job 1234.* from step {step}\b", log)
    with started(tmp_path, command, SLURM_RESTART_COUNT="1", **variables) as process:
        assert line(process) == f"resumed {step}"
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert jct.StepManager(directory).steps == [step, step + 5]


@pytest.mark.skipif(not can_be_process_1(), reason="a name space of processes needs root, on Linux")
def test_kubernetes_command_exits_as_process_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", PATH)
    (container,) = job()["spec"]["template"]["spec"]["containers"]
    arguments = [each.replace("/checkpoints/", f"{tmp_path}/") for each in container["args"]]
    with started(
        tmp_path, in_a_container(*container["command"], *arguments), KUBERNETES_SERVICE_HOST="10.0.0.1"
    ) as process:
        assert (line(process), line(process)) == ("resumed 0", "training")
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        asked_at = time.monotonic()
        os.kill(int(child), signal.SIGTERM)
        _, log = left_with(process, tmp_path / "train")
        assert time.monotonic() - asked_at < 25
    assert "KubernetesNotice" not in log
    events = [json.loads(each) for each in (tmp_path / "train" / "history.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events[-2:]] == ["preempted", "end"]
    assert events[-2]["reason"] == "signal SIGTERM"
