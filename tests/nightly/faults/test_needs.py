"""A campaign that cannot run on a machine prints the reason, and exits with the code for a skip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPO_ROOT
from tests.nightly.faults import fuse_disk, loop_disk
from tests.nightly.faults.needs import SKIPPED, why_no_compiler, why_no_mount

pytestmark = pytest.mark.timeout(120)
NO_RIGHTS = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-all"]  # root without the right to mount
NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]


def campaign(name: str, *arguments: str, before: list[str] | None = None, path: str | None = None) -> tuple[int, str]:
    """Run a campaign with `before` in front of its command; return its exit code and its output."""
    variables = {**os.environ, "PYTHONPATH": str(REPO_ROOT), "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
    variables |= {} if path is None else {"PATH": path}
    command = [*(before or []), sys.executable, "-m", f"tests.nightly.faults.{name}", *arguments]
    done = subprocess.run(command, env=variables, cwd=REPO_ROOT, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def set_privileges(before: list[str]) -> list[str]:
    """Return the command, or skip if this process cannot set privileges."""
    if (
        shutil.which("setpriv") is None
        or subprocess.run([*before, sys.executable, "-c", ""], check=False).returncode != 0
    ):
        pytest.skip("cannot drop privileges here")
    return [str(shutil.which(before[0])), *before[1:]]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Yield a folder with permissions for all users."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("native_calls", "a C compiler"), ("deadline", "to mount"), ("soak", "to mount")],
)
def test_campaign_without_tools_is_skipped(tmp_path: Path, name: str, reason: str) -> None:
    before = [] if name == "native_calls" else set_privileges(NO_RIGHTS)
    code, said = campaign(name, before=before, path=str(tmp_path))
    assert code == SKIPPED
    assert said.startswith("SKIP: needs ")
    assert reason in said


@pytest.mark.parametrize("name", ["deadline", "soak"])
@pytest.mark.parametrize("rights", [NO_RIGHTS, NOBODY], ids=["root without rights", "nobody"])
def test_fuse_campaign_without_mount_rights_is_skipped(name: str, rights: list[str]) -> None:
    code, said = campaign(name, before=set_privileges(rights))
    assert code == SKIPPED
    assert said.startswith("SKIP: needs ")


def test_disk_limits_without_mount_rights_are_skipped() -> None:
    code, said = campaign("limits", "--limits", "full disk", "read-only", before=set_privileges(NO_RIGHTS))
    assert code == SKIPPED
    assert "full disk: SKIP: needs the right to mount" in said


def test_other_limits_still_run_without_mount_rights() -> None:
    code, said = campaign("limits", "--limits", "file size", "read-only", before=set_privileges(NO_RIGHTS))
    assert code == 0
    assert "read-only: SKIP: needs the right to mount" in said
    assert "0 problems" in said


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_loop_disk_without_rights_is_unavailable(kind: str) -> None:
    script = f"from tests.nightly.faults import loop_disk; print(loop_disk.why_not({kind!r}))"
    command = [*set_privileges(NO_RIGHTS), sys.executable, "-c", script]
    done = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("needs ")


def test_missing_tools_are_reported_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is None if tools and rights are there, and names a tool that is missing."""
    reasons = {why_no_compiler: why_no_compiler(), why_no_mount: why_no_mount(), fuse_disk.why_not: fuse_disk.why_not()}
    reasons |= {loop_disk.why_not: loop_disk.why_not("ext4")}
    monkeypatch.setenv("PATH", "/nowhere")
    for why_not in (why_no_compiler, why_no_mount):
        why_not.cache_clear()
        reason = why_not()
        why_not.cache_clear()
        assert reason is not None
        assert reason.startswith("needs ")
    assert all(found is None or found.startswith("needs ") for found in reasons.values())
