"""What fails besides, while another error is on its way: it is noted there, and does not hide it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

_log = logging.getLogger("jaxckpt_train")


@contextlib.contextmanager
def closing_besides(error: BaseException | None, subject: str) -> Iterator[None]:
    """Within: `subject` is closed, as the end of a `with` does on `error`; what fails then is a note of that error."""
    try:
        yield
    except BaseException as failure:
        if error is None:
            raise
        _log.exception("closing %s failed while another error was on its way", subject)
        error.add_note(f"besides, closing {subject} failed: {failure}")
