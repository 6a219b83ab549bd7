"""`jaxckpt show`: the tree of a checkpoint and its JSON items, without a byte of its arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxckpt_train as jct
from tests.support.commands import json_of, printed, refused, run
from tests.support.runs import folder_of, made_run, remove_the_segment, step_path, truncate_the_manifest

TREE: dict[str, Any] = {
    "params": {"kernel": np.zeros((4, 3), ml_dtypes.bfloat16), "bias": np.ones(3, np.float32)},
    "key": jax.random.key(0),
    "n": 7,
    "large": 1 << 70,
    "rate": 0.5,
    "name": "a" * 100,
    "nothing": None,
    "empty": {},
}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    jct.save(tmp_path / "single", TREE, custom_metadata={"why": "a test"})
    return tmp_path / "single"


def leaves(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"{each['part']}/{each['path']}": each for each in found["leaves"]}


def test_all_leaves_are_shown_with_types(single: Path) -> None:
    found = json_of("show", single)
    keys = {"path", "kind", "created", "custom_metadata", "versions", "parts", "bytes", "leaves", "skipped"}
    assert set(found) == keys
    assert (found["path"], found["kind"]) == (str(single), "jaxckpt_train")
    assert found["custom_metadata"] == {"why": "a test"}
    assert found["bytes"] == jct.metadata(single).bytes
    there = leaves(found)
    assert set(there) == {f"state/{name}" for name in TREE if name != "params"} | {
        "state/params/kernel",
        "state/params/bias",
    }
    kernel = there["state/params/kernel"]
    assert (kernel["shape"], kernel["dtype"], kernel["bytes"], kernel["chunks"]) == ([4, 3], "bfloat16", 24, 1)
    assert kernel["form"] == "bfloat16[4,3]"
    assert there["state/key"]["form"] == "key<threefry2x32>[]"
    assert (there["state/n"]["value"], there["state/n"]["form"]) == (7, "Python int")
    assert there["state/large"]["value"] == str(1 << 70)  # readers of JSON would round a number
    assert (there["state/rate"]["value"], there["state/name"]["value"]) == (0.5, "a" * 100)
    assert there["state/nothing"] == {"part": "state", "path": "nothing", "form": "None", "value": None}
    assert there["state/empty"]["form"] == "an empty container"
    assert found["parts"] == [{"name": "state", "kind": "pytree", "bytes": 24 + 12 + 8}]


def test_text_shows_the_same_leaves(single: Path) -> None:
    text = printed("show", single)
    assert text.splitlines()[0] == f"{single}  (jaxckpt_train)"
    lines = {line.split()[0]: " ".join(line.split()) for line in text.splitlines()}
    assert lines["state/params/kernel"] == "state/params/kernel bfloat16[4,3] 24 B"
    assert lines["state/n"] == "state/n Python int 7"
    assert lines["state/name"].endswith("a... (102 characters)")
    assert text.splitlines()[-1] == "9 leaves, 44 B"


def test_sharding_is_shown(tmp_path: Path) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", None))
    jct.save(tmp_path / "c", {"w": jax.device_put(jnp.zeros((8, 6)), sharding)})
    (leaf,) = json_of("show", tmp_path / "c")["leaves"]
    assert leaf["chunks"] == 4
    assert leaf["sharding"]["mesh"] == {"data": 4, "model": 2}
    assert leaf["sharding"]["spec"][0] == "data"
    assert " 4x2 data" in printed("show", tmp_path / "c")


def test_patterns_select_leaves_by_path(single: Path) -> None:
    assert set(leaves(json_of("show", single, "params/*"))) == {"state/params/kernel", "state/params/bias"}
    assert set(leaves(json_of("show", single, "state/params/b*", "n"))) == {"state/params/bias", "state/n"}
    assert "selects none of 9 leaves" in refused("show", single, "parms/*", code=2)


def test_a_checkpointable_is_chosen_by_its_name(tmp_path: Path) -> None:
    jct.save_checkpointables(tmp_path / "c", {"a": {"w": np.zeros(2)}, "b": {"w": np.zeros(3)}})
    assert set(leaves(json_of("show", tmp_path / "c"))) == {"a/w", "b/w"}
    assert set(leaves(json_of("show", tmp_path / "c", "--part", "b"))) == {"b/w"}
    assert "'c'" in refused("show", tmp_path / "c", "--part", "c", code=2)


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("params/** ", "params/**"),
        (" params/**", "params/**"),
        ("params.bias", "params/bias"),
        ("parms/**", "params/**"),
    ],
)
def test_unmatched_pattern_names_existing_keys(tmp_path: Path, pattern: str, meant: str) -> None:
    tree = {"params": {"bias": 1, "norm": 2}, "a/b": 3, "emb~d": {"w": 4}, "layers": {"0": {"w": 5}}}
    jct.save(tmp_path / "c", tree)
    with pytest.raises(jct.MismatchError) as raised:
        jct.load(tmp_path / "c", only=[pattern])
    messages = [str(raised.value), refused("show", tmp_path / "c", pattern, code=2)]
    messages += [refused("export", tmp_path / "c", tmp_path / "x", "--to", "safetensors", "--only", pattern, code=2)]
    messages += [refused("diff", tmp_path / "c", tmp_path / "c", "--only", pattern, code=2)]
    messages += [refused("import", tmp_path / "c", tmp_path / "x", "--op", f"drop '{pattern}'", code=2)]
    for message in messages:
        assert f'did you mean "{meant}"?' in message
    for message in messages[:4]:
        assert "'a~1b', 'emb~0d/**', 'layers/" in message or "'layers/~s0/**'" in message or "'params/norm'" in message
        assert "/ is ~1" in message or "~" not in message
    assert len(jct.load(tmp_path / "c", only=meant)) == 1


def test_suggested_keys_follow_the_matching_prefix(tmp_path: Path) -> None:
    tree = {"opt": {f"m{n}": n for n in range(50)}, "params": {"a": {"w": 1}, "b": 2}}
    jct.save(tmp_path / "c", tree)
    with pytest.raises(jct.MismatchError, match=r"52 leaves: 'params/a/\*\*', 'params/b'$"):
        jct.load(tmp_path / "c", only="params/zzzzzz/**")
    with pytest.raises(jct.MismatchError, match=r"52 leaves: 'opt/m0', .*, \.\.\.$"):
        jct.load(tmp_path / "c", only="opt/*/zzzzz")
    with pytest.raises(jct.MismatchError, match=r"has 'opt/\*\*', 'params/\*\*'"):
        jct.load(tmp_path / "c", rename={"zzz": "y"})


class Iterator:
    def get_state(self) -> dict[str, Any]:
        return {"index": 12, "files": ["a", "b"]}

    def set_state(self, state: dict[str, Any]) -> None: ...


def test_json_items_are_printed(tmp_path: Path) -> None:
    config = {"lr": 0.5, "note": "tab\there", "large": 1 << 60, "bad": float("nan")}
    jct.save_checkpointables(
        tmp_path / "c", {"state": {"w": np.zeros(2)}, "config": jct.JsonValue(config), "data": Iterator()}
    )
    text = printed("show", tmp_path / "c")
    assert '  config/p00000.json: {"lr": 0.5, "note": "tab\\there"' in text
    assert "data/index" in text
    parts = {part["name"]: part for part in json_of("show", tmp_path / "c")["parts"]}
    (item,) = parts["config"]["items"]
    assert item["value"] == {"lr": 0.5, "note": "tab\there", "large": str(1 << 60), "bad": "nan"}
    assert "items" not in parts["state"]
    assert "p00000.json" not in printed("show", tmp_path / "c", "--part", "state")
    assert "p00000.json" not in printed("show", tmp_path / "c", "w")


def test_large_and_damaged_json_items_are_omitted(tmp_path: Path) -> None:
    parts = {"state": {"w": np.zeros(2)}, "long": jct.JsonValue("x" * 5000), "huge": jct.JsonValue("y" * (2 << 20))}
    jct.save_checkpointables(tmp_path / "c", parts)
    text = printed("show", tmp_path / "c")
    assert "(5,002 characters)" in text
    assert "huge/p00000.json: 2.0 MiB, not shown" in text
    (folder_of(tmp_path / "c") / "long" / "p00000.json").write_text("[]".ljust(5002))
    done = run("show", tmp_path / "c")
    assert done.exit_code == 1
    assert "long/p00000.json: bytes 0 to 5002" in done.stdout
    assert "state/w" in done.stdout


def test_show_uses_newest_or_given_step(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 1, 2, 3)
    truncate_the_manifest(step_path(run, 3))
    assert json_of("show", run)["step"] == 2
    assert json_of("show", run, "--step", 1)["path"] == str(step_path(run, 1))
    assert "has no step 7" in refused("show", run, "--step", 7, code=3)
    assert "manifest.json: 100 bytes, but COMMIT says" in refused("show", run, "--step", 3, code=1)


def test_show_reads_no_arrays(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 1)
    whole = json_of("show", run)
    remove_the_segment(step_path(run, 1))
    assert json_of("show", run) == whole


def test_path_without_a_checkpoint_exits_with_3(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no checkpoint")
    assert "found nothing" in refused("show", tmp_path / "gone", code=3)
    assert "found nothing" in refused("show", tmp_path / "gone" / "further", code=3)
    assert "found an empty directory" in refused("show", tmp_path / "empty", code=3)
    refused("show", tmp_path / "file", code=3)
    assert "a run with a step 1" in refused("show", tmp_path / "empty", "--step", 1, code=3)


def test_control_characters_in_names_are_escaped(tmp_path: Path) -> None:
    jct.save(tmp_path / "c", {"\x1b[31mred\nline": np.zeros(1), "名": 1})
    lines = printed("show", tmp_path / "c").splitlines()
    assert "state/\\x1b[31mred\\nline" in [line.split()[0] for line in lines]
    assert "state/名" in [line.split()[0] for line in lines]
    assert "\x1b" not in "".join(lines)
