"""Interrupts that come before a chosen line of chosen functions, so that a test can try each of them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def interrupt_at(number: int, *codes: Any) -> Iterator[list[int]]:
    """Raises KeyboardInterrupt before the so many-th line of these functions; the list counts the lines."""
    seen, chosen = [0], {code.__code__ for code in codes}

    def trace(frame: Any, *_: Any) -> Any:
        return Lines() if frame.f_code in chosen else None

    class Lines:
        """The lines of one call, each counted once: the end of a `with`, its line again, cannot be interrupted."""

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
