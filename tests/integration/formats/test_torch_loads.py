"""Checkpoints that the real PyTorch wrote: equal to what PyTorch loads, byte for byte, and no code is run."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from typer.testing import CliRunner

import jaxckpt_train as jct
from jaxckpt_train.cli.main import app
from jaxckpt_train.formats import foreign
from jaxckpt_train.formats.torch import TorchItems
from tests.golden.make_torch import FOLDER
from tests.support.model_states import mesh
from tests.support.same_trees import raw

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed: `make torch-imports` tries this", exc_type=ImportError
)
dcp = pytest.importorskip("torch.distributed.checkpoint", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")

DTYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e8m0fnu",
]  # fmt: skip


def save(path: Path, state: dict[str, Any], **options: Any) -> Path:
    dcp.save(state, checkpoint_id=path, no_dist=True, **options)
    return path


def torch_bytes(tensor: Any) -> bytes:
    """The elements of a tensor in row-major order."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def assert_equal(found: Any, expected: Any) -> None:
    """Fail unless a loaded tree equals one of PyTorch, whose keys are text in the file."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, np.ndarray)
        assert (str(expected.dtype), tuple(expected.shape)) == (f"torch.{found.dtype.name}", found.shape)
        assert raw(found) == torch_bytes(expected)
    elif isinstance(expected, dict):
        assert [str(key) for key in sorted(found, key=str)] == [str(key) for key in sorted(expected, key=str)]
        for key, child in expected.items():
            assert_equal(found[int(key) if str(key).isdigit() else key], child)
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert_equal(ours, theirs)
    else:
        assert type(found) is type(expected)
        assert found == expected


def adam(steps: int = 3) -> tuple[Any, Any]:
    """A small model and the AdamW that trains it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
    groups = [
        {"params": [each for each in model.parameters() if each.ndim == 2], "weight_decay": 0.1},
        {"params": [each for each in model.parameters() if each.ndim < 2], "weight_decay": 0.0, "lr": 3e-4},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 6)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def training() -> dict[str, Any]:
    model, optimizer = adam()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "scheduler": {key: value for key, value in scheduler.state_dict().items() if key != "_initial_step"},
        "rng": torch.get_rng_state(),
        "step": 3,
        "text": "état",
        "none": None,
        "big": 2**70,
        "nan_free": [1.5, True, "a", None, 2 + 1j, b"bytes"],
        "nested": [{"a": torch.ones(2), "b": 1}, [torch.zeros(1), torch.arange(3)]],
        "pair": (torch.arange(4), "x"),
        "size": [3, (4, 5), []],
    }


def test_a_training_with_adamw_loads_equal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = training()
    with caplog.at_level(logging.WARNING, "jaxckpt_train"):
        assert_equal(jct.load(save(tmp_path / "a", state)), state)
    assert [record for record in caplog.records if record.name == "jaxckpt_train"] == []


def test_pytorch_itself_loads_what_we_load(tmp_path: Path) -> None:
    """The expected values of the other tests are those of PyTorch's own loader."""
    state = training()
    save(tmp_path / "a", state)
    into = {"model": {name: torch.zeros_like(each) for name, each in state["model"].items()}, "step": 0}
    dcp.load(into, checkpoint_id=tmp_path / "a", no_dist=True)
    found = jct.load(tmp_path / "a", only=["model/**", "step"])
    assert_equal(found, into)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_loads_equal(dtype: str, tmp_path: Path) -> None:
    kind = getattr(torch, dtype)
    item = torch.empty(0, dtype=kind).element_size()
    content = torch.from_numpy(np.random.default_rng(3).integers(0, 2 if dtype == "bool" else 256, 60 * item, np.uint8))
    tensor = content.view(kind).reshape(3, 4, 5)
    state = {"w": tensor, "one": tensor[1, 2, 3].clone(), "none": tensor[:, :0].clone(), "part": tensor[1:, ::2]}
    assert_equal(jct.load(save(tmp_path / "a", state)), state)


def test_layouts_of_tensors_do_not_matter(tmp_path: Path) -> None:
    image = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    state = {
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "expanded": torch.arange(3.0).expand(4, 3),
        "channels_last": image.to(memory_format=torch.channels_last),
        "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
        "tied": image,
        "tied_too": image,
    }
    expected = dict(state, conjugated=state["conjugated"].resolve_conj())
    assert_equal(jct.load(save(tmp_path / "a", state)), expected)


def test_other_forms_of_the_files_load_equal(tmp_path: Path) -> None:
    state = training()
    writers = {
        "many files": dcp.FileSystemWriter(tmp_path / "many files", single_file_per_rank=False, thread_count=2),
        "threads": dcp.FileSystemWriter(tmp_path / "threads", thread_count=3),
    }
    for name, writer in writers.items():
        dcp.save(state, storage_writer=writer, no_dist=True)
        assert len(list((tmp_path / name).glob("*.distcp"))) > 1
        assert_equal(jct.load(tmp_path / name), state)


def test_unflattened_names_are_kept_as_keys(tmp_path: Path) -> None:
    state = {"layers.0.weight": torch.ones(2, 3), "0": torch.zeros(1), "a/b": 5}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    found = jct.load(save(tmp_path / "a", state, planner=planner))
    assert sorted(found) == sorted(state)
    assert raw(found["layers.0.weight"]) == torch_bytes(state["layers.0.weight"])
    nested = jct.load(tmp_path / "a", transforms=[{"op": "nest"}], only="layers/**")
    assert raw(nested["layers"][0]["weight"]) == torch_bytes(state["layers.0.weight"])


def test_a_list_with_a_gap_becomes_a_mapping(tmp_path: Path) -> None:
    found = jct.load(save(tmp_path / "a", {"l": [{}, torch.ones(2)], "m": [[torch.ones(1)], {"x": 1}]}))
    assert list(found["l"]) == [1]
    assert found["m"][1] == {"x": 1}


def test_model_goes_into_target_its_shardings_and_dtypes(tmp_path: Path) -> None:
    state = {
        "model": {"a.weight": torch.randn(24, 16), "a.bias": torch.randn(24)},
        "optim": {"state": {0: torch.ones(3)}},
    }
    save(tmp_path / "a", state)
    sharding = NamedSharding(mesh(), PartitionSpec("tensor", "fsdp"))
    kernel = jax.ShapeDtypeStruct((16, 24), jnp.bfloat16, sharding=sharding)
    operations = [
        {"op": "nest"},
        {"op": "rename", "leaves": "model/a/weight", "to": "params/kernel"},
        {"op": "transpose", "leaves": "params/kernel"},
    ]
    found = jct.load(tmp_path / "a", {"params": {"kernel": kernel}}, only="params/**", transforms=operations, cast=True)
    kernel = found["params"]["kernel"]
    assert kernel.sharding == sharding
    expected = state["model"]["a.weight"].T.numpy().astype(ml_dtypes.bfloat16)
    assert raw(kernel) == expected.tobytes()
    renamed = jct.load(tmp_path / "a", {"b": jnp.zeros(24)}, only="b", rename={"model/a.bias": "b"})
    assert raw(renamed["b"]) == torch_bytes(state["model"]["a.bias"])
    with_text = jct.load(tmp_path / "a", {"optim": {"state": {"0": jnp.zeros(3)}}}, only="optim/**")
    assert raw(with_text["optim"]["state"]["0"]) == torch_bytes(torch.ones(3))


def test_fresh_run_starts_from_torch_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "a", {"model": {"w": torch.arange(6.0).reshape(2, 3)}})
    with jct.CheckpointCallback(
        tmp_path / "run", init_from={"path": str(tmp_path / "a"), "rename": {"model/w": "w"}}
    ) as ckpt:
        state = ckpt.resume({"w": jnp.zeros((2, 3))})
    assert raw(state["w"]) == np.arange(6, dtype=np.float32).tobytes()


def printed_json(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.output)


def test_commands_accept_torch_checkpoint(tmp_path: Path) -> None:
    state = training()
    save(tmp_path / "a", state)
    shown = printed_json("show", tmp_path / "a")
    assert shown["kind"] == "PyTorch"
    assert "model/0.weight" in json.dumps(shown)
    assert "model/0.weight" in json.dumps(printed_json("stats", tmp_path / "a"))
    assert printed_json("import", tmp_path / "a", tmp_path / "ours")["kind"] == "PyTorch"
    assert jct.verify(tmp_path / "ours").ok
    assert_equal(jct.load(tmp_path / "ours"), state)
    same = printed_json("diff", tmp_path / "a", tmp_path / "ours")
    state["model"]["0.weight"][1, 2] += 1
    save(tmp_path / "b", state)
    other = printed_json("diff", tmp_path / "a", tmp_path / "b")
    assert "model/0.weight" not in json.dumps(same)
    assert "model/0.weight" in json.dumps(other)


class Malicious:
    """An object whose pickle calls `os.mkdir`."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._marker),)


def test_object_that_runs_code_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    marker = tmp_path / "was_run"
    save(tmp_path / "a", {"w": torch.ones(2), "bad": Malicious(marker), "args": argparse.Namespace(lr=0.1), "step": 1})
    with caplog.at_level(logging.WARNING, "jaxckpt_train"):
        found = jct.load(tmp_path / "a")
    assert sorted(found) == ["step", "w"]
    (message,) = [record.getMessage() for record in caplog.records if record.name == "jaxckpt_train"]
    assert re.search(r"bad \([^)]*'posix\.mkdir'\)", message)
    assert re.search(r"args \([^)]*'argparse\.Namespace'\)", message)
    assert "bad" not in json.dumps(printed_json("show", tmp_path / "a"))
    printed_json("import", tmp_path / "a", tmp_path / "ours")
    with pytest.raises(jct.MismatchError, match="bad"):
        jct.load(tmp_path / "a", {"w": jnp.zeros(2), "bad": 0, "step": 0})
    assert not marker.exists()
    dcp.load({"bad": 0}, checkpoint_id=tmp_path / "a", no_dist=True)
    assert marker.exists(), "this object runs no code, so the test shows nothing"


def test_a_tensor_that_would_run_code_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "was_run"
    save(tmp_path / "a", {"w": torch.arange(400.0), "v": torch.arange(3)})
    torch.save(Malicious(marker), tmp_path / "evil")
    reader = dcp.FileSystemReader(tmp_path / "a")
    evil = (tmp_path / "evil").read_bytes()
    places = {index.fqn: place for index, place in reader.read_metadata().storage_data.items()}
    file = tmp_path / "a" / "__0_0.distcp"
    data, place = bytearray(file.read_bytes()), places["w"]
    assert len(evil) <= place.length
    comment = place.length - len(evil)  # the comment at the end of a zip file is ignored
    evil = evil[:-2] + comment.to_bytes(2, "little") + bytes(comment)
    data[place.offset : place.offset + place.length] = evil
    file.write_bytes(data)
    with pytest.raises(jct.CorruptCheckpointError, match="'w' cannot be read"):
        jct.load(tmp_path / "a")
    assert raw(jct.load(tmp_path / "a", only="v")["v"]) == torch_bytes(torch.arange(3))
    assert not marker.exists()
    torch.load(io.BytesIO(evil), weights_only=False)
    assert marker.exists()


def test_metadata_that_would_run_code_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a", {"w": torch.ones(2)})
    marker, path = tmp_path / "was_run", tmp_path / "a" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data["w"] = ("w", Malicious(marker))
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(jct.CorruptCheckpointError, match=r"'posix\.mkdir'"):
        jct.load(tmp_path / "a")
    assert not marker.exists()
    dcp.FileSystemReader(tmp_path / "a").read_metadata()
    assert marker.exists()


def test_damaged_object_is_reported(tmp_path: Path) -> None:
    save(tmp_path / "a", {"rate": 0.5})
    file = tmp_path / "a" / "__0_0.distcp"
    data = file.read_bytes()
    at = data.index(np.array(0.5, ">f8").tobytes()) - 1
    file.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    with pytest.raises(jct.CorruptCheckpointError, match="'rate' cannot be read"):
        jct.load(tmp_path / "a")


def test_endless_tree_is_reported(tmp_path: Path) -> None:
    bomb: Any = [0]
    for _ in range(60):
        bomb = [bomb, bomb]
    save(tmp_path / "a", {"bomb": (bomb,)})
    with pytest.raises(jct.CorruptCheckpointError, match="200 levels and 500,000 values"):
        jct.load(tmp_path / "a")


def test_each_piece_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"w{number}": torch.randn(512, 5000) for number in range(3)}  # 10 MB each
    save(tmp_path / "a", state)
    reads, read = list[str](), TorchItems.read_tensor

    def counted(self: TorchItems, item: Any, dtype: str, target: np.ndarray) -> None:
        reads.append(item.name)
        read(self, item, dtype, target)

    monkeypatch.setattr(TorchItems, "read_tensor", counted)
    sharding = NamedSharding(mesh(), PartitionSpec("tensor", "fsdp"))
    like = {name: jax.ShapeDtypeStruct((512, 5000), jnp.float32, sharding=sharding) for name in state}
    found = jct.load(tmp_path / "a", like)
    assert sorted(reads) == sorted(state)
    assert all(raw(found[name]) == torch_bytes(tensor) for name, tensor in state.items())
    reads.clear()
    jct.load(tmp_path / "a", only="w1")
    assert reads == ["w1"]
    reads.clear()
    turned = jct.load(tmp_path / "a", transforms=[{"op": "transpose", "leaves": "*"}])  # read by columns
    assert sorted(reads) == sorted(state)
    assert all(raw(turned[name]) == torch_bytes(tensor.T) for name, tensor in state.items())


def test_only_newest_and_used_pieces_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "CACHED_PIECES_BYTES", 100)
    cache, reads = foreign.PieceCache(), list[int]()

    def piece(number: int) -> np.ndarray:
        def read() -> np.ndarray:
            reads.append(number)
            return np.full(60, number, np.uint8)

        return cache.get(number, read)

    first = piece(0)
    assert [int(piece(number)[59]) for number in (1, 2, 2, 1)] == [1, 2, 2, 1]
    assert piece(0) is first  # in use all the time
    assert reads == [0, 1, 2, 1]


def test_golden_torch_checkpoint_loads(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "a")
    found = jct.load(tmp_path / "a")
    assert found["list"][0] == {"lr": 0.5}
    assert (found["list"][1], found["name"]) == (3, "golden")
    assert raw(found["model"]["layer.weight"]) == np.arange(12).reshape(3, 4).astype(ml_dtypes.bfloat16).tobytes()
