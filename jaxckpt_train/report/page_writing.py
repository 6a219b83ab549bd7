"""Puts a page where it was asked for, whole or not at all; only a report of before is replaced."""

from __future__ import annotations

import errno
import os
import secrets

from jaxckpt_train.errors import CheckpointExistsError, StorageError
from jaxckpt_train.report.page import MARK
from jaxckpt_train.store.backend import HALF_MADE, Backend
from jaxckpt_train.store.plain_files import read_head


def check_place(backend: Backend, path: str) -> bool:
    """Whether there is a report of before at a path; else there is nothing.

    Raises:
        CheckpointExistsError: there is something else.
        StorageError: the directory is not there, or cannot be read.
    """
    folder, name = os.path.split(path)
    try:
        names = {entry.name for entry in backend.list(folder)}
    except StorageError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        told = "expected the directory of the page that is to be written, found none; make it, or name another file"
        raise StorageError(error.errno, told, folder) from error
    if name not in names:
        return False
    if read_head(backend, folder, name, len(MARK)) != MARK.encode():
        raise CheckpointExistsError(
            f"{path}: expected nothing there, or a report of before, found something else; name another file by -o"
        )
    return True


def write_page(backend: Backend, path: str, page: str) -> None:
    """Write it.

    Raises:
        CheckpointExistsError: something else is there.
        StorageError: the file system refused.
    """
    data = page.encode()
    if not check_place(backend, path) and backend.write_new(path, data):
        return
    check_place(backend, path)  # somebody may have made it meanwhile
    beside = f"{os.path.dirname(path)}/{HALF_MADE[0]}{secrets.token_hex(8)}"
    try:
        backend.write_new(beside, data)
        backend.exchange(beside, path, sync=False)
    finally:
        backend.remove(beside)
