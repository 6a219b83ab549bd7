"""Test support for training loops: a proof that a loop resumes exactly. Importing it does not import JAX."""

from jaxckpt_train.testing.resume_proof import (
    ResumeNotExactError,
    ResumeNotProvenError,
    ResumeProof,
    assert_resume_exact,
)

__all__ = ["ResumeNotExactError", "ResumeNotProvenError", "ResumeProof", "assert_resume_exact"]
