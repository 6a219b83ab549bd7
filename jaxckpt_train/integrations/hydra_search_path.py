"""The Hydra plugin: adds the presets and the schema of the `checkpoint` config group to every Hydra app.

The package installs this module as `hydra_plugins/jaxckpt_train_plugin.py`, where Hydra finds it. Every Hydra app of
the environment imports it at start-up, so it must not import JAX.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.plugins.search_path_plugin import SearchPathPlugin

from jaxckpt_train import config

PROVIDER = "jaxckpt_train"


class JaxckptTrainSearchPath(SearchPathPlugin):
    """Appends the presets to the search path. An app can override them with its own `checkpoint/default.yaml`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the directory of the presets: in the installed package, or next to it in a checkout."""
        package = Path(inspect.getfile(config)).parent
        folder = package if (package / "configs").is_dir() else package.parent
        search_path.append(PROVIDER, f"file://{folder / 'configs'}")


ConfigStore.instance().store(group="checkpoint", name="base_checkpoint", node=config.config_schema(), provider=PROVIDER)
