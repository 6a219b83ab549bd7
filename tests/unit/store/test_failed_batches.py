"""What a batch of work leaves in memory, done, failed, or wanted by nobody any more: nothing."""

from __future__ import annotations

import contextlib
import weakref

import pytest

from jaxckpt_train.store.threads import Workers, _Batch, paused_collection

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("how", ["closed early", "an error of an item", "an error of the consumer", "all at once"])
def test_what_a_failed_batch_held_is_freed_with_its_error(how: str) -> None:
    """Without waiting for the collector: a load that failed would else keep what it had read."""

    class Held:
        pass

    held = [Held() for _ in range(3)]
    references = [weakref.ref(each) for each in held]

    def work(item: Held) -> None:
        if how in ("an error of an item", "all at once"):
            raise ValueError("refused")

    def use(items: list[Held]) -> None:
        workers = Workers(2, "test")
        if how == "all at once":
            workers.run_all(work, items)
        with contextlib.closing(workers.run_each(work, items)) as results:
            for _ in results:
                if how == "an error of the consumer":
                    raise ValueError("refused")
                break

    with paused_collection():
        with contextlib.suppress(ValueError):
            use(held)
        held.clear()
        assert [reference() for reference in references] == [None] * 3


def test_once_it_is_done_no_thread_holds_work() -> None:
    def work(item: int) -> None:
        pass

    there, at_end = weakref.ref(work), list[bool]()
    batch = _Batch(work, [1, 2], lambda: at_end.append(there() is not None))
    del work
    for _ in range(3):
        batch.run_next()
    assert batch.done.is_open()
    assert at_end == [False]
