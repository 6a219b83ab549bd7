"""A batch of work leaves nothing in memory: finished, failed, or abandoned."""

from __future__ import annotations

import contextlib
import weakref

import pytest

from jaxckpt_train.store.threads import Workers, _Batch, paused_collection

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("how", ["closed early", "an error of an item", "an error of the consumer", "all at once"])
def test_failed_batch_frees_its_items(how: str) -> None:
    """Freed without the garbage collector; otherwise a failed load would keep the data that it had read."""

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


def test_finished_batch_releases_its_function() -> None:
    def work(item: int) -> None:
        pass

    function, alive_at_end = weakref.ref(work), list[bool]()
    batch = _Batch(work, [1, 2], lambda: alive_at_end.append(function() is not None))
    del work
    for _ in range(3):
        batch.run_next()
    assert batch.done.is_open()
    assert alive_at_end == [False]
