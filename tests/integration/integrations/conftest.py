"""Keras has its JAX backend in these tests; it reads that when it is first imported."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"
