"""Likely causes of a difference between runs, the likeliest first: what the evidence points to, then what is usual."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jaxckpt_train.testing.data_faults import fault_of
from jaxckpt_train.testing.evidence import Evidence


@dataclasses.dataclass(frozen=True)
class Cause:
    """One of them: what it is, what of it was seen, and what to do."""

    what: str
    seen: str
    do: str


_GENERATOR = Cause(
    "a random generator of the loop's own, outside of what is saved (np.random.default_rng, random.Random, or one made "
    "from the time)",
    "",
    "draw from a PRNG key in the state, or keep the generator's state in a checkpointable",
)
_KEY = Cause(
    "a PRNG key outside of the state: it began anew at the resume, so that dropout, noise or sampling repeat what they "
    "drew at first",
    "nothing that is saved is a PRNG key",
    "put the key into the state that ckpt.resume gets and ckpt(...) saves, or derive it from the number of the update: "
    "jax.random.fold_in(key, step)",
)
_COUNTER = Cause(
    "a counter outside of the state, such as that of a learning-rate schedule, of epochs or of gradient accumulation: "
    "it began anew at the resume",
    "",
    "take the number of the update from ckpt.steps(...), or keep the counter in the state",
)
_OPTIMIZER = Cause(
    "the optimizer's state is left out: its moments began anew at the resume",
    "nothing that is saved is named as an optimizer's state is",
    "give it to ckpt.resume and ckpt(...) too: a TrainState, (params, opt_state), or for NNX (model, optimizer)",
)
_DEVICE = Cause(
    "the run is not repeatable: operations of the device, or threads, that add in another order each time",
    "",
    "on GPUs set XLA_FLAGS=--xla_gpu_deterministic_ops=true; compare runs of the same devices and libraries",
)


def likely_causes(evidence: Evidence) -> list[Cause]:
    """The causes of the first difference, the likeliest first."""
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
    """Two runs without an interruption differ: the resume is not to blame, or not alone."""
    kind, first = next(iter(evidence.twin.items()))
    seen = "two runs differ although neither was interrupted, or before the interruption"
    if kind == "batch":
        fault, _ = fault_of(first, [evidence.again], evidence.straight)
        yield from _drawn(evidence, " without a seed")
        if fault == "parts":
            yield Cause(
                "the run is not repeatable: random transforms of the data without a seed",
                f"{seen}; some arrays of the batches are the same",
                "seed them, and let what they draw depend on the position in the data",
            )
            return
        order = "; the same examples come in another order, or in other groups" if fault in ("order", "behind") else ""
        order = order or ("; the same batches come in another order" if fault == "ahead" else "")
        yield Cause(
            "the run is not repeatable: the data is shuffled without a seed",
            seen + order,
            "give the shuffle a fixed seed, and let the iterator's position bring back the order",
        )
        return
    if kind == "start":
        yield Cause(
            "the run is not repeatable: what it begins with is made without a seed (a key made from the time, "
            "np.random, os.urandom)",
            seen,
            "make it from a fixed seed",
        )
        return
    if evidence.is_rounding and not evidence.metrics_that_differ_anyway:
        yield dataclasses.replace(_DEVICE, seen=f"{seen}, by no more than rounding")
    yield from _drawn(evidence, " without a seed")
    yield from _from_the_clock(evidence, seen)
    yield Cause(
        "the run is not repeatable: something random without a seed (a key made from the time, a generator, "
        "os.urandom), or the order of a set, which is another in each process",
        seen,
        "seed it; sort what comes from a set; then prove the resume",
    )
    yield _DEVICE


def _from_the_clock(evidence: Evidence, seen: str) -> Iterator[Cause]:
    names = evidence.metrics_that_differ_anyway
    if names:
        yield Cause(
            "a metric that is taken from the clock, such as updates per second: it is another in each run",
            f"{seen}, and in nothing but metrics: {', '.join(names[:3])}",
            f"leave it out: ignore_metrics={names}; what else differs is told then",
        )
        if evidence.is_rounding:
            yield dataclasses.replace(_DEVICE, seen=f"{seen}, by no more than rounding: then it is not the clock")


def _drawn(evidence: Evidence, how: str = ", and its state is not saved") -> Iterator[Cause]:
    """Global generators whose state moved in the update that differs."""
    if evidence.drawn_from:
        names = " and ".join(evidence.drawn_from)
        yield Cause(
            f"the host's random generator: {names} is drawn from{how}",
            f"the global state of {names} moves in this update, and differs between the runs",
            "draw from a PRNG key in the state, or from a generator seeded with the number of the update",
        )


def _in_restored(evidence: Evidence) -> Iterator[Cause]:
    yield Cause(
        "the state as restored is not the state as saved",
        f"{evidence.first.name} differs before the first update after the resume",
        "look at get_state and set_state, save and load, or the handler of this checkpointable: something that is "
        "part of it is not saved, or not put back",
    )
    yield from _in_state(evidence)


def _in_labels(evidence: Evidence) -> Iterator[Cause]:
    if evidence.first.kind == "label":
        yield Cause(
            "the loop counts its updates anew after the resume, or leaves some out",
            f"update {evidence.first.straight} was next, and it told of update {evidence.first.resumed}",
            "run over ckpt.steps(num_steps), or begin at ckpt.completed_steps",
        )
    yield Cause(
        "the length of the training depends on something outside of the state, such as range(num_steps) after a "
        "resume, the end of the data, or a stopping rule that counts anew",
        "",
        "run over ckpt.steps(num_steps); keep what a stopping rule counts in the state",
    )


def _in_batches(evidence: Evidence) -> Iterator[Cause]:
    fault, count = evidence.data_fault
    if fault in ("order", "parts", "other"):
        yield from _drawn(evidence)
    if fault == "anew":
        yield Cause(
            "the data began anew at the resume",
            "the batches after the resume are those of update 1 and on",
            "take batches from the iterator that ckpt.resume(state, data) returns, make none after it, and see that "
            "its set_state brings the position back",
        )
    elif fault in ("ahead", "behind"):
        did = "skipped" if fault == "ahead" else "taken twice"
        yield Cause(
            f"the position in the data that is saved is not that of the loop: batches are {did} ({count})",
            f"the batches after the resume are those of the uninterrupted run, {count} further "
            + ("on" if fault == "ahead" else "back"),
            "give ckpt.resume the innermost iterator that counts what the loop has consumed; a prefetch of one's own "
            "around it takes batches before their update",
        )
    elif fault == "order":
        yield Cause(
            "the order of the data is not part of its position: a shuffle without a fixed seed, or one whose seed is "
            "another at each start",
            "the batches after the resume hold examples of the uninterrupted run in another order",
            "give the shuffle a fixed seed, or save the order with the position",
        )
    elif fault == "parts":
        yield Cause(
            "random transforms of the data draw from something that is not part of its position",
            "some arrays of the batch are the same, others are not",
            "seed each example's transform with its index, as grain's random_map does",
        )
    yield Cause(
        "the data iterator does not come back as it was: its set_state leaves something out, or the data is another",
        "",
        "test it alone: get_state, some elements, set_state, the same elements",
    )


def _in_metrics(evidence: Evidence) -> Iterator[Cause]:
    yield from _usual(evidence)
    yield from _state_not_taken(evidence)
    if evidence.rate_metric is not None:
        yield dataclasses.replace(_COUNTER, seen=f"metric {evidence.rate_metric!r} differs")
    if evidence.first.position > 1:
        yield dataclasses.replace(
            _COUNTER, seen=f"the first {evidence.first.position - 1} updates after the resume were the same"
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
        yield dataclasses.replace(_COUNTER, seen=f"all that differs are whole numbers: {names}")
    if evidence.factor is not None:
        yield dataclasses.replace(
            _COUNTER,
            seen=f"from the same state all that differs moved in the same direction, "
            f"{evidence.factor:.3g} times as far: that is another learning rate",
        )
    yield from _drawn(evidence)
    told = any(update.metrics for update in evidence.straight.updates)
    if not told:
        yield from _data_not_given(evidence)
    if evidence.first.position == 1 and not evidence.has_optimizer:
        yield _OPTIMIZER
    if told or evidence.first.position > 1:  # the loss is the same: what comes before it is less likely to draw
        yield _COUNTER
    yield from _random(evidence)
    yield _COUNTER


def _state_not_taken(evidence: Evidence) -> Iterator[Cause]:
    if evidence.starts_as_at_first is not None and not evidence.whole_numbers:
        yield Cause(
            "the loop goes on with the state that it gave to ckpt.resume, and not with the one that this returns",
            f"{evidence.starts_as_at_first} is what it was when the run had begun",
            "write state, data = ckpt.resume(state, data)",
        )


def _evaluation(evidence: Evidence) -> Iterator[Cause]:
    """What happens after `ckpt(...)` of the update that was resumed at is part of no step."""
    between, step = evidence.between, evidence.attempt.resumed_at
    seen = "a resume at another step was exact"
    if between is not None and between.changed:
        seen = f"it changes in place after ckpt(...) of update {step}: {', '.join(between.changed[:3])}"
    elif not evidence.was_exact_elsewhere:
        return
    elif between is not None:
        seen += f"; ckpt.poll() is called after ckpt(...) of update {step}"
    yield Cause(
        "the state changes between ckpt(...) and the next update (an evaluation?)",
        seen,
        "evaluate before ckpt(...), or at the top of the loop's body, where a resumed run does it too; or let the "
        "evaluation change nothing that training uses",
    )


def _usual(evidence: Evidence) -> Iterator[Cause]:
    """What explains a difference anywhere, and is seen directly."""
    yield from _evaluation(evidence)
    if evidence.tells_what_was_restored:
        step = evidence.attempt.updates[0].step
        yield Cause(
            "ckpt(...) is given the state from before the update, and not the new one: it saves one update too little",
            f"what it is given in update {step}, the first one after the resume, is what ckpt.resume has returned",
            "call ckpt(state) after the update, with the state that the update returns",
        )
    if evidence.never_restored:
        names = ", ".join(evidence.never_restored)
        yield Cause(
            f"saved, and never restored: {names}",
            f"ckpt(...) is given {names}, and ckpt.resume is not",
            "give it to ckpt.resume by the same name too",
        )


def _data_not_given(evidence: Evidence) -> Iterator[Cause]:
    if "data" not in evidence.names:
        yield Cause(
            "the data is not given to ckpt.resume(state, data): its position is not saved, and it begins anew at the "
            "resume",
            f"ckpt.resume got {', '.join(evidence.names)} only",
            "write state, data = ckpt.resume(state, iter(dataset)), and take batches from that",
        )
    elif evidence.takes_elsewhere:
        yield Cause(
            "batches are taken by another thread, ahead of the loop: the position in the data that is saved is a later "
            "one",
            "they were taken on another thread than the loop's, and could not be compared",
            "give ckpt.resume an iterator that counts what the loop has consumed, as Grain's do",
        )


def _data_not_seen(evidence: Evidence) -> Iterator[Cause]:
    if "data" in evidence.names and not evidence.sees_batches and not evidence.takes_elsewhere:
        yield Cause(
            "the loop does not take its batches from the iterator that ckpt.resume returns",
            "none was taken from it, so that batches could not be compared",
            "write state, data = ckpt.resume(state, data), and take batches from that",
        )


def _random(evidence: Evidence) -> Iterator[Cause]:
    """Something random that is not saved: where there is a key in the state, it is less likely a key."""
    key = dataclasses.replace(_KEY, seen="") if evidence.has_key else _KEY
    yield from (_GENERATOR, key) if evidence.has_key else (key, _GENERATOR)
