"""What fails besides, while another error is on its way: it is noted there, and does not hide it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from jaxckpt_train.exit_code import is_success

_log = logging.getLogger("jaxckpt_train")


@contextlib.contextmanager
def closing_besides(error: BaseException | None, subject: str) -> Iterator[None]:
    """Within: `subject` is closed, as the end of a `with` does on `error`; what fails then is a note of that error.

    An error that says that all is well, as `sys.exit(0)` does, tells nobody: what failed is raised in its place. An
    interrupt meanwhile always comes through, or whoever catches the error would go on.
    """
    try:
        yield
    except BaseException as failure:
        if error is None or is_success(error) or not isinstance(failure, Exception):
            raise
        _log.exception("closing %s failed while another error was on its way", subject)
        told = str(failure) or type(failure).__name__
        error.add_note(f"besides, closing {subject} failed: {told}")
