"""Likely causes of a difference between runs, the most likely first.

`Evidence` derives facts from the records of runs that differ. `likely_causes` first lists the causes that these facts
suggest, then common causes.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence

import numpy as np

from jaxckpt_train.store.dtypes import is_inexact
from jaxckpt_train.testing.attempts import Attempt
from jaxckpt_train.testing.differences import (
    DataFault,
    Difference,
    Kind,
    common_factor,
    fault_of,
    number_of,
    relative_difference,
)
from jaxckpt_train.testing.processes import Between, Leaf, Update

_OPTIMIZER_NAME = re.compile(
    r"(^|[/_.])(opt|optim|optimizer|adam\w*|sgd|mu|nu|trace|momentum|velocity|moments?)($|[/_.])", re.I
)
_RATE = re.compile(r"(^|[/_. ])(lr|learning_?rate|step_?size|schedule)($|[/_. ])", re.I)
_WHOLE = ("int", "uint", "python int")
ROUNDING = 1e-4
"""Relative differences below this can come from another order of floating-point additions."""


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Facts about runs that differ.

    Attributes:
        attempts: the processes of the interrupted run.
        straight: the uninterrupted run.
        kinds: the first difference of each kind between these runs, the earliest first.
        twin: the same differences between the uninterrupted run and `again`, or empty.
        again: the repetition of the uninterrupted run, or the interrupted run if that differs before its interruption.
    """

    attempts: Sequence[Attempt]
    straight: Attempt
    kinds: dict[Kind, Difference]
    twin: dict[Kind, Difference]
    again: Attempt

    @property
    def first(self) -> Difference:
        """The first difference."""
        return next(iter(self.kinds.values()))

    @property
    def attempt(self) -> Attempt:
        """The process in which the first difference occurred."""
        return self.attempts[self.first.number]

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the values that the loop passed to `resume`."""
        return self.attempt.start.names

    @functools.cached_property
    def never_restored(self) -> list[str]:
        """The names of the values that the loop passes to `ckpt(...)` but not to `resume`."""
        saved = {name.partition("/")[0] for update in self.attempt.updates[:1] for name in update.leaves}
        return sorted(saved - set(self.names))

    @functools.cached_property
    def sees_batches(self) -> bool:
        """Whether batches were recorded and can be compared."""
        batches = [batch for update in self.straight.updates for batch in update.batches]
        return bool(batches) and self.opaque_leaf is None

    @functools.cached_property
    def opaque_leaf(self) -> str | None:
        """The first leaf of a batch of which only the type can be compared, as text, or None."""
        each = (batch.opaque_leaf() for update in self.straight.updates for batch in update.batches)
        return next((found for found in each if found is not None), None)

    @functools.cached_property
    def takes_elsewhere(self) -> bool:
        """Whether batches were taken on other threads than the loop's thread."""
        return any(update.elsewhere for update in [*self.straight.updates, *self.attempt.updates])

    @functools.cached_property
    def has_key(self) -> bool:
        """Whether a PRNG key is saved: a typed key, or an array that looks like the data of one."""
        return any(
            leaf.kind.startswith("key<") or (leaf.kind == "uint32" and leaf.shape[-1:] in ((2,), (4,)))
            for leaf in self.straight.updates[0].leaves.values()
        )

    @functools.cached_property
    def has_optimizer(self) -> bool:
        """Whether a saved leaf has a name that is usual for the state of an optimizer."""
        return any(_OPTIMIZER_NAME.search(name) for name in self.straight.updates[0].leaves)

    @functools.cached_property
    def rate_metric(self) -> str | None:
        """A metric that is named like a learning rate and differs in the update of the first difference, or None."""
        straight, resumed = self._pair(self.first.step)
        if straight is None or resumed is None:
            return None
        names = [name for name in straight.metrics if _RATE.search(name)]
        different = [n for n in names if n in resumed.metrics and not straight.metrics[n].same(resumed.metrics[n])]
        return different[0] if different else None

    @functools.cached_property
    def drawn_from(self) -> list[str]:
        """The global random generators that the loop draws from and whose states differ between the runs."""
        first = self.first
        straight, resumed = self._pair(first.step)
        before = self._host_before(self.straight, first.step)
        if straight is None or resumed is None or before is None:
            return []
        moved = [name for name, state in straight.host.items() if before.get(name) != state]
        return [name for name in moved if resumed.host.get(name) != straight.host[name]]

    def _host_before(self, attempt: Attempt, step: int) -> dict[str, str] | None:
        earlier = [update for update in attempt.updates if update.step < step]
        return earlier[-1].host if earlier else (attempt.start.host if attempt.starts else None)

    def _pair(self, step: int) -> tuple[Update | None, Update | None]:
        return self.straight.by_step.get(step), self.attempt.by_step.get(step)

    @functools.cached_property
    def is_rounding(self) -> bool:
        """Whether the first difference of the repetition is as small as another order of additions would make it."""
        for found in self.twin.values():
            if (
                found.kind in ("metric", "leaf")
                and isinstance(found.straight, Leaf)
                and isinstance(found.resumed, Leaf)
            ):
                pair = number_of(self.straight, found.straight), number_of(self.again, found.resumed)
                return relative_difference(*pair) < ROUNDING
        return False

    @functools.cached_property
    def whole_numbers(self) -> list[str]:
        """The leaves that differ in the update of the first difference, if all of them are integers."""
        straight, resumed = self._pair(self.first.step)
        if straight is None or resumed is None:
            return []
        pairs = {name: (leaf, resumed.leaves.get(name)) for name, leaf in straight.leaves.items()}
        different = {name: leaf for name, (leaf, other) in pairs.items() if other is None or not leaf.same(other)}
        return list(different) if all(leaf.kind.startswith(_WHOLE) for leaf in different.values()) else []

    @functools.cached_property
    def starts_as_at_first(self) -> str | None:
        """A counter that has the same values after the resume as at the start of the run, or None.

        Then the loop continues with the state that it passed to `resume`, not with the state that `resume` returned.
        """
        first, start = self.first, self.attempt.resumed_at
        if first.kind not in ("leaf", "metric") or start is None or first.position > len(self.straight.updates):
            return None
        early, late = self.straight.updates[first.position - 1], self.straight.by_step.get(first.step)
        found = self.attempt.by_step.get(first.step)
        if late is None or found is None or early.step == late.step:
            return None
        for name, leaf in found.leaves.items():
            is_counter = leaf.shape == () and leaf.kind.startswith(_WHOLE)
            if is_counter and name in early.leaves and name in late.leaves:
                if leaf.same(early.leaves[name]) and not leaf.same(late.leaves[name]):
                    return name
        return None

    @functools.cached_property
    def metrics_that_differ_anyway(self) -> list[str]:
        """The metrics that differ between uninterrupted runs; empty if anything else differs between them too."""
        kinds = self.kinds if self.again is self.attempts[0] else self.twin
        if set(kinds) != {"metric"}:
            return []
        found: dict[str, None] = {}
        for update in self.straight.updates:
            other = self.again.by_step.get(update.step)
            pairs = (
                {}
                if other is None
                else {name: (leaf, other.metrics.get(name)) for name, leaf in update.metrics.items()}
            )
            found |= {name: None for name, (leaf, its) in pairs.items() if its is None or not leaf.same(its)}
        return list(found)

    @functools.cached_property
    def saves_state_before_update(self) -> bool:
        """Whether the first update after the resume saves the restored state, although this update changes the state.

        Then the loop passes the state from before the update to `ckpt(...)`.
        """
        start = self.attempt.resumed_at
        if start is None or not self.attempt.updates or self.first.kind not in ("leaf", "metric"):
            return False
        restored, update = self.attempt.start.leaves, self.attempt.updates[0]
        before, after = self.straight.by_step.get(start), self.straight.by_step.get(update.step)
        if before is None or after is None or not update.leaves:
            return False
        stays = all(name in restored and leaf.same(restored[name]) for name, leaf in update.leaves.items())
        moves = any(name in before.leaves and not leaf.same(before.leaves[name]) for name, leaf in after.leaves.items())
        return stays and moves

    @functools.cached_property
    def between(self) -> Between | None:
        """What happens in the uninterrupted run between the resumed step and the next update, if that differs."""
        is_first = self.first.position == 1 and self.first.kind in ("leaf", "metric")
        return self.straight.between.get(self.attempt.resumed_at or 0) if is_first else None

    @property
    def was_exact_elsewhere(self) -> bool:
        """Whether a resume at another step was exact, and the first update after this resume is not."""
        at_other_steps = self.first.number > 1 or self.attempts[0].plan.saves_first
        return at_other_steps and self.first.position == 1

    @functools.cached_property
    def factor(self) -> float | None:
        """The ratio of the changes of the state in both runs, if all leaves changed in the same direction, or None.

        It compares one update from the same state and the same batch, where a constant ratio shows another learning
        rate.
        """
        first, start = self.first, self.attempt.resumed_at
        if start is None or first.kind not in ("leaf", "metric") or first.position != 1:
            return None
        straight, resumed = self._pair(first.step)
        before = self.straight.by_step.get(start)
        if straight is None or resumed is None or before is None:
            return None
        moves = []
        for name, leaf in straight.leaves.items():
            other, old = resumed.leaves.get(name), before.leaves.get(name)
            if other is None or old is None or leaf.same(other):
                continue
            arrays = self.straight.array(old), self.straight.array(leaf), self.attempt.array(other)
            if any(array is None or not is_inexact(array.dtype) for array in arrays):
                return None
            moves.append([np.asarray(array).astype(np.float64).reshape(-1) for array in arrays])
        return common_factor(moves)

    @functools.cached_property
    def data_fault(self) -> tuple[DataFault, int]:
        """What is wrong with the batches, and for "ahead" and "behind" the number of batches."""
        return fault_of(self.kinds["batch"], self.attempts, self.straight)


@dataclasses.dataclass(frozen=True)
class Cause:
    """A likely cause: what it is, what was observed, and what to do."""

    what: str
    seen: str
    do: str


_GENERATOR = Cause(
    "a random generator of the loop that is not saved (np.random.default_rng, random.Random, or a generator seeded "
    "with the time)",
    "",
    "draw from a PRNG key in the state, or save the state of the generator as a checkpointable",
)


_KEY = Cause(
    "a PRNG key outside of the state: the resume resets it, so dropout, noise or sampling repeat their first draws",
    "no PRNG key is saved",
    "put the key into the state that you pass to ckpt.resume and ckpt(...), or derive it from the number of the "
    "update: jax.random.fold_in(key, step)",
)


_COUNTER = Cause(
    "a counter outside of the state, such as that of a learning-rate schedule, of epochs or of gradient accumulation: "
    "the resume resets it",
    "",
    "take the number of the update from ckpt.steps(...), or keep the counter in the state",
)


_OPTIMIZER = Cause(
    "the optimizer state is not saved: the resume resets its moments",
    "no saved leaf has a name that is usual for an optimizer state",
    "pass it to ckpt.resume and ckpt(...) too: a TrainState, (params, opt_state), or for NNX (model, optimizer)",
)


_DEVICE = Cause(
    "the run is not repeatable: operations of the device, or threads, add in another order each time",
    "",
    "on GPUs set XLA_FLAGS=--xla_gpu_deterministic_ops=true; compare runs on the same devices with the same libraries",
)


def likely_causes(evidence: Evidence) -> list[Cause]:
    """Return the likely causes of the first difference, the most likely first."""
    found = list(_not_repeatable(evidence)) if evidence.twin else []
    if not found:
        by_kind = {
            "start": _in_state,
            "restored": _in_restored,
            "label": _in_labels,
            "end": _in_labels,
            "batch": _in_batches,
            "metric": _in_metrics,
            "leaf": _in_state,
        }
        found = list(by_kind[evidence.first.kind](evidence))
    known: dict[str, Cause] = {}
    for cause in found:
        known.setdefault(cause.what, cause)
    return list(known.values())


def _not_repeatable(evidence: Evidence) -> Iterator[Cause]:
    """Yield causes for a difference between two uninterrupted runs, where the resume is not the only cause."""
    kind, first = next(iter(evidence.twin.items()))
    seen = "two runs differ although neither was interrupted, or they differ before the interruption"
    if kind == "batch":
        fault, _ = fault_of(first, [evidence.again], evidence.straight)
        yield from _drawn(evidence, " without a seed")
        if fault == "parts":
            yield Cause(
                "the run is not repeatable: random transforms of the data without a seed",
                f"{seen}; some arrays of the batches are equal",
                "seed them, and derive each random draw from the position in the data",
            )
            return
        order = "; the same examples come in another order, or in other groups" if fault in ("order", "behind") else ""
        order = order or ("; the same batches come in another order" if fault == "ahead" else "")
        yield Cause(
            "the run is not repeatable: the data is shuffled without a seed",
            seen + order,
            "give the shuffle a fixed seed, and make the order part of the iterator's position",
        )
        return
    if kind == "start":
        yield Cause(
            "the run is not repeatable: its initial state is created without a seed (a key made from the time, "
            "np.random, os.urandom)",
            seen,
            "create the initial state from a fixed seed",
        )
        return
    if evidence.is_rounding and not evidence.metrics_that_differ_anyway:
        yield dataclasses.replace(_DEVICE, seen=f"{seen}, but only by rounding")
    yield from _drawn(evidence, " without a seed")
    yield from _from_the_clock(evidence, seen)
    yield Cause(
        "the run is not repeatable: something random has no seed (a key made from the time, a generator, os.urandom), "
        "or the loop depends on the order of a set, which differs between processes",
        seen,
        "seed all random values and sort the elements of sets, then run the proof again",
    )
    yield _DEVICE


def _from_the_clock(evidence: Evidence, seen: str) -> Iterator[Cause]:
    names = evidence.metrics_that_differ_anyway
    if names:
        yield Cause(
            "a metric that depends on the clock, such as updates per second: it differs in each run",
            f"{seen}, and only in metrics: {', '.join(names[:3])}",
            f"ignore it with ignore_metrics={names}; the proof then reports other differences",
        )
        if evidence.is_rounding:
            yield dataclasses.replace(_DEVICE, seen=f"{seen}, but only by rounding, which the clock does not explain")


def _drawn(evidence: Evidence, how: str = ", and its state is not saved") -> Iterator[Cause]:
    """Yield a cause for global generators whose state changed in the update that differs."""
    if evidence.drawn_from:
        names = " and ".join(evidence.drawn_from)
        yield Cause(
            f"the host's random generator: {names} is drawn from{how}",
            f"the global state of {names} changes in this update, and differs between the runs",
            "draw from a PRNG key in the state, or from a generator seeded with the number of the update",
        )


def _in_restored(evidence: Evidence) -> Iterator[Cause]:
    yield Cause(
        "the restored state differs from the saved state",
        f"{evidence.first.name} differs before the first update after the resume",
        "check get_state and set_state, save and load, or the handler of this checkpointable: it does not save or does "
        "not restore a part of its state",
    )
    yield from _in_state(evidence)


def _in_labels(evidence: Evidence) -> Iterator[Cause]:
    if evidence.first.kind == "label":
        yield Cause(
            "the loop resets its count of updates at the resume, or skips updates",
            f"update {evidence.first.straight} was next, but the loop reported update {evidence.first.resumed}",
            "iterate over ckpt.steps(num_steps), or start at ckpt.completed_steps",
        )
    yield Cause(
        "the length of the training depends on something outside of the state, such as range(num_steps) after a "
        "resume, the end of the data, or a stopping rule with its own counter",
        "",
        "iterate over ckpt.steps(num_steps), and keep the counter of a stopping rule in the state",
    )


def _in_batches(evidence: Evidence) -> Iterator[Cause]:
    fault, count = evidence.data_fault
    if fault in ("order", "parts", "other"):
        yield from _drawn(evidence)
    if fault == "anew":
        yield Cause(
            "the data restarted at the resume",
            "the batches after the resume are those of update 1 and later",
            "take batches from the iterator that ckpt.resume(state, data) returns, create no iterator after it, and "
            "check that its set_state restores the position",
        )
    elif fault in ("ahead", "behind"):
        did = "skipped" if fault == "ahead" else "taken twice"
        yield Cause(
            f"the saved position in the data is not the position of the loop: batches are {did} ({count})",
            f"the batches after the resume are those of the uninterrupted run, {count} "
            + ("later" if fault == "ahead" else "earlier"),
            "pass ckpt.resume the iterator that counts the batches that the loop has consumed; a prefetcher around it "
            "takes batches before their update",
        )
    elif fault == "order":
        yield Cause(
            "the order of the data is not part of its position: a shuffle without a fixed seed, or with another seed "
            "at each start",
            "the batches after the resume hold examples of the uninterrupted run in another order",
            "give the shuffle a fixed seed, or save the order with the position",
        )
    elif fault == "parts":
        yield Cause(
            "random transforms of the data draw from a source that is not part of its position",
            "some arrays of the batch are equal, others are not",
            "seed each example's transform with its index, as grain's random_map does",
        )
    yield Cause(
        "the data iterator is not restored completely: its set_state omits something, or the data changed",
        "",
        "test it alone: call get_state, take elements, call set_state, and expect the same elements",
    )


def _in_metrics(evidence: Evidence) -> Iterator[Cause]:
    yield from _usual(evidence)
    yield from _state_not_taken(evidence)
    if evidence.rate_metric is not None:
        yield dataclasses.replace(_COUNTER, seen=f"metric {evidence.rate_metric!r} differs")
    if evidence.first.position > 1:
        yield dataclasses.replace(
            _COUNTER, seen=f"the first {evidence.first.position - 1} updates after the resume were equal"
        )
    yield from _drawn(evidence)
    yield from _data_not_given(evidence)
    yield from _random(evidence)
    yield from _data_not_seen(evidence)
    yield _COUNTER


def _in_state(evidence: Evidence) -> Iterator[Cause]:
    yield from _usual(evidence)
    yield from _state_not_taken(evidence)
    if evidence.whole_numbers:
        names = ", ".join(evidence.whole_numbers[:3])
        yield dataclasses.replace(_COUNTER, seen=f"only integers differ: {names}")
    if evidence.factor is not None:
        yield dataclasses.replace(
            _COUNTER,
            seen=f"all differing leaves changed in the same direction, {evidence.factor:.3g} times as far, from the "
            "same state: this is another learning rate",
        )
    yield from _drawn(evidence)
    has_metrics = any(update.metrics for update in evidence.straight.updates)
    if not has_metrics:
        yield from _data_not_given(evidence)
    if evidence.first.position == 1 and not evidence.has_optimizer:
        yield _OPTIMIZER
    if has_metrics or evidence.first.position > 1:  # the losses are equal, so a random draw before them is unlikely
        yield _COUNTER
    yield from _random(evidence)
    yield _COUNTER


def _state_not_taken(evidence: Evidence) -> Iterator[Cause]:
    if evidence.starts_as_at_first is not None and not evidence.whole_numbers:
        yield Cause(
            "the loop continues with the state that it passed to ckpt.resume, not with the state that this returned",
            f"{evidence.starts_as_at_first} has the value from the start of the run",
            "write state, data = ckpt.resume(state, data)",
        )


def _evaluation(evidence: Evidence) -> Iterator[Cause]:
    """Yield a cause for a change between `ckpt(...)` and the next update, which no step contains."""
    between, step = evidence.between, evidence.attempt.resumed_at
    seen = "a resume at another step was exact"
    if between is not None and between.changed:
        seen = f"leaves changed in place after ckpt(...) of update {step}: {', '.join(between.changed[:3])}"
    elif not evidence.was_exact_elsewhere:
        return
    elif between is not None:
        seen += f"; ckpt.poll() is called after ckpt(...) of update {step}"
    yield Cause(
        "the state changes between ckpt(...) and the next update (an evaluation?)",
        seen,
        "evaluate before ckpt(...), or at the top of the loop's body, where a resumed run evaluates too; or make sure "
        "that the evaluation changes nothing that training uses",
    )


def _usual(evidence: Evidence) -> Iterator[Cause]:
    """Yield causes that are observed directly and explain any difference."""
    yield from _evaluation(evidence)
    if evidence.saves_state_before_update:
        step = evidence.attempt.updates[0].step
        yield Cause(
            "ckpt(...) gets the state from before the update, so it saves one update too few",
            f"the state passed in update {step}, the first after the resume, is the state that ckpt.resume returned",
            "call ckpt(state) after the update, with the state that the update returns",
        )
    if evidence.never_restored:
        names = ", ".join(evidence.never_restored)
        yield Cause(
            f"saved but never restored: {names}",
            f"{names} is passed to ckpt(...) but not to ckpt.resume",
            "pass it to ckpt.resume by the same name too",
        )


def _data_not_given(evidence: Evidence) -> Iterator[Cause]:
    if "data" not in evidence.names:
        yield Cause(
            "the data is not passed to ckpt.resume(state, data): its position is not saved, so the data restarts at "
            "the resume",
            f"ckpt.resume got only {', '.join(evidence.names)}",
            "write state, data = ckpt.resume(state, iter(dataset)), and take batches from that",
        )
    elif evidence.takes_elsewhere:
        yield Cause(
            "batches are taken by another thread ahead of the loop, so the saved position in the data is too late",
            "batches were taken on another thread than the loop's and could not be compared",
            "pass ckpt.resume an iterator that counts the batches that the loop has consumed, as Grain's iterators do",
        )


def _data_not_seen(evidence: Evidence) -> Iterator[Cause]:
    if "data" in evidence.names and not evidence.sees_batches and not evidence.takes_elsewhere:
        yield Cause(
            "the loop does not take its batches from the iterator that ckpt.resume returns",
            "no batch was taken from it, so batches could not be compared",
            "write state, data = ckpt.resume(state, data), and take batches from that",
        )


def _random(evidence: Evidence) -> Iterator[Cause]:
    """Yield causes for a random source that is not saved; if the state has a key, a key is less likely."""
    key = dataclasses.replace(_KEY, seen="") if evidence.has_key else _KEY
    yield from (_GENERATOR, key) if evidence.has_key else (key, _GENERATOR)
