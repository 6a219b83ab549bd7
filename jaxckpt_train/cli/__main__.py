"""`python -m jaxckpt_train.cli`."""

from __future__ import annotations

from jaxckpt_train.cli.start import main

main()
