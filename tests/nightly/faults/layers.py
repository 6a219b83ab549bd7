"""Recognize the check that noticed damage, by the begin of its error message."""

from __future__ import annotations

import re

SEGMENT, FILE = r"/[\w./-]+\.safetensors: ", r"/[\w./-]+\.json: "
# Matched after the directory of the step; the first match counts. In the order of the checks of a load.
_MESSAGES = (
    ("COMMIT: missing", r": (has no COMMIT: |expected a checkpoint directory, |not a checkpoint: )"),
    ("COMMIT: size", r"/COMMIT: \d+ bytes, expected at most "),
    ("COMMIT: content", r"/COMMIT: (not valid: |format )"),
    ("manifest: missing", r"/manifest\.json: missing, but COMMIT refers to it$"),
    ("manifest: size", r"/manifest\.json: \d+ bytes, (but COMMIT says \d+|expected at most \d+)$"),
    ("manifest: SHA-256", r"/manifest\.json: damaged: its SHA-256 differs from the one in COMMIT$"),
    ("manifest: content", r"(/manifest\.json: |: tree of )"),
    ("segment: missing", SEGMENT + "the manifest names this segment, but: "),
    ("segment: size", SEGMENT + r"\d+ bytes, but the manifest says \d+$"),
    ("segment: ends early", SEGMENT + r"(.+: )?ends at byte \d+, expected more$"),
    ("segment: digest of the header", SEGMENT + r"its header is not what was saved \([\w-]+ differs\)$"),
    ("segment: digest of a block", SEGMENT + r"bytes \d+ to \d+ of .+ are not what was saved"),
    ("segment: content of the header", SEGMENT),
    ("value: missing", FILE + "the manifest names this file, but: "),
    ("value: size", FILE + r"\d+ bytes, but the manifest says \d+$"),
    ("value: ends early", FILE + r"(.+: )?ends at byte \d+, expected more$"),
    ("value: digest", FILE + r"bytes \d+ to \d+ (of 'the file' )?are not what was saved"),
    ("value: content", FILE + "not JSON: "),
)
_PATTERNS = tuple((layer, re.compile(message, re.DOTALL)) for layer, message in _MESSAGES)
LAYERS = tuple(layer for layer, _ in _MESSAGES)


def layer_of(problem: str, directory: str) -> str | None:
    """Return the check that reports this problem of the checkpoint in a directory, or None if it is unknown.

    A storage error has its path at the end, so it is not of a check.
    """
    if not problem.startswith(directory):
        return None
    rest = problem[len(directory) :]
    return next((layer for layer, pattern in _PATTERNS if pattern.match(rest)), None)
