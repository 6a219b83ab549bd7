"""Interrupts at a chosen moment: before a line of chosen functions, or during the wait for a save."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jaxckpt_train.pending import PendingSave


@contextlib.contextmanager
def interrupt_at(number: int, *codes: Any) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt before line `number` of these functions; the yielded list counts the lines."""
    seen, chosen = [0], {code.__code__ for code in codes}

    def trace(frame: Any, *_: Any) -> Any:
        return Lines() if frame.f_code in chosen else None

    class Lines:
        """Counts each line of a call once: the end of a `with` repeats its line, and cannot be interrupted."""

        def __init__(self) -> None:
            self.lines: set[int] = set()

        def __call__(self, frame: Any, event: str, _: Any) -> Any:
            if event == "line" and frame.f_lineno not in self.lines:
                self.lines.add(frame.f_lineno)
                seen[0] += 1
                if seen[0] == number:
                    raise KeyboardInterrupt
            return self

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(before)


def once_waiting(call: Callable[[], object]) -> threading.Thread:
    """Call it on another thread once the main thread waits for a save."""
    main, pause = threading.main_thread().ident, threading.Event()

    def is_waiting() -> bool:
        frame = sys._current_frames().get(main or 0)
        while frame is not None and frame.f_code is not PendingSave.wait_for.__code__:
            frame = frame.f_back
        return frame is not None

    def work() -> None:
        while not is_waiting():
            pause.wait(0.01)
        call()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
