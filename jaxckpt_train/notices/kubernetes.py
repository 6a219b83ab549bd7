"""Kubernetes: what would keep its request to leave, a SIGTERM, from this process is told when the job begins."""

from __future__ import annotations

import logging

from jaxckpt_train.notices.source import Notice
from jaxckpt_train.notices.surroundings import is_in_pod
from jaxckpt_train.store.machine import command_name

SHELLS = ("ash", "bash", "busybox", "dash", "ksh", "sh", "zsh")
_log = logging.getLogger("jaxckpt_train")


class KubernetesNotice:
    """Looks whether the SIGTERM of Kubernetes can reach this process. The signal itself is noticed as any other.

    It is sent to process 1 of the container alone. A shell there hands nothing on: the pod would be killed at the end
    of its grace period with nothing saved.
    """

    def start(self) -> None:
        """Warn of what is wrong."""
        if not is_in_pod():
            _log.warning(
                "KubernetesNotice: expected a pod of Kubernetes, found no KUBERNETES_SERVICE_HOST: leave this source "
                "out of `notices` elsewhere"
            )
        first = command_name(1)
        if first in SHELLS:
            _log.warning(
                "KubernetesNotice: process 1 of this container is a shell (%s), which hands no SIGTERM on to this "
                "process unless a trap of its does: start Python by `exec python ...`, or without a shell",
                first,
            )

    def stop(self) -> None:
        """Nothing to end."""

    def notice(self) -> Notice | None:
        """None: signals are noticed as such."""
        return None
