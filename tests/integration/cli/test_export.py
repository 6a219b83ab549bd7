"""`jaxckpt export` to safetensors: it reports leaves that the format lacks, and writes one file or a folder."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import jaxckpt_train as jct
from tests.support.commands import json_of, refused, run
from tests.support.same_trees import raw


class Model(nnx.Module):
    """A layer, and the PRNG key of a dropout."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.layer, self.drop = nnx.Linear(2, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)


def test_exported_prng_keys_are_reported(tmp_path: Path) -> None:
    saved = Model(0)
    jct.save(tmp_path / "a", (saved,))
    done = run("export", tmp_path / "a", tmp_path / "hf", "--to", "safetensors")
    assert done.exit_code == 0
    assert done.stderr.startswith("PRNG keys ")
    assert "0/drop/rngs/key" in done.stderr
    found = json_of("export", tmp_path / "a", tmp_path / "again", "--to", "safetensors")
    assert found["prng_keys"] == ["0/drop/rngs/key"]
    assert found["left_out"] == []
    (note,) = found["notes"]
    assert f"{note}\n" == done.stderr
    nest = {"op": "nest"}
    with pytest.raises(jct.MismatchError, match=r"'0/drop/rngs/key': saved uint32\[2\], wanted key<"):
        jct.load(tmp_path / "hf", (Model(1),), transforms=[nest])
    drop = {"op": "drop", "leaves": "**/rngs/**"}
    for options in ({"transforms": [nest], "only": "0/layer/**"}, {"transforms": [nest, drop]}):
        model = Model(1)
        before = raw(jax.random.key_data(model.drop.rngs.key[...]))
        start = {"path": tmp_path / "hf", "missing": "keep", **options}
        with jct.CheckpointCallback(tmp_path / f"run-{len(options)}", init_from=start) as ckpt:
            ckpt.resume((model,))
        assert raw(model.layer.kernel[...]) == raw(saved.layer.kernel[...])
        assert raw(jax.random.key_data(model.drop.rngs.key[...])) == before
    dropped = ["--op", "drop **/rngs/**"]
    found = json_of("export", tmp_path / "a", tmp_path / "plain", "--to", "safetensors", *dropped)
    assert (found["prng_keys"], found["notes"]) == ([], [])


def test_leaves_that_safetensors_lacks_are_reported(tmp_path: Path) -> None:
    """A Python complex number has 128 bits, for which the format has no name."""
    jct.save(tmp_path / "a", {"w": np.ones(2), "c": 1 + 2j, "none": None})
    done = run("export", tmp_path / "a", tmp_path / "hf", "--to", "safetensors")
    (line,) = done.stdout.splitlines()[1:]
    assert line.startswith("left out, ")
    assert line.endswith(": c, none")


def test_name_of_a_file_makes_one_file(tmp_path: Path) -> None:
    tree = {"w": np.arange(6.0), "b": np.ones(3, np.float16)}
    jct.save(tmp_path / "a", tree)
    out = tmp_path / "new" / "x.safetensors"
    found = json_of("export", tmp_path / "a", out, "--to", "safetensors")
    assert found["files"] == ["x.safetensors"]
    assert found["to"] == str(out)
    assert {name: value.tobytes() for name, value in load_file(out).items()} == {
        name: value.tobytes() for name, value in tree.items()
    }
    assert [path.name for path in out.parent.iterdir()] == ["x.safetensors"]
    assert "exists" in refused("export", tmp_path / "a", out, "--to", "safetensors", code=4)
    assert load_file(out).keys() == tree.keys()


def test_target_with_slash_is_a_folder(tmp_path: Path) -> None:
    jct.save(tmp_path / "a", {"w": np.arange(6.0), "b": np.ones(3)})
    file = tmp_path / "x.safetensors"
    assert "--shard-gb" in refused("export", tmp_path / "a", file, "--to", "safetensors", "--shard-gb", 1, code=2)
    folder = f"{file}/"
    run("export", tmp_path / "a", folder, "--to", "safetensors", "--shard-gb", "0.000000048")
    assert sorted(path.name for path in file.iterdir())[1:] == [
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert sorted(jct.load(file)) == ["b", "w"]
    assert "exists" in refused("export", tmp_path / "a", file, "--to", "safetensors", code=4)
    run("export", tmp_path / "a", tmp_path / "y.safetensors", "--to", "orbax")
    assert (tmp_path / "y.safetensors").is_dir()


def test_damage_leaves_no_file(tmp_path: Path) -> None:
    jct.save(tmp_path / "a", {"w": np.arange(6.0)})
    (segment,) = (tmp_path / "a").glob("*/*.safetensors")
    segment.write_bytes(segment.read_bytes()[:-8] + bytes(8))
    refused("export", tmp_path / "a", tmp_path / "x.safetensors", "--to", "safetensors", code=1)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
