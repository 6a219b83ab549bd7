"""The metadata of PyTorch's distributed checkpoints: read without PyTorch, and no code that it names is run."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import jaxckpt_train as jct
from jaxckpt_train.cli.main import app
from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.formats.torch import decode_torch_metadata
from tests.support import paths

GOLDEN = paths.GOLDEN / "torch"
METADATA = (GOLDEN / ".metadata").read_bytes()


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy of the committed checkpoint."""
    shutil.copytree(GOLDEN, tmp_path / "dcp")
    return tmp_path / "dcp"


def test_metadata_gives_tensors_places_and_tree() -> None:
    found = decode_torch_metadata(METADATA, "x")
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.tensors.items()} == {
        "model.layer.weight": ("bfloat16", (3, 4)),
        "model.layer.bias": ("float32", (4,)),
        "list.1": ("int64", ()),
    }
    assert found.paths["list.0.lr"] == ("list", 0, "lr")
    assert found.paths["model.layer.weight"] == ("model", "layer.weight")
    assert sorted(found.objects) == ["list.0.lr", "name"]
    size = (GOLDEN / "__0_0.distcp").stat().st_size
    places = [item for tensor in found.tensors.values() for item in tensor.pieces.values()] + [*found.objects.values()]
    assert sum(item.length for item in places) == size
    assert {item.relative_path for item in places} == {"__0_0.distcp"}


@pytest.mark.parametrize(
    "name",
    [
        b"cos\nsystem\n",
        b"cbuiltins\neval\n",
        b"cbuiltins\n__import__\n",
        b"ctorch\nload\n",
        b"ctorch.hub\nload\n",
        b"ctorch.serialization\nload\n",
        b"ctorch\nfloat32.__class__\n",
        b"ctorch.distributed.checkpoint.metadata\nSequence\n",
        b"ctorch.distributed.checkpoint.metadata\nMetadata.__init__\n",
        b"ccollections\nCounter\n",
        b"cjaxckpt_train.formats.torch_pickle\nRecord\n",
        b"\x8c\x02os\x8c\x06system\x93",
    ],
)
def test_unneeded_pickle_global_is_refused(name: bytes) -> None:
    with pytest.raises(jct.CorruptCheckpointError, match=r"^a/.metadata: .*the name '.*'"):
        decode_torch_metadata(b"\x80\x04" + name + b".", "a/.metadata")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"ctorch\nSize\n}\x8c\x01aK\x01sb.", "type _Name gets attributes"),  # of a class that all pickles share
        (b"ctorch\nSize\nN}\x8c\x01aK\x01s\x86b.", "type _Name gets attributes"),
        (b"ccollections\nOrderedDict\n}\x8c\x01aK\x01sb.", "type _Name gets attributes"),
        (b"ctorch\nfloat32\n)R.", "type Record is called"),
        (b"}K\x01K\x01s.", "a mapping has a key of type int"),
        (b"\x8c\x01a)R.", "type str is called"),
        (b"ctorch\nSize\n)R)R.", "type Record is called"),
        (b"(ctorch\nSize\n\x8c\x01xo.", "KeyError"),  # an operation that builds objects in another way
        (b"(\x8c\x01xios\nsystem\n.", "KeyError"),
        (b"Px\n.", "KeyError"),
        (b"\x82\x01.", "KeyError"),
        (b"\x96" + b"\xff" * 8 + b".", "KeyError"),  # would reserve memory
        (b"", "EOFError"),
        (b"}.", "found a dict"),
        (b"ctorch.distributed.checkpoint.metadata\nMetadata\n)R.", "with state_dict_metadata, found none"),
    ],
)  # fmt: skip
def test_other_pickle_operations_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(jct.CorruptCheckpointError, match=message):
        decode_torch_metadata(b"\x80\x04" + data, "x")


def test_deeply_nested_keys_are_refused_without_recursion() -> None:
    deep = b"\x80\x04}" + b")" + b"\x85" * 1_000_000 + b"K\x01s."
    with pytest.raises(jct.CorruptCheckpointError, match="a key of type tuple"):
        decode_torch_metadata(deep, "x")


@given(st.integers(0, len(METADATA) - 1), st.integers(0, 255))
def test_damaged_byte_is_reported_or_harmless(place: int, byte: int) -> None:
    data = METADATA[:place] + bytes([byte]) + METADATA[place + 1 :]
    try:
        decode_torch_metadata(data, "x")
    except CheckpointError as error:
        assert str(error).startswith("x: ")  # noqa: PT017  # most bytes can be changed in ways that are still metadata


def test_every_truncation_is_reported() -> None:
    for length in range(len(METADATA)):
        with pytest.raises(jct.CorruptCheckpointError):
            decode_torch_metadata(METADATA[:length], "x")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"__0_0.distcp", b"/etc/passwdx", "expected a file .* found '/etc/passwdx'"),
        (b"__0_0.distcp", b"../../passwd", "expected a file .* found '../../passwd'"),
        (b"\x8c\x08bfloat16", b"\x8c\x08qint8x32", "has the unsupported dtype qint8x32"),
        (b"_StorageInfo", b"_StorageInfx", "'torch.distributed.checkpoint.filesystem._StorageInfx'"),
    ],
)
def test_contradictions_are_reported(old: bytes, new: bytes, message: str) -> None:
    assert METADATA.count(old)
    with pytest.raises(CheckpointError, match=message):
        decode_torch_metadata(METADATA.replace(old, new), "x")


def test_short_or_missing_file_is_reported(golden: Path) -> None:
    data = (golden / "__0_0.distcp").read_bytes()
    (golden / "__0_0.distcp").write_bytes(data[:-1])
    with pytest.raises(jct.CorruptCheckpointError, match=f"the {len(data)} bytes .* found {len(data) - 1}"):
        jct.load(golden)
    (golden / "__0_0.distcp").rename(golden / "__1_0.distcp")
    with pytest.raises(jct.CorruptCheckpointError, match=r"__0_0.distcp: does not exist"):
        jct.load(golden)


def test_unfinished_save_is_no_checkpoint(golden: Path) -> None:
    (golden / ".metadata").rename(golden / ".metadata.tmp")
    with pytest.raises(jct.NotACheckpointError, match=r"without .metadata"):
        jct.load(golden)


def test_missing_pytorch_error_names_the_extra(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each == "torch" or each.startswith("torch.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(jct.SettingsError, match="pip install torch"):
        jct.load(golden)
    found = CliRunner().invoke(app, ["show", str(golden)])
    assert found.exit_code != 0
    assert "pip install torch" in found.output
