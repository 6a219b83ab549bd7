"""`jaxckpt import` and `jaxckpt export`: round trips through every format, and a training that continues after one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp1
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import jaxckpt_train as jct
from jaxckpt_train.cli import convert
from jaxckpt_train.cli.main import app
from tests.integration.formats.test_orbax_export import assert_same_content
from tests.integration.formats.test_orbax_loads import blank
from tests.support.commands import json_of
from tests.support.model_states import llama, mnist
from tests.support.runs import flip_a_payload_byte, made_run, state_of, step_path
from tests.support.same_trees import assert_same, raw

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")


def run(*arguments: object, code: int = 0) -> str:
    """Return both outputs of a command that ends with this code."""
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_orbax_step_is_imported_byte_for_byte(tmp_path: Path) -> None:
    state = llama()
    with ocp.CheckpointManager(tmp_path / "orbax") as manager:
        manager.save(12, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state)))
    found = json_of("import", tmp_path / "orbax" / "12", tmp_path / "ours")
    assert (found["kind"], found["plan"]) == ("Orbax", [])
    assert jct.verify(tmp_path / "ours").ok
    assert_same(jct.load(tmp_path / "ours", jax.tree.map(blank, state)), state)
    assert jct.metadata(tmp_path / "ours").step == 12


def test_import_loads_into_target_of_its_source(tmp_path: Path) -> None:
    """Orbax cannot represent empty NamedTuples, variables of NNX and keys that are digits."""
    params = {"a": np.arange(3.0, dtype=np.float32), "layers": {"0": np.ones(2, np.float32), "-1": np.zeros(1)}}
    adam = optax.adam(1e-3)
    opt = jax.tree.map(np.asarray, adam.update(params, adam.init(params))[1])
    state = {"params": params, "opt": opt, "n": {"v": {"value": np.arange(4)}, "0": 1}}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", state)
    like: dict[str, Any] = jax.tree.map(np.zeros_like, state)
    like["n"] = {"v": np.zeros(4, int), "0": 0}
    wanted = {**state, "n": {"v": np.arange(4), "0": 1}}
    assert_same(jct.load(tmp_path / "orbax", like), wanted)
    run("import", tmp_path / "orbax", tmp_path / "ours")
    run("import", tmp_path / "ours", tmp_path / "again", "--op", "rename n/** n/**")
    run("cp", tmp_path / "again", tmp_path / "copy")
    for name in ("ours", "again", "copy"):
        assert_same(jct.load(tmp_path / name, like), wanted)
        assert_same(jct.load_checkpointables(tmp_path / name, {"state": like})["state"], wanted)
    with jct.CheckpointCallback(tmp_path / "run", init_from=tmp_path / "copy", save_interval_steps=1) as ckpt:
        assert_same(ckpt.resume(like), wanted)


def test_import_applies_transforms_and_selection(tmp_path: Path) -> None:
    layers = [np.random.default_rng(n).normal(size=(4, 6)).astype(np.float32) for n in range(2)]
    save_file({f"h.{n}.w": layer for n, layer in enumerate(layers)} | {"head": layers[0]}, tmp_path / "m.safetensors")
    operations = tmp_path / "ops.yaml"
    operations.write_text('- {op: rename, leaves: h.*.w, to: h/*}\n- {op: stack, leaves: "h/{}", to: layers}\n')
    plan = run("import", tmp_path / "m.safetensors", tmp_path / "out", "--transforms", operations, "--dry-run")
    assert "2. stack: 1 change" in plan
    assert "layers float32[2,4,6]" in plan
    assert not (tmp_path / "out").exists()
    more = ["--transforms", operations, "--op", "transpose layers 0,2,1", "--only", "layers"]
    run("import", tmp_path / "m.safetensors", tmp_path / "out", *more)
    assert raw(jct.load(tmp_path / "out")["layers"]) == raw(np.stack([layer.T for layer in layers]))


def train(state: Any, updates: int) -> list[float]:
    """Do a few updates, and return their losses."""
    losses = []
    for number in range(updates):
        grads = jax.tree.map(lambda leaf, n=number: leaf * 0.1 + n, state["params"])
        moves, state["opt"] = optax.adam(1e-2).update(grads, state["opt"], state["params"])
        state["params"] = optax.apply_updates(state["params"], moves)
        losses.append(float(sum(leaf.sum() for leaf in jax.tree.leaves(state["params"]))))
    return losses


def test_training_survives_round_trip_through_safetensors(tmp_path: Path) -> None:
    params = mnist().params
    state = {"params": params, "opt": optax.adam(1e-2).init(params), "step": 3}
    train(state, 3)
    jct.save(tmp_path / "a", state)
    found = json_of("export", tmp_path / "a", tmp_path / "hf", "--to", "safetensors")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert raw(tensors["params.Dense_0.kernel"]) == raw(state["params"]["Dense_0"]["kernel"])
    assert found["left_out"] == ["opt/1"]
    run("import", tmp_path / "hf", tmp_path / "b", "--op", "nest .")
    back = jct.load(tmp_path / "b", jax.tree.map(blank, state), missing="keep")
    assert_same(back, state)
    assert train(back, 4) == train(state, 4)


def test_a_run_goes_to_orbax_and_back(tmp_path: Path) -> None:
    made_run(tmp_path / "run", 1, 2)
    assert json_of("export", tmp_path / "run", tmp_path / "o" / "2", "--to", "orbax", "--item", "params")["files"] == [
        "params"
    ]
    with ocp.CheckpointManager(tmp_path / "o") as manager:
        restored = manager.restore(2, args=ocp.args.Composite(params=ocp.args.PyTreeRestore()))["params"]
    assert raw(restored["w"]) == raw(state_of(2)["w"])
    run("import", tmp_path / "o" / "2", tmp_path / "b")
    assert raw(jct.load(tmp_path / "b")["w"]) == raw(state_of(2)["w"])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["export", "{a}", "{out}", "--to", "torch"], 2, "--to: .*found 'torch'"),
        (["export", "{a}", "{a}", "--to", "orbax"], 4, "exists; move it away"),
        *(
            (
                ["export", "{a}", "{out}", "--to", "safetensors", f"--shard-gb={size}"],
                2,
                rf"--shard-gb: .*above 0, found {re.escape(str(float(size)))}",
            )
            for size in ("nan", "inf", "-inf", "1e300", "0", "-1")
        ),
        *(
            (
                ["export", "{a}", "{out}", "--to", "orbax", f"--item={name}"],
                2,
                rf"the item of 'state': .*found {re.escape(repr(name))}",
            )
            for name in ("../evil", "a/b", "", "..", "metrics", "_CHECKPOINT_METADATA")
        ),
        (
            ["export", "{a}", "{out}", "--to", "safetensors", "--item", "foo"],
            2,
            "--item: expected --to orbax, found",
        ),
        *(
            (
                ["export", "{a}", "{out}", "--to", "orbax", option],
                2,
                rf"{option.partition('=')[0]}: expected --to safetensors",
            )
            for option in ("--separator=_", "--separator=.", "--shard-gb=1", "--shard-gb=5")
        ),
        (
            ["export", "{a}", "{out}", "--to", "safetensors", "--separator", ""],
            2,
            "--separator: .*found ''",
        ),
        (
            ["import", "{a}", "{out}", "--op", "cast w int32 dtype=int8"],
            2,
            "dtype: .*found 'int32' and",
        ),
        (["import", "{a}", "{a}"], 4, "exists; move it away"),
        (["import", "{none}", "{out}"], 3, "none"),
        (["import", "{a}", "{out}", "--op", "drop nothing"], 2, "no leaf matches 'nothing'"),
        (
            ["import", "{a}", "{out}", "--only", "nothing"],
            2,
            "only='nothing' selects none",
        ),
        (["import", "{a}", "{out}", "--transforms", "{none}"], 4, "none"),
        (["import", "{a}", "{out}", "--part", "data"], 2, "expected one of its checkpointables, found 'data'"),
    ],
)
def test_error_is_reported_in_one_line(tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    jct.save(tmp_path / "a", {"w": np.ones(3)})
    places = {"a": tmp_path / "a", "out": tmp_path / "out", "none": tmp_path / "none"}
    given = [each.format(**places) if each.startswith("{") else each for each in arguments]
    output = run(*given, code=code)
    assert re.search(message, output)
    assert "Traceback" not in output
    assert json_of(*given, code=code)["exit_code"] == code
    assert not (tmp_path / "out").exists()


def test_each_pattern_of_only_must_match(tmp_path: Path) -> None:
    jct.save(tmp_path / "a", {"w": np.ones(3), "v": np.ones(2)})
    message = run("import", tmp_path / "a", tmp_path / "b", "--only", "w", "--only", "q", code=2)
    assert "only='q' selects none" in message
    assert "'q' selects none" in run("show", tmp_path / "a", "w", "q", code=2)
    assert not (tmp_path / "b").exists()


def test_metadata_of_a_safetensors_file_is_imported(tmp_path: Path) -> None:
    metadata = {"format": "np", "made by": "us", "größe": "1"}
    save_file({"w": np.ones(3)}, tmp_path / "m.safetensors", metadata=metadata)
    run("import", tmp_path / "m.safetensors", tmp_path / "a")
    assert jct.metadata(tmp_path / "a").custom_metadata == metadata
    run("export", tmp_path / "a", tmp_path / "out", "--to", "safetensors")
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert file.metadata() == metadata | {"format": "pt"}
    jct.save(tmp_path / "b", {"w": np.ones(3)}, custom_metadata={"by": "us", "seed": 3})
    run("export", tmp_path / "b", tmp_path / "c", "--to", "safetensors")
    assert jct.metadata(tmp_path / "c").custom_metadata == {"by": "us", "format": "pt"}


class Model(nnx.Module):
    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)])
        self.norm, self.dropout = nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)


def by_standard(item: Path, target: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(item, target)


def by_second_interface(item: Path, target: Any) -> Any:
    return ocp1.load(item.parent, target, checkpointable_name=item.name)


@pytest.mark.parametrize("restore", [by_standard, by_second_interface])
def test_nnx_state_is_exported_as_dicts_or_variables(tmp_path: Path, restore: Callable[[Path, Any], Any]) -> None:
    def states(seed: int) -> Any:
        model = Model(seed)
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        optimizer.update(model, jax.tree.map(jax.numpy.ones_like, nnx.state(model, nnx.Param)))
        return nnx.state(model), nnx.state(optimizer)

    jct.save(tmp_path / "a", states(0))
    command = ["export", tmp_path / "a"]
    assert "export it with --op 'rename ** **/value'" in run(*command, tmp_path / "plain", "--to", "orbax")
    assert "NNX" not in run(*command, tmp_path / "b", "--to", "orbax", "--op", "rename ** **/value")
    as_dicts, there = (tuple(nnx.to_pure_dict(state) for state in states(seed)) for seed in (0, 1))
    assert_same_content(restore(tmp_path / "plain" / "state", there), as_dicts)
    restored = restore(tmp_path / "b" / "state", states(1))
    assert_same_content(restored, states(0))
    model = Model(2)
    nnx.update(model, restored[0])
    assert_same_content(nnx.state(model), states(0)[0])
    assert_same(jct.load(tmp_path / "b", states(1)), states(0))


def test_only_selects_after_all_operations(tmp_path: Path) -> None:
    jct.save(tmp_path / "a", {"hidden": {"kernel": np.ones(3)}, "step": 3})
    command = ["import", tmp_path / "a", tmp_path / "b", "--op", "rename hidden/** params/**", "--only"]
    message = run(*command, "parms/**", code=2)
    assert "only='parms/**' selects none of 2 leaves" in message
    assert 'did you mean "params/**"?' in message
    assert "operation" not in message
    run(*command, "hidden/**", code=2)
    run(*command, "params/**")
    assert list(jct.load(tmp_path / "b")) == ["params"]


def test_plan_shows_shapes_of_fused_leaves(tmp_path: Path) -> None:
    jct.save(tmp_path / "a", {"k": np.ones((2, 3)), "q": np.ones((5, 3))})
    output = run("import", tmp_path / "a", tmp_path / "b", "--op", "fuse q,k qk", "--dry-run")
    assert " ".join(output.split()).startswith("1. fuse: 1 change q float64[5,3], k float64[2,3] -> qk float64[7,3] ")


def test_operations_of_file_and_options_share_numbers(tmp_path: Path) -> None:
    jct.save(tmp_path / "a", {"x": np.ones(3)})
    file = tmp_path / "s.json"
    command = ["import", tmp_path / "a", tmp_path / "b", "--transforms", file]

    def failed(given: list[dict[str, str]], *texts: str) -> str:
        file.write_text(json.dumps(given))
        return run(*command, *(word for text in texts for word in ("--op", text)), code=2)

    nest = {"op": "nest"}
    assert "s.json: operation 2 of 3 (drop): expected leaves" in failed([nest, {"op": "drop"}], "nest")
    assert "'drop': operation 3 of 3 (drop): expected leaves" in failed([nest], "nest", "drop")
    assert "operation 3 of 3 (pad): leaf 'x': expected 2 axes" in failed([nest], "nest", "pad x 5,None")


def test_damage_is_reported_and_nothing_is_left(tmp_path: Path) -> None:
    made_run(tmp_path / "run", 1)
    flip_a_payload_byte(step_path(tmp_path / "run", 1))
    assert "are not what was saved" in run("import", tmp_path / "run", tmp_path / "out", code=1)
    assert "are not what was saved" in run("export", tmp_path / "run", tmp_path / "out", "--to", "orbax", code=1)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize(
    ("tensors", "operation", "message"),
    [
        ({"a": np.ones(3), "a.b": np.ones(2)}, "nest", "(nest): leaf 'a/b' would be below leaf 'a'"),
        ({"s": np.ones(3), "w": np.ones(2)}, "rename w s/x", "(rename): leaf 's/x' would be below leaf 's'"),
        ({"i": np.ones(3)}, "add i/x 2", "(add): leaf 'i/x' would be below leaf 'i'"),
        ({"i": np.array([300, -1, 2**40])}, "cast i int8", "leaf 'i' of int64: 300 at [0] does not fit int8"),
        ({"i": np.arange(3)}, "pad i 5 value=nan", "(pad): leaf 'i' of int64 cannot hold the value nan"),
        (
            {"i": np.arange(3)},
            "add z 1000000000000000000",
            "(add): leaf 'z': expected a valid shape",
        ),
    ],
)
def test_invalid_operation_writes_nothing(
    tmp_path: Path, tensors: dict[str, np.ndarray], operation: str, message: str
) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    output = run("import", tmp_path / "a.safetensors", tmp_path / "out", "--op", operation, code=2)
    assert message in output
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.safetensors"]


@pytest.mark.parametrize("axes", [32, 33])
def test_arrays_of_many_axes_are_exported(tmp_path: Path, axes: int) -> None:
    jct.save(tmp_path / "a", {"w": np.arange(2.0).reshape((1,) * (axes - 1) + (2,))})
    output = run("export", tmp_path / "a", tmp_path / "5", "--to", "orbax", code=0 if axes == 32 else 2)
    assert (tmp_path / "5").exists() == (axes == 32)
    if axes == 33:
        assert f"{tmp_path / 'a'}: leaf 'w': expected at most 32 axes" in output
        assert sorted(each.name for each in tmp_path.iterdir()) == ["a"]


def test_dtype_that_orbax_lacks_is_named(tmp_path: Path) -> None:
    jct.save(tmp_path / "a", {"w": np.zeros(2, ml_dtypes.uint4)})
    output = run("export", tmp_path / "a", tmp_path / "5", "--to", "orbax", code=2)
    assert f"{tmp_path / 'a'}: leaf 'w' of uint4" in output
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a"]


def test_target_that_appears_during_import_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": np.zeros(3)}, tmp_path / "m.safetensors")
    monkeypatch.setattr(convert, "remove_stale_temporaries", lambda _, final: jct.save(final, {"w": np.ones(3)}))
    found = json_of("import", tmp_path / "m.safetensors", tmp_path / "out", code=4)
    assert found["message"].startswith(f"{tmp_path / 'out'}: already exists;")
    assert jct.load(tmp_path / "out")["w"].tolist() == [1, 1, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.safetensors", "out"]


def test_dry_run_of_import_shows_its_result(tmp_path: Path) -> None:
    save_file({"w": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32)}, tmp_path / "m.safetensors")
    arguments = ["import", tmp_path / "m.safetensors", tmp_path / "out"]
    assert run(*arguments, "--dry-run") == f"{tmp_path / 'out'}: would have 2 leaves, 36 B\n"
    assert run(*arguments, "--only", "b", "-n") == f"{tmp_path / 'out'}: would have 1 leaf, 12 B\n"
    found = json_of(*arguments, "--dry-run")
    assert (found["leaves"], found["bytes"]) == (2, 36)
    assert json_of(*arguments)["bytes"] >= 36
