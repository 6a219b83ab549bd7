"""What a proof of an exact resume fails with; pytest shows both as failures of the test.

AssertionError
├── ResumeNotExactError      the interrupted run differs from the uninterrupted one
└── ResumeNotProvenError     a run crashed, hung, never saved, or never got to its interruption
"""

from __future__ import annotations


class ResumeNotExactError(AssertionError):
    """An interrupted run differs from an uninterrupted one; the message begins with the first difference.

    Attributes:
        causes: likely causes, the likeliest first.
    """

    def __init__(self, message: str, causes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.causes = causes


class ResumeNotProvenError(AssertionError):
    """The runs did not get so far that they could be compared; the message says why."""
