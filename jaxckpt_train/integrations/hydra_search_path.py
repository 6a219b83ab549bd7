"""The Hydra plugin: makes the presets and the schema of `checkpoint` known to every Hydra app.

Hydra finds it because it is installed as `hydra_plugins/jaxckpt_train_plugin.py`. It is imported whenever any Hydra app
of the environment starts, so it must import nothing heavy: no jax.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.plugins.search_path_plugin import SearchPathPlugin

from jaxckpt_train.config import CheckpointConfig

PROVIDER = "jaxckpt_train"


def presets_directory() -> Path:
    """Where the presets lie: inside the package when installed, beside it in a checkout."""
    package = Path(inspect.getfile(CheckpointConfig)).parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


class JaxckptTrainSearchPath(SearchPathPlugin):
    """Puts the presets after the app's own configs, so that an app can have a `checkpoint/default.yaml` of its own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the directory of the presets; called by Hydra."""
        search_path.append(PROVIDER, f"file://{presets_directory()}")


ConfigStore.instance().store(group="checkpoint", name="base_checkpoint", node=CheckpointConfig, provider=PROVIDER)
