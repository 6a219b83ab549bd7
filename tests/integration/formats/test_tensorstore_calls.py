"""Errors of TensorStore become storage errors or damage, and forked processes do not use it."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError, SettingsError, StorageError
from jaxckpt_train.formats.tensorstore_reads import read_error, system_error, tensorstore
from tests.support.commands import run


def test_missing_library_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(SettingsError, match=r"pip install 'jaxckpt-train\[orbax\]'$"):
        tensorstore("x is read")


def test_broken_library_is_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "tensorstore":
                raise ImportError("libc.so.9: no such file")

    monkeypatch.delitem(sys.modules, "tensorstore", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(SettingsError, match=r"cannot be imported: libc\.so\.9: "):
        tensorstore("x is read")


@pytest.mark.parametrize(
    ("said", "kind", "number"),
    [
        ("Permission denied [os_error_code='13']", StorageError, errno.EACCES),
        ("Input/output error [os_error_code='5']", StorageError, errno.EIO),
        ("Too many open files [OS error 24: EMFILE]", StorageError, errno.EMFILE),
        ("Is a directory [os_error_code='21']", CorruptCheckpointError, None),
        ("File name too long [os_error_code='36']", CorruptCheckpointError, None),
        ("DATA_LOSS: checksum", CorruptCheckpointError, None),
    ],
)
def test_system_errors_are_not_called_damage(said: str, kind: type[CheckpointError], number: int | None) -> None:
    found = read_error(ValueError(f"X: {said}"), "leaf 'w' cannot be read")
    assert type(found) is kind
    assert f"leaf 'w' cannot be read: X: {said}" in str(found)
    assert getattr(found, "errno", None) == number
    system = system_error(ValueError(said), "write", "/a")
    assert (None if system is None else system.filename) == (None if "DATA" in said else "/a")


# These run in separate processes, since other tests use TensorStore in this one.
FORKED = """
import sys, warnings
warnings.simplefilter("ignore")
import tensorstore
import jaxckpt_train as jct
from tests.support.forking import forked

path, used = sys.argv[1:]

def load(report):
    try:
        report("loaded", jct.load(path)["w"].tolist())
    except jct.SettingsError as error:
        assert path in str(error) and "spawn" in str(error)
        report("refused", None)

def in_grandchild(report):
    for each in forked(load, longest_s=30)[0]:
        report(*each)

if used.startswith("by a load"):
    assert jct.load(path)["w"].tolist() == [0, 1, 2]
elif used == "by others":
    assert jct.load  # imports what looks at forks
    tensorstore.array([1, 2]).write([3, 4]).result()
said, status = forked(in_grandchild if used.endswith("grandparent") else load, longest_s=60)
print(said[-1][0], status)
"""


@pytest.fixture
def of_orbax(tmp_path: Path) -> Path:
    jct.save(tmp_path / "own", {"w": np.arange(3)})
    assert run("export", str(tmp_path / "own"), str(tmp_path / "orbax"), "--to", "orbax").exit_code == 0
    return tmp_path / "orbax"


@pytest.mark.parametrize(
    ("used", "said"),
    [("by a load", "refused"), ("by others", "refused"), ("by a load of a grandparent", "refused"), ("no", "loaded")],
)
def test_forked_child_is_refused_after_parent_used_tensorstore(
    run_python: Any, of_orbax: Path, used: str, said: str
) -> None:
    done = run_python(FORKED, str(of_orbax), used, fresh=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{said} 0\n", "")


POOLED = """
import multiprocessing, sys, warnings
warnings.simplefilter("ignore")
import jaxckpt_train as jct

def load(path):
    return jct.load(path)["w"].tolist()

if __name__ == "__main__":
    path = sys.argv[2]
    load(path)
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        try:
            print("loaded", pool.apply_async(load, (path,)).get(60))
        except jct.SettingsError:
            print("refused")
"""


@pytest.mark.parametrize(("method", "said"), [("fork", "refused\n"), ("spawn", "loaded [0, 1, 2]\n")])
def test_process_pool_loads_only_if_spawned(tmp_path: Path, of_orbax: Path, method: str, said: str) -> None:
    script = tmp_path / "pooled.py"
    script.write_text(POOLED)
    done = subprocess.run(
        [sys.executable, str(script), method, str(of_orbax)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
