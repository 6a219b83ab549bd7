"""What is told when the file system refuses something: the reason, and what to do about it."""

from __future__ import annotations

import errno
import os

from jaxckpt_train.errors import StorageError

_ADVICE = {
    errno.ENOSPC: "free some space or choose another directory",
    errno.EDQUOT: "your quota is used up: free some space or choose another directory",
    errno.EACCES: "this user may not do that there: choose another directory or change its permissions",
    errno.EPERM: "this user may not do that there: choose another directory or change its permissions",
    errno.EROFS: "the file system is read-only: choose another directory",
    errno.ENOTDIR: "a file is where a directory should be: choose another path (or is it a link to nothing?)",
    errno.ELOOP: "it is a symbolic link, none of which is followed to a file: put the file itself in its place",
    errno.EMFILE: "too many open files: raise `ulimit -n`",
    errno.EFBIG: "a file may not be that large: raise `ulimit -f`, or set a smaller `segment_bytes`",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EIO: "the disk or its connection failed: do not trust it further",
}


def refusal(code: int, action: str, path: str, said: str | None = None) -> StorageError:
    """What to raise when the file system refused: the action, the reason by its number, and what to do."""
    advice = f"; {_ADVICE[code]}" if code in _ADVICE else ""
    return StorageError(code, f"cannot {action}: {said or os.strerror(code)}{advice}", path)
