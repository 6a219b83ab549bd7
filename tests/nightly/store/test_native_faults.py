"""A failing file system: short writes and EINTR are invisible, EIO and ENOSPC are raised, a kill leaves old or new."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile `faults.c`."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler for the library of faults")
    target = tmp_path_factory.mktemp("faults") / "faults.so"
    source = HERE / "faults.c"
    subprocess.run([compiler, "-O1", "-Wall", "-shared", "-fPIC", "-o", target, source, "-ldl"], check=True)
    return target


@pytest.fixture
def ends(library: Path, run_python: Any, tmp_path: Path) -> Any:
    """Return a function that runs a scenario of `faulty_saves.py`."""

    def run(scenario: str) -> list[Any]:
        done = run_python(
            HERE / "faulty_saves.py", scenario, tmp_path, env={"LD_PRELOAD": str(library)}, check=True, timeout_s=100
        )
        found: list[Any] = json.loads(done.stdout)
        return found

    return run


def test_short_and_interrupted_calls_are_invisible(ends: Any) -> None:
    for scenario, counted, found, problems in ends("survive"):
        assert counted > 2, f"{scenario}: the faults were not injected"
        assert (found, problems) == ("large", []), scenario


@pytest.mark.parametrize("way", ["", ",without renameat2"])
def test_any_refused_call_fails_save_without_leftovers(ends: Any, way: str) -> None:
    found = ends(f"fail{way}")
    assert len(found) > 20
    for mode, at, code, message, content, names in found:
        assert code == {"e": errno.EIO, "s": errno.ENOSPC}[mode], (at, message)
        assert ("do not rely on it" if mode == "e" else "free some space") in message
        assert (content, names) == ("nothing", []), (at, message)


def test_any_refused_call_of_overwrite_keeps_old_checkpoint(ends: Any) -> None:
    found = ends("fail,replacing")
    assert len(found) > 20
    for mode, at, code, message, content, names in found:
        if code == 0:  # a failed read of the replaced checkpoint, which stays until the next save cleans up
            assert (content, len(names), names[-1]) == ("new", 2, "a"), (at, names)
            continue
        assert code == {"e": errno.EIO, "s": errno.ENOSPC}[mode], (at, message)
        assert (content, names) == ("old", ["a"]), (at, message)
    assert sum(code == 0 for _, _, code, *_ in found) == 4, "two reads, in two modes"


def test_refusal_between_renames_of_exchange_loses_nothing(ends: Any) -> None:
    for _, at, code, message, content, _ in ends("fail,replacing,without renameat2"):
        assert code in (0, errno.EIO, errno.ENOSPC), (at, message)
        assert content == ("old" if code else "new"), (at, message)


@pytest.mark.parametrize("way", ["", ",without renameat2"])
def test_kill_during_save_leaves_nothing_or_all(ends: Any, way: str) -> None:
    found = ends(f"die{way}")
    assert {died for _, _, died, *_ in found} == {-9}
    assert {content for _, _, _, content, *_ in found} == {"nothing", "new"}
    assert all(after == "new" and names == ["a"] for *_, after, names in found), found


@pytest.mark.parametrize("way", ["", ",without renameat2"])
def test_kill_during_overwrite_leaves_old_or_new(ends: Any, way: str) -> None:
    found = ends(f"die,replacing{way}")
    assert {died for _, _, died, *_ in found} == {-9}
    assert {content for _, _, _, content, *_ in found} == {"old", "new"}
    assert all(after == "new" and names == ["a"] for *_, after, names in found), found


def test_unreadable_disk_is_distinguished_from_damage(ends: Any) -> None:
    found = ends("fail to read")
    assert len(found) >= 4
    for at, code, message in found:
        assert code == errno.EIO, (at, message)
        assert "cannot read" in message
