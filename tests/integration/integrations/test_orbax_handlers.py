"""The manager in Orbax's form with handlers of the user."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

import jaxckpt_train as jct
from jaxckpt_train.integrations import orbax_manager
from jaxckpt_train.integrations.orbax_manager import CheckpointManager, args

BOTH = pytest.mark.parametrize("library", [ocp, orbax_manager])


class TextHandler(ocp.CheckpointHandler):
    """Writes text within `save`."""

    def save(self, directory: Any, args: Any) -> None:
        (directory / "text").write_text("".join(args.item))

    def restore(self, directory: Any, args: Any) -> str:
        text: str = (directory / "text").read_text()
        return text.upper() if args.is_loud else text


@ocp.args.register_with_handler(TextHandler, for_save=True)
@dataclasses.dataclass
class TextSave(ocp.args.CheckpointArgs):
    item: Any


@ocp.args.register_with_handler(TextHandler, for_restore=True)
@dataclasses.dataclass
class TextRestore(ocp.args.CheckpointArgs):
    item: Any = None
    is_loud: bool = False


class SlowHandler(ocp.AsyncCheckpointHandler):
    """Copies its item, and writes it once `may_write` is set."""

    def __init__(self) -> None:
        self.may_write, self.pool = threading.Event(), ThreadPoolExecutor(1)
        self.error: OSError | None = None

    def save(self, directory: Any, args: Any) -> None:
        raise NotImplementedError

    async def async_save(self, directory: Any, args: Any) -> list[Future[None]]:
        text = "".join(args.item)

        def write() -> None:
            self.may_write.wait(20)  # a failed test must not wait without end
            (directory / "slow").write_text(text)
            if self.error is not None:
                raise self.error

        return [self.pool.submit(write)]

    def restore(self, directory: Any, args: Any) -> str:
        return (directory / "slow").read_text()

    def finalize(self, directory: Any) -> None:
        (directory / "slow").write_text((directory / "slow").read_text() + ".")


@ocp.args.register_with_handler(SlowHandler, for_save=True)
class SlowSave(TextSave): ...


@ocp.args.register_with_handler(SlowHandler, for_restore=True)
class SlowRestore(TextRestore): ...


class OldHandler(ocp.CheckpointHandler):
    """A handler of the old kind, without registered args."""

    def save(self, directory: Any, item: Any, *, end: str = "") -> None:
        (directory / "old").write_text(item + end)

    def restore(self, directory: Any, item: Any = None) -> str:
        return (directory / "old").read_text() + (item or "")


class TwiceHandler(ocp.JsonCheckpointHandler):
    """A handler of Orbax with another `async_save`."""

    async def async_save(self, directory: Any, args: Any) -> Any:
        return await super().async_save(directory, args=ocp.args.JsonSave([args.item, args.item]))


@ocp.args.register_with_handler(TwiceHandler, for_save=True)
class TwiceSave(ocp.args.JsonSave): ...


@ocp.args.register_with_handler(TwiceHandler, for_restore=True)
class TwiceRestore(ocp.args.JsonRestore): ...


@BOTH
@pytest.mark.parametrize("given", [{}, {"item_handlers": {"text": TextHandler()}}], ids=["by args", "by name"])
def test_handler_is_found_by_args_or_item_name(library: Any, given: Any, tmp_path: Path) -> None:
    text = ["a", "b"]
    with library.CheckpointManager(tmp_path, **given) as manager:
        items = {"text": TextSave(text)} | ({} if given else {"n": library.args.JsonSave([1])})
        assert manager.save(0, args=library.args.Composite(**items))
        manager.wait_until_finished()
        assert manager.restore(0).text == "ab"
        assert given or manager.restore(0).n == [1]
    with library.CheckpointManager(tmp_path, **given) as manager:
        assert manager.restore(0, args=library.args.Composite(text=TextRestore(is_loud=True))).text == "AB"


class NamedHandler(TextHandler):
    def __init__(self, name: str) -> None:
        self.name = name


@ocp.args.register_with_handler(NamedHandler, for_save=True)
class NamedSave(TextSave): ...


@ocp.args.register_with_handler(NamedHandler, for_restore=True)
class NamedRestore(TextRestore): ...


def test_registered_handler_with_arguments_has_to_be_given(tmp_path: Path) -> None:
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(jct.SettingsError, match=r"'a': .* NamedHandler: .* as item_handlers"),
    ):
        manager.save(0, args=args.Composite(a=NamedSave(["b"])))
    with CheckpointManager(tmp_path, item_handlers={"a": NamedHandler("x")}) as manager:
        assert manager.save(0, args=args.Composite(a=NamedSave(["b"])))


@BOTH
def test_registry_maps_args_to_handlers(library: Any, tmp_path: Path) -> None:
    registry, handler = ocp.handlers.DefaultCheckpointHandlerRegistry(), TwiceHandler()
    registry.add("twice", TwiceSave, handler)
    registry.add("twice", TwiceRestore, handler)
    with library.CheckpointManager(tmp_path, handler_registry=registry) as manager:
        manager.save(0, args=library.args.Composite(twice=TwiceSave(3), n=library.args.JsonSave([1])))
        manager.wait_until_finished()
        requested = library.args.Composite(twice=TwiceRestore(), n=library.args.JsonRestore())
        restored = manager.restore(0, args=requested)
        assert (restored.twice, restored.n) == ([3, 3], [1])


def test_async_handler_copies_before_save_returns(tmp_path: Path) -> None:
    handler, text = SlowHandler(), ["a", "b"]
    with CheckpointManager(tmp_path, item_handlers=handler) as manager:
        assert manager.save(0, args=SlowSave(text))
        text[0] = "changed"
        assert manager.is_saving_in_progress()
        handler.may_write.set()
        manager.wait_until_finished()
        assert manager.restore(0, args=SlowRestore()) == "ab."


@BOTH
def test_handlers_of_checkpointers_take_items(library: Any, tmp_path: Path) -> None:
    several = {"old": ocp.Checkpointer(OldHandler()), "text": ocp.Checkpointer(TextHandler())}
    with library.CheckpointManager(tmp_path, several) as manager:
        assert manager.save(0, {"old": "a", "text": "b"}, save_kwargs={"old": {"end": "!"}})
        more = {"text": {"is_loud": True}}
        restored = manager.restore(0, {"old": "?", "text": None}, restore_kwargs=more)
        assert (restored["old"], restored["text"]) == ("a!?", "B")


def test_background_error_stays_for_the_saving_thread(tmp_path: Path) -> None:
    handler = SlowHandler()
    handler.error = OSError("the disk of the handler")
    with CheckpointManager(tmp_path, item_handlers=handler) as manager, ThreadPoolExecutor(2) as pool:
        assert manager.save(0, args=SlowSave("a"))
        waits = [pool.submit(manager.wait_until_finished) for _ in range(2)]
        handler.may_write.set()
        for wait in waits:
            assert wait.exception() is handler.error
        with pytest.raises(OSError, match="of the handler"):
            manager.wait_until_finished()
        assert pool.submit(manager.wait_until_finished).exception() is None
        assert manager.all_steps() == []
        handler.error = None
        assert manager.save(1, args=SlowSave("a"))
        manager.wait_until_finished()
        assert manager.all_steps() == [1]


def test_error_of_handler_fails_the_save(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, item_handlers=TextHandler()) as manager:
        manager.save(0, args=TextSave([1]))
        with pytest.raises(TypeError, match="expected str"):
            manager.wait_until_finished()
        assert manager.all_steps() == []


def test_files_of_handler_are_part_of_checkpoint(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(0, args=args.Composite(text=TextSave("abc"), n=args.JsonSave(1)))
        manager.wait_until_finished()
        step = Path(jct.StepManager(tmp_path).path(0))
        assert jct.verify(step).ok
        assert jct.load_checkpointables(step, {"n": None})["n"] == jct.JsonValue(1)
        (step / "text" / "text").write_text("abd")
        assert not jct.verify(step).ok
        with pytest.raises(jct.CorruptCheckpointError, match="text"):
            manager.restore(0)
    with CheckpointManager(tmp_path) as manager, pytest.raises(jct.CheckpointError, match="text"):
        manager.restore(0)
