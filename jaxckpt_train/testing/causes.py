"""Likely causes of a difference between runs: first those that the records suggest, then common ones."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence

from jaxckpt_train.testing.differences import (
    Difference,
    Kind,
    differing_names,
    fault_of,
    numbers_of,
    relative_difference,
)
from jaxckpt_train.testing.processes import Attempt, Leaf, Update

_OPTIMIZER_NAME = re.compile(
    r"(^|[/_.])(opt|optim|optimizer|adam\w*|sgd|mu|nu|trace|momentum|velocity|moments?)($|[/_.])", re.I
)
_RATE = re.compile(r"(^|[/_. ])(lr|learning_?rate|step_?size|schedule)($|[/_. ])", re.I)
_WHOLE = ("int", "uint", "python int")
ROUNDING = 1e-4  # relative differences below this can come from another order of floating-point additions


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Facts about runs that differ."""

    attempts: Sequence[Attempt]  # the processes of the interrupted run
    straight: Attempt  # the uninterrupted run
    kinds: dict[Kind, Difference]  # the first difference of each kind between these runs, the earliest first
    twin: dict[Kind, Difference]  # the same differences between the uninterrupted run and `again`, or empty
    # The repetition of the uninterrupted run, or the interrupted run if that differs before its interruption.
    again: Attempt

    @property
    def first(self) -> Difference:
        """The first difference."""
        return next(iter(self.kinds.values()))

    @property
    def attempt(self) -> Attempt:
        """The process in which the first difference occurred."""
        return self.attempts[self.first.number]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the values that the loop passed to `resume`."""
        return self.attempt.starts[0].names

    @property
    def is_after_update(self) -> bool:
        """Whether the first difference is in the metrics or the state after an update."""
        return self.first.kind in ("leaf", "metric")

    @functools.cached_property
    def pair(self) -> tuple[Update, Update] | None:
        """The update of the first difference in the uninterrupted and in the interrupted run; None: one is missing."""
        found = self.straight.by_step.get(self.first.step), self.attempt.by_step.get(self.first.step)
        return None if found[0] is None or found[1] is None else (found[0], found[1])

    @functools.cached_property
    def opaque_leaf(self) -> str | None:
        """The first leaf of a batch of which only the type can be compared, as text, or None."""
        each = (batch.opaque_leaf() for update in self.straight.updates for batch in update.batches)
        return next(filter(None, each), None)

    @property
    def sees_batches(self) -> bool:
        """Whether batches were recorded and can be compared."""
        return any(update.batches for update in self.straight.updates) and self.opaque_leaf is None

    @property
    def takes_elsewhere(self) -> bool:
        """Whether batches were taken on other threads than the loop's thread."""
        return any(update.elsewhere for update in [*self.straight.updates, *self.attempt.updates])

    @functools.cached_property
    def drawn_from(self) -> list[str]:
        """The global random generators that the loop draws from and whose states differ between the runs."""
        if self.pair is None:
            return []
        earlier = [update.host for update in self.straight.updates if update.step < self.first.step]
        before = earlier[-1] if earlier else self.straight.starts[0].host
        straight, resumed = self.pair[0].host, self.pair[1].host
        return [name for name, state in straight.items() if state not in (before.get(name), resumed.get(name))]

    @functools.cached_property
    def is_rounding(self) -> bool:
        """Whether the first difference of the repetition is as small as another order of additions would make it."""
        for found in self.twin.values():
            if found.kind in ("metric", "leaf"):
                one, other = found.straight, found.resumed
                if isinstance(one, Leaf) and isinstance(other, Leaf):
                    return relative_difference(numbers_of(one), numbers_of(other)) < ROUNDING
        return False

    @functools.cached_property
    def integers(self) -> list[str]:
        """The leaves that differ in the update of the first difference, if all of them are integers."""
        if self.pair is None:
            return []
        straight, resumed = self.pair[0].leaves, self.pair[1].leaves
        names = [name for name in differing_names(straight, resumed) if name in straight]
        return names if all(straight[name].kind.startswith(_WHOLE) for name in names) else []

    @functools.cached_property
    def metrics_that_differ_anyway(self) -> list[str]:
        """The metrics that differ between uninterrupted runs; empty if anything else differs between them too."""
        if set(self.kinds if self.again is self.attempts[0] else self.twin) != {"metric"}:
            return []
        pairs = [(update.metrics, self.again.by_step.get(update.step)) for update in self.straight.updates]
        found = [differing_names(metrics, other.metrics) for metrics, other in pairs if other is not None]
        return list(dict.fromkeys(name for names in found for name in names))

    def initial_counter(self) -> str | None:
        """Return a counter that has the same value after the resume as at the start of the run, or None."""
        position, updates = self.first.position, self.straight.updates
        if not self.is_after_update or self.attempt.resumed_at is None or position > len(updates) or self.pair is None:
            return None
        early, late, found = updates[position - 1].leaves, self.pair[0].leaves, self.pair[1].leaves
        for name, leaf in found.items():
            is_counter = leaf.shape == () and leaf.kind.startswith(_WHOLE) and name in late
            if is_counter and leaf.same(early.get(name)) and not leaf.same(late[name]):
                return name
        return None

    def saves_state_before_update(self) -> bool:
        """Whether the first update after the resume saves the restored state, although it changes the state."""
        if self.attempt.resumed_at is None or not self.attempt.updates or not self.is_after_update:
            return False
        update, restored = self.attempt.updates[0], self.attempt.starts[0].leaves
        before, after = self.straight.by_step.get(self.attempt.resumed_at), self.straight.by_step.get(update.step)
        if before is None or after is None or not update.leaves:
            return False
        stays = all(leaf.same(restored.get(name)) for name, leaf in update.leaves.items())
        return stays and any(name in before.leaves for name in differing_names(after.leaves, before.leaves))


@dataclasses.dataclass(frozen=True)
class Cause:
    """A likely cause: what it is, what to do, and what was observed."""

    what: str
    do: str
    seen: str = ""


_DEVICE = Cause(
    "the run is not repeatable: operations of the device, or threads, add in another order each time",
    "on GPUs set XLA_FLAGS=--xla_gpu_deterministic_ops=true; compare runs on the same devices with the same libraries",
)
_TAKE = "write state, data = ckpt.resume(state, data), and take batches from that data"


def likely_causes(evidence: Evidence) -> list[Cause]:
    """Return the likely causes of the first difference, the most likely first."""
    found: dict[str, Cause] = {}
    for cause in _causes(evidence):
        found.setdefault(cause.what, cause)
    return list(found.values())


def _causes(evidence: Evidence) -> Iterator[Cause]:
    if evidence.twin:
        return _not_repeatable(evidence)
    match evidence.first.kind:
        case "label" | "end":
            return _in_labels(evidence)
        case "batch":
            return _in_batches(evidence)
        case _:
            return _in_state(evidence)


def _not_repeatable(evidence: Evidence) -> Iterator[Cause]:
    """Yield causes for a difference between two uninterrupted runs, where the resume is not the only cause."""
    kind = next(iter(evidence.twin))
    seen = "two runs differ although neither was interrupted, or they differ before the interruption"
    if kind == "start":
        yield Cause(
            "the run is not repeatable: its initial state is created without a seed",
            "create the initial state from a fixed seed",
            seen,
        )
        return
    names = evidence.metrics_that_differ_anyway
    if names:
        yield Cause(
            "a metric that depends on the clock, such as updates per second: it differs in each run",
            f"ignore it with ignore_metrics={names}; the proof then reports other differences",
            f"{seen}, and only in metrics: {', '.join(names[:3])}",
        )
    if kind != "batch" and evidence.is_rounding:
        yield dataclasses.replace(_DEVICE, seen=f"{seen}, but only by rounding")
    yield from _drawn(evidence, " without a seed")
    if kind == "batch":
        yield Cause(
            "the run is not repeatable: the data is shuffled without a seed, or its transforms are",
            "give them a fixed seed, and make the order part of the iterator's position",
            seen,
        )
        return
    yield Cause(
        "the run is not repeatable: something random has no seed (a key made from the time, a generator, os.urandom), "
        "or the loop depends on the order of a set",
        "seed all random values and sort the elements of sets, then run the proof again",
        seen,
    )
    yield _DEVICE


def _drawn(evidence: Evidence, how: str = ", and its state is not saved") -> Iterator[Cause]:
    """Yield a cause for global generators whose state changed in the update that differs."""
    if evidence.drawn_from:
        names = " and ".join(evidence.drawn_from)
        yield Cause(
            f"the host's random generator: {names} is drawn from{how}",
            "draw from a PRNG key in the state, or from a generator seeded with the number of the update",
            f"the global state of {names} changes in this update, and differs between the runs",
        )


def _in_labels(evidence: Evidence) -> Iterator[Cause]:
    if evidence.first.kind == "label":
        yield Cause(
            "the loop resets its count of updates at the resume, or skips updates",
            "iterate over ckpt.steps(num_steps), or start at ckpt.completed_steps",
        )
    yield Cause(
        "the length of the training depends on something outside of the state, such as range(num_steps), the end of "
        "the data, or a stopping rule with its own counter",
        "iterate over ckpt.steps(num_steps), and keep the counter of a stopping rule in the state",
    )


def _in_batches(evidence: Evidence) -> Iterator[Cause]:
    fault, count = fault_of(evidence.kinds["batch"], evidence.attempts, evidence.straight)
    if fault == "anew":
        yield Cause(
            "the data restarted at the resume",
            f"{_TAKE}; create no iterator after it, and check that its set_state restores the position",
            "the batches after the resume are those of update 1 and later",
        )
    elif fault in ("ahead", "behind"):
        did, way = ("skipped", "later") if fault == "ahead" else ("taken twice", "earlier")
        yield Cause(
            f"the saved position in the data is not the position of the loop: batches are {did} ({count})",
            "pass ckpt.resume the iterator that counts the batches that the loop has consumed, not the one below a "
            "prefetcher",
            f"the batches after the resume are those of the uninterrupted run, {count} {way}",
        )
    else:
        yield from _drawn(evidence)
    yield Cause(
        "the data iterator is not restored completely: its set_state omits something, such as the order of a shuffle, "
        "its transforms draw random numbers from elsewhere, or the data changed",
        "test it alone: call get_state, take elements, call set_state, and expect the same elements; give a shuffle a "
        "fixed seed, and seed the transform of each example with its index",
    )


def _in_state(evidence: Evidence) -> Iterator[Cause]:
    """Yield causes for a difference in the metrics or the state."""
    first, is_metric = evidence.first, evidence.first.kind == "metric"
    if first.kind == "restored":
        yield Cause(
            "the restored state differs from the saved state",
            "check get_state and set_state, save and load, or the handler of this checkpointable",
            f"{first.name} differs before the first update after the resume",
        )
    yield from _directly_observed(evidence)
    counter = Cause(
        "a counter outside of the state, such as that of a learning-rate schedule, of epochs or of gradient "
        "accumulation: the resume resets it",
        "take the number of the update from ckpt.steps(...), or keep the counter in the state",
    )
    for seen in _signs_of_counter(evidence):
        yield dataclasses.replace(counter, seen=seen)
    yield from _drawn(evidence)
    has_metrics = any(update.metrics for update in evidence.straight.updates)
    if is_metric or not has_metrics:
        yield from _data_not_given(evidence)
    leaves = evidence.straight.updates[0].leaves
    if not is_metric and first.position == 1 and not any(map(_OPTIMIZER_NAME.search, leaves)):
        yield Cause(
            "the optimizer state is not saved: the resume resets its moments",
            "pass it to ckpt.resume and ckpt(...) too: a TrainState, (params, opt_state), or NNX (model, optimizer)",
            "no saved leaf has a name that is usual for an optimizer state",
        )
    if not is_metric and (has_metrics or first.position > 1):  # the losses are equal: a random draw is unlikely
        yield counter
    yield from _random(evidence)
    yield counter


def _signs_of_counter(evidence: Evidence) -> Iterator[str]:
    first = evidence.first
    if first.kind == "metric":
        metrics = () if evidence.pair is None else differing_names(evidence.pair[0].metrics, evidence.pair[1].metrics)
        if rates := list(filter(_RATE.search, metrics)):
            yield f"metric {rates[0]!r} differs"
        if first.position > 1:
            yield f"the first {first.position - 1} updates after the resume were equal"
    elif evidence.integers:
        yield f"only integers differ: {', '.join(evidence.integers[:3])}"


def _directly_observed(evidence: Evidence) -> Iterator[Cause]:
    """Yield causes that explain any difference."""
    yield from _evaluation(evidence)
    if evidence.saves_state_before_update():
        yield Cause(
            "ckpt(...) gets the state from before the update, so it saves one update too few",
            "call ckpt(state) after the update, with the state that the update returns",
            "the state passed in the first update after the resume is the state that ckpt.resume returned",
        )
    saved = {name.partition("/")[0] for update in evidence.attempt.updates[:1] for name in update.leaves}
    if names := ", ".join(sorted(saved.difference(evidence.names))):
        yield Cause(f"saved but never restored: {names}", "pass it to ckpt.resume by the same name too")
    if (counter := evidence.initial_counter()) is not None and not evidence.integers:
        yield Cause(
            "the loop continues with the state that it passed to ckpt.resume, not with the state that this returned",
            _TAKE,
            f"{counter} has the value from the start of the run",
        )


def _evaluation(evidence: Evidence) -> Iterator[Cause]:
    """Yield a cause for a change between `ckpt(...)` and the next update, which no step contains."""
    step, seen = evidence.attempt.resumed_at, "a resume at another step was exact"
    if evidence.first.position != 1:
        return
    between = evidence.straight.between.get(step or 0) if evidence.is_after_update else None
    if between is not None and between.changed:
        seen = f"leaves changed in place after ckpt(...) of update {step}: {', '.join(between.changed[:3])}"
    elif evidence.first.number <= 1 and not evidence.attempts[0].plan.saves_first:
        return
    elif between is not None:
        seen += f"; ckpt.poll() is called after ckpt(...) of update {step}"
    yield Cause(
        "the state changes between ckpt(...) and the next update (an evaluation?)",
        "evaluate before ckpt(...), or at the top of the loop's body, where a resumed run evaluates too",
        seen,
    )


def _data_not_given(evidence: Evidence) -> Iterator[Cause]:
    if "data" not in evidence.names:
        yield Cause(
            "the data is not passed to ckpt.resume(state, data): its position is not saved, and the resume restarts it",
            _TAKE,
            f"ckpt.resume got only {', '.join(evidence.names)}",
        )
    elif evidence.takes_elsewhere:
        yield Cause(
            "batches are taken by another thread ahead of the loop, so the saved position in the data is too late",
            "pass ckpt.resume an iterator that counts the batches that the loop has consumed, as Grain's iterators do",
        )


def _random(evidence: Evidence) -> Iterator[Cause]:
    """Yield causes for a random source that is not saved; if the state seems to have a key, a key is less likely."""
    has_key = any(
        leaf.kind.startswith("key<") or (leaf.kind == "uint32" and leaf.shape[-1:] in ((2,), (4,)))
        for leaf in evidence.straight.updates[0].leaves.values()
    )
    generator = Cause(
        "a random generator of the loop that is not saved, such as np.random.default_rng",
        "draw from a PRNG key in the state, or save the state of the generator as a checkpointable",
    )
    key = Cause(
        "a PRNG key outside of the state: the resume resets it, so dropout, noise or sampling repeat their first draws",
        "put the key into the state that you pass to ckpt.resume and ckpt(...), or derive it from the number of the "
        "update: jax.random.fold_in(key, step)",
        "" if has_key else "no PRNG key is saved",
    )
    yield from (generator, key) if has_key else (key, generator)
