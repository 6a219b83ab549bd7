"""Handlers that users register, and which handler is chosen for an object."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.checkpointables import handlers


@pytest.fixture(autouse=True)
def _registry_as_it_was() -> Iterator[None]:
    before = list(handlers._registered)
    yield
    handlers._registered[:] = before


class Vocabulary:
    def __init__(self, words: list[str]) -> None:
        self.words = words


class Special(Vocabulary):
    pass


class AsTree:
    """Stores the words as a tree."""

    kind = "test.vocabulary"

    def stage(self, value: Vocabulary) -> jct.Staged:
        return jct.Staged(tree={"words": list(value.words), "ids": np.arange(len(value.words))})

    def restore(self, target: Vocabulary | None, saved: jct.Saved) -> Vocabulary:
        tree = saved.tree(None)
        found = target or Vocabulary([])
        found.words = [*tree["words"], str(len(tree["ids"]))]
        return found


class AsValue:
    def stage(self, value: Vocabulary) -> jct.Staged:
        return jct.Staged(value=value.words)

    def restore(self, target: Any, saved: jct.Saved) -> Any:
        return Vocabulary([*saved.value(), saved.kind, saved.name])


class AsFiles:
    early = True

    def stage(self, value: Vocabulary) -> jct.Staged:
        text = "\n".join(value.words)
        return jct.Staged(write_files=lambda path: (path / "words.txt").write_text(text) and None)

    def restore(self, target: Any, saved: jct.Saved) -> Any:
        return Vocabulary((saved.directory() / "words.txt").read_text().split("\n"))


def saved(path: Path, value: Vocabulary) -> Path:
    jct.save_checkpointables(path, {"words": value, "state": {"w": jnp.ones(2)}})
    return path


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (AsTree(), ["a", "b", "2"]),
        (AsValue(), ["a", "b", f"{__name__}.Vocabulary", "words"]),
        (AsFiles(), ["a", "b"]),
    ],
    ids=["tree", "value", "files"],
)
def test_a_registered_handler_takes_instances_of_its_type(handler: Any, expected: list[str], tmp_path: Path) -> None:
    jct.register_handler(Vocabulary, handler)
    path = saved(tmp_path / "c", Vocabulary(["a", "b"]))
    assert jct.load_checkpointables(path)["words"].words == expected  # found by its kind
    assert jct.load_checkpointables(path, {"words": Vocabulary([])})["words"].words == expected
    assert jct.load_checkpointables(path, {"words": Special([])})["words"].words == expected
    assert jct.verify(path).ok


def test_the_newest_registration_that_fits_wins(tmp_path: Path) -> None:
    jct.register_handler(Special, AsFiles())
    jct.register_handler(Vocabulary, AsTree())
    assert jct.metadata(saved(tmp_path / "a", Special(["x"]))).checkpointables["words"].kind == "test.vocabulary"
    jct.register_handler(Special, AsFiles())
    assert jct.metadata(saved(tmp_path / "b", Special(["x"]))).checkpointables["words"].kind == f"{__name__}.Special"


def test_registered_handler_wins_over_builtin_handler(tmp_path: Path) -> None:
    class Doubling:
        def stage(self, value: dict[str, Any]) -> jct.Staged:
            return jct.Staged(tree={key: 2 * leaf for key, leaf in value.items()})

        def restore(self, target: Any, saved: jct.Saved) -> Any:
            return saved.tree(target)

    jct.register_handler(dict, Doubling())
    jct.save_checkpointables(tmp_path / "c", {"state": {"w": 3}})
    assert jct.load_checkpointables(tmp_path / "c", {"state": {"w": 0}}) == {"state": {"w": 6}}


def test_without_the_handler_the_rest_still_loads(tmp_path: Path) -> None:
    jct.register_handler(Vocabulary, AsTree())
    path = saved(tmp_path / "c", Vocabulary(["a"]))
    handlers._registered.clear()
    with pytest.raises(jct.MismatchError, match=r"'words': no handler .* 'test.vocabulary'"):
        jct.load_checkpointables(path)
    assert set(jct.load_checkpointables(path, {"state": None})) == {"state"}
    assert jct.verify(path).ok


def test_invalid_handler_registration_is_refused() -> None:
    with pytest.raises(jct.SettingsError, match="register_handler: expected a type, found 'Vocabulary'"):
        jct.register_handler("Vocabulary", AsTree())  # type: ignore[arg-type]
    with pytest.raises(jct.SettingsError, match=r"Vocabulary has no method stage\(\)"):
        jct.register_handler(Vocabulary, object())


def test_a_handler_that_stages_something_else_is_refused(tmp_path: Path) -> None:
    class Wrong(AsTree):
        def stage(self, value: Vocabulary) -> Any:
            return {"words": value.words}

    jct.register_handler(Vocabulary, Wrong())
    with pytest.raises(jct.SettingsError, match=r"jaxckpt_train.Staged, found \{'words'"):
        saved(tmp_path / "c", Vocabulary(["a"]))
    assert list(tmp_path.iterdir()) == []


def test_a_handler_that_fails_while_writing_leaves_nothing(tmp_path: Path) -> None:
    class Broken(AsFiles):
        def stage(self, value: Vocabulary) -> jct.Staged:
            def write(path: Path) -> None:
                (path / "half").write_text("half")
                raise ZeroDivisionError("in the middle")

            return jct.Staged(write_files=write)

    jct.register_handler(Vocabulary, Broken())
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        saved(tmp_path / "c", Vocabulary(["a"]))
    assert list(tmp_path.iterdir()) == []


def test_early_checkpointables_are_restored_before_the_arrays(tmp_path: Path) -> None:
    order: list[str] = []

    class Late(AsTree):
        kind = "late"

        def restore(self, target: Any, saved: jct.Saved) -> Any:
            order.append(saved.name)

    class Early(Late):
        kind = "early"
        early = True

    jct.register_handler(Vocabulary, Late())
    jct.register_handler(Special, Early())
    jct.save_checkpointables(
        tmp_path / "c", {"a": Vocabulary([]), "b": Special([]), "c": Vocabulary([]), "d": Special([])}
    )
    found = jct.load_checkpointables(tmp_path / "c")
    assert order == ["b", "d", "a", "c"]
    assert list(found) == ["a", "b", "c", "d"]
