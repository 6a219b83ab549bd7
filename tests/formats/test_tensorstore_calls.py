"""TensorStore is imported without the loss of an interrupt, and what it says of a failed read is told as what it is."""

from __future__ import annotations

import errno
import sys
from typing import Any

import pytest

from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError, SettingsError, StorageError
from jaxckpt_train.formats.tensorstore_calls import read_error, refused, tensorstore

# TensorStore's own code imports asyncio when it begins, and makes an ImportError of whatever is raised there.
INTERRUPTED = """
import signal, sys
from jaxckpt_train.formats.tensorstore_calls import tensorstore

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "asyncio":
            assert "tensorstore" in sys.modules
            signal.raise_signal(signal.SIGINT)

def told(number, frame):
    print("told", number)

sys.meta_path.insert(0, Interrupts())
if sys.argv[1] == "told":
    signal.signal(signal.SIGINT, told)
before = signal.getsignal(signal.SIGINT)
try:
    found = tensorstore("x is read")
except KeyboardInterrupt:
    print("interrupted")
    found = tensorstore("x is read")
assert found.open and signal.getsignal(signal.SIGINT) is before
"""


@pytest.mark.parametrize(("handler", "said"), [("default", "interrupted\n"), ("told", "told 2\n")])
def test_an_interrupt_while_it_is_imported_is_one(run_python: Any, handler: str, said: str) -> None:
    done = run_python(INTERRUPTED, handler, fresh=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


def test_one_that_is_not_there_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(SettingsError, match=r"^x is read through TensorStore: pip install 'jaxckpt-train\[orbax\]'$"):
        tensorstore("x is read")


def test_one_that_is_broken_is_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "tensorstore":
                raise ImportError("libc.so.9: no such file")

    monkeypatch.delitem(sys.modules, "tensorstore", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(SettingsError, match=r"which is installed but cannot be imported: libc\.so\.9: no such file$"):
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
def test_what_the_system_refused_is_not_called_damaged(
    said: str, kind: type[CheckpointError], number: int | None
) -> None:
    found = read_error(ValueError(f"X: {said}"), "leaf 'w' cannot be read")
    assert type(found) is kind
    assert f"leaf 'w' cannot be read: X: {said}" in str(found)
    assert getattr(found, "errno", None) == number
    system = refused(ValueError(said), "write", "/a")
    assert (None if system is None else system.filename) == (None if "DATA" in said else "/a")
