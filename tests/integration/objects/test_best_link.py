"""The link to the best step on an object store: the record of the run has it, and loads follow it."""

from __future__ import annotations

import numpy as np

import jaxckpt_train as jct
from jaxckpt_train.inspection.runs import links_to_steps
from jaxckpt_train.run.record import FoundRecord
from jaxckpt_train.run.retention import BestLink
from jaxckpt_train.store.backends.by_path import backend_for
from tests.support.objects.stand_in import StandIn

BACKEND = backend_for(jct.StoreSettings())


def save(manager: jct.StepManager, step: int, **metrics: float) -> None:
    manager.save(step, {"state": {"w": np.full(4, step)}}, metrics=metrics)
    manager.wait()


def best(run: str, name: str = "best") -> int | None:
    """The step that a load of the link finds."""
    try:
        return int(jct.load(f"{run}/{name}")["w"][0])
    except jct.NotACheckpointError:
        return None


def test_load_follows_link_to_best_step(cloud: StandIn) -> None:
    run = cloud.url("run")
    with jct.StepManager(run, best_link=BestLink("loss")) as manager:
        save(manager, 1)
        assert best(run) is None
        for step, loss, expected in ((2, 0.5, 2), (3, 0.7, 2), (4, 0.4, 4), (5, float("nan"), 4)):
            save(manager, step, loss=loss)
            assert best(run) == expected
        manager.attach_metrics(1, {"loss": 0.1})
        assert best(run) == 1
        assert links_to_steps(BACKEND, run) == {manager.path(1).rpartition("/")[2]: "best"}
    assert jct.metadata(f"{run}/best").step == 1
    assert jct.verify(f"{run}/best").ok


def test_link_costs_no_request_of_a_save(cloud: StandIn) -> None:
    with jct.StepManager(cloud.url("run"), best_link=BestLink("loss")) as manager:
        save(manager, 1, loss=1.0)
        start = len(cloud.requests)
        save(manager, 2, loss=0.5)
        assert len(cloud.requests) - start == 6


def test_record_never_has_a_link_without_its_step(cloud: StandIn) -> None:
    run, policy = cloud.url("run"), jct.LatestN(1)
    with jct.StepManager(run, preservation_policy=policy, best_link=BestLink("acc", "max")) as manager:
        for step in range(1, 6):
            save(manager, step, acc=-float(step))
            record = FoundRecord(BACKEND, run).record
            assert record.links["best"] in (record.steps or {})
    assert best(run) == 5


def test_later_jobs_make_and_keep_the_link(cloud: StandIn) -> None:
    run = cloud.url("run")
    with jct.StepManager(run) as manager:
        save(manager, 1, loss=0.3)
        save(manager, 2, loss=0.2)
    with jct.StepManager(run, best_link=BestLink("loss", name="top")) as manager:
        manager.own()
        assert best(run, "top") == 2
    with jct.StepManager(run) as manager:  # without the link
        save(manager, 3, loss=0.1)
        assert best(run, "top") == 2
    with jct.StepManager(run, preservation_policy=jct.LatestN(1)) as manager:
        manager.retain()
        assert manager.steps == [3]
        assert best(run, "top") is None


def test_damaged_step_loses_the_link(cloud: StandIn) -> None:
    run = cloud.url("run")
    with jct.StepManager(run, best_link=BestLink("loss")) as manager:
        save(manager, 1, loss=0.3)
        save(manager, 2, loss=0.2)
        manager._run.set_aside(manager._run.candidates(2)[0], "damaged")
        assert best(run) == 1


def test_checkpoint_at_the_name_of_the_link_comes_first(cloud: StandIn) -> None:
    run = cloud.url("run")
    with jct.StepManager(run, best_link=BestLink("loss")) as manager:
        save(manager, 1, loss=0.3)
    jct.save(f"{run}/best", {"w": np.full(4, 9)})
    assert best(run) == 9
