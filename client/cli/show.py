"""Forms of values: JSON for programs, aligned text for people."""

import json
import time
from collections.abc import Sequence
from typing import TypeVar, assert_never

from client.cli.tables import count, duration, eta_s, number, steps_text
from client.documents import end_of_documents
from client.planning.estimates import estimate_of_job
from skein.config.job import JobSpec, read_spec
from skein.config.location import OFFERED
from skein.errors import UserError
from skein.protocol.coordinator.runs.incidents import OpenIncident
from skein.protocol.coordinator.runs.watching.measuring import PARTED
from skein.protocol.coordinator.runs.workers.probation import Exclusion
from skein.protocol.log.incident import cost, remedied, short, what
from skein.topology.fleet import Profile
from skein.units import counted, format_bytes
from skein.wire.views import (
    CheckpointFinished,
    ChoiceStatus,
    Ended,
    EpochsCounted,
    EvaluationFinished,
    GenerationBegun,
    IncidentEnded,
    JobEvent,
    JobStatus,
    LineLogged,
    StateChanged,
    StepFinished,
    WentBack,
    WorkerStatus,
)

T = TypeVar("T")

_NONE = "-"


_OF_ARRAYS = ("holders", "plan", "rule", "data", "checkpoint")
"""Fields that a sweep does not have: each of its arrays has its own."""


_MOST_EXCLUDED = 4


def exclusions_text(exclusions: Sequence[Exclusion]) -> str:
    """Workers that get no more work of a job for now, each with the cause and the reason."""
    named = [f"{x.worker} ({x.cause}: {x.reason})" for x in exclusions[:_MOST_EXCLUDED]]
    more = len(exclusions) - len(named)
    return "; ".join([*named, *([f"and {more} more"] if more else [])])


def open_incident_text(incident: OpenIncident) -> str:
    """A failure that lasts: since when, its kind, its workers and the reason."""
    since = time.strftime("%H:%M:%S", time.localtime(incident.wall_s))
    words = (incident.kind, short(incident.workers), f"({incident.reason})", f"since {since}")
    return " ".join(word for word in words if word)


def job_lines(status: JobStatus) -> list[str]:
    """A job in full."""
    spec = read_spec(status.spec)
    checkpoint = _NONE if status.checkpoint_version is None else f"step {status.checkpoint_version}"
    state = f"{status.state} ({status.reason})" if status.reason else str(status.state)
    seconds = f"{status.step_s:.3g} s a step" if status.step_s > 0 else _NONE
    if status.measured_step_s is not None:
        seconds += f", median {status.measured_step_s:.3g} s"
    if status.predicted_step_s > 0:
        seconds += f", planned {status.predicted_step_s:.3g} s{_doubt(status)}"
    incidents = _NONE
    if status.num_incidents:
        lost = f"{counted(status.num_steps_lost, 'step')} lost"
        incidents = f"{status.num_incidents}, {lost}: skein incidents {status.job}"
    unit = "sample" if spec.model.vocab_size is None else "token"
    fields = {
        "job": status.job,
        "name": status.name,
        "state": state,
        "submitted": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.submitted_wall_s)),
        "steps": f"{status.step} of {steps_text(status.total_steps)}",
        "loss": f"{number(status.loss)}, validation {number(status.evaluation_loss)} (nats per {unit})",
        **({} if status.balance_loss is None else {"experts": experts_text(status)}),
        **({} if status.choice is None else {"coreset": choice_text(status.choice)}),
        f"{unit}s": f"{status.num_tokens:,}, {count(status.tokens_per_s)} per second",
        **({"left out": late_samples(status)} if status.num_late_samples else {}),
        "speed": seconds,
        "eta": _NONE
        if status.state.is_final
        else duration(eta_s(status.step, status.total_steps, status.step_s)),
        "workers": f"{status.num_workers}, generation {status.generation}",
        "holders": "; ".join(found.words for found in status.shortfalls)
        or (_NONE if not status.plan or status.state.is_final else "as asked"),
        **({"tensor": _UNSHARED} if _is_unshared(status, spec) else {}),
        **({"quarantined": ", ".join(status.quarantined)} if status.quarantined else {}),
        **({"excluded": exclusions_text(status.exclusions)} if status.exclusions else {}),
        "incidents": incidents,
        **({"failure": open_incident_text(status.open_incident)} if status.open_incident else {}),
        "plan": status.plan or _NONE,
        "rule": estimate_of_job(spec).words,
        "data": _data(status, spec),
        "checkpoint": checkpoint,
        **({"quotas": quotas_text(status)} if status.quotas else {}),
    }
    if status.trials:
        fields["trials"] = f"{len(status.trials)}: skein sweep {status.job}"
        fields = {name: text for name, text in fields.items() if name not in _OF_ARRAYS}
    return [f"{name:<11}{text}" for name, text in fields.items()]


def quotas_text(status: JobStatus) -> str:
    """Quotas of a job's namespace, and how much of each its jobs have."""
    return f"{status.namespace}: {', '.join(use.shown for use in status.quotas)}"


def choice_text(choice: ChoiceStatus) -> str:
    """Rows that are drawn since when, what choosing them took, and what of it went another way than asked."""
    share = "" if choice.overhead is None else f", {choice.overhead:.1%} of the training before"
    following = "it stays" if choice.next_version is None else f"the next at step {choice.next_version}"
    shown = (
        f"{choice.num_picks:,} of {choice.num_rows:,} rows since step {choice.version}, "
        f"weights up to {choice.largest_weight:.3g}, chosen in {choice.seconds:.3g} s{share}; {following}"
    )
    if choice.farness is not None and choice.chance_farness:
        ratio = choice.farness / choice.chance_farness
        shown += (
            f"; distance of rows to those chosen {choice.farness:.4g}, "
            f"{ratio:.2f} of that to a random draw ({choice.chance_farness:.4g})"
        )
    if choice.num_by_chance:
        shown += f"; what stands for {choice.num_by_chance:,} rows was drawn by chance"
    if choice.num_set_aside:
        shown += f"; {choice.num_set_aside:,} rows set aside, whose features are not finite"
    return shown


def experts_text(status: JobStatus) -> str:
    """Balance of a sparse model's experts, and the choices that found theirs full if there are any."""
    dropped = f", {status.drop_ratio:.2g} of the choices dropped" if status.drop_ratio else ""
    loads = ""
    if status.busiest_expert is not None and status.idlest_expert is not None:
        loads = (
            f", busiest {status.busiest_expert:.2g} and idlest {status.idlest_expert:.2g} of an even share"
        )
    return f"balance {number(status.balance_loss)} (1: used evenly){loads}{dropped}"


_UNSHARED = "no stage is on several devices, as parallel.tensor asks: see skein workers, and skein logs"


def _is_unshared(status: JobStatus, spec: JobSpec) -> bool:
    """Whether a job asks for several devices of a worker and none share a stage, once all workers have told."""
    tensor = spec.parallel.tensor
    asks = tensor.form != "auto" or tensor.sequence_parallel is True or tensor.size not in ("auto", 1)
    has_told = bool(status.uses) and all(use.held_peaks for use in status.uses)
    return asks and has_told and not any(form.num_devices > 1 for use in status.uses for form in use.forms)


def late_samples(status: JobStatus) -> str:
    """Samples of walkers that steps did not wait for."""
    batch = int(json.loads(status.spec)["batch"]["samples"])
    share = status.num_late_samples / max(1, batch * status.step)
    return f"{counted(status.num_late_samples, 'sample')} of late walkers, {share:.2g} of all"


def _doubt(status: JobStatus) -> str:
    """Doubt about a prediction: how far it may be off, and is; how near the best plan it is, where that can be told."""
    spread = f" ± {status.predicted_spread:.0%} by first measurements" if status.predicted_spread else ""
    off = (status.measured_step_s or status.predicted_step_s) / status.predicted_step_s
    if not 1 / PARTED <= off <= PARTED:
        return f"{spread}: off by {factor(off)}, so nobody knows how good the plan is; skein measure"
    return f"{spread}, no plan below {status.lower_bound_s:.3g} s"


def factor(ratio: float) -> str:
    """Ratio in words: how many times more or less.

    >>> factor(657.02), factor(0.25)
    ('657 times', '0.25 times')
    """
    return f"{ratio:.3g} times"


def _data(status: JobStatus, spec: JobSpec) -> str:
    """Length of an epoch, once that is known, and what ends every document, as far as it can be told here."""
    known: list[str] = []
    if status.num_train_samples:
        num_steps = -(-status.num_train_samples // spec.batch.samples)
        known.append(f"an epoch is {status.num_train_samples:,} samples, {counted(num_steps, 'step')}")
    try:
        end = end_of_documents(spec.data)
    except UserError:
        # Under the tokenizer's name another file lies here than where the workers are.
        end = spec.data.separator
    if end is not None:
        known.append(f"documents end with {end}")
    return "; ".join(known) or _NONE


TIME_COLUMNS = ("CHUNK OR LINK", "OP", "PLANNED", "MEASURED", "OFF BY")


def time_rows(status: JobStatus) -> list[tuple[str, ...]]:
    """Rows of predicted and measured times: of each op, each transfer and the step; see `TIME_COLUMNS`."""
    rows = [_time_row("step", "", status.predicted_step_s, status.measured_step_s)]
    for times in status.chunk_times:
        chunk, found = times.planned.chunk, times.measured
        name = f"stage {chunk.stage} on {chunk.worker}"
        for op, planned_s, measured_s in (
            ("forward", times.planned.forward_s, None if found is None else found.forward_s),
            ("backward", times.planned.backward_s, None if found is None else found.backward_s),
            ("loss", times.planned.loss_s, None if found is None else found.loss_s),
            ("weights of it", times.planned.weight_s, None if found is None else found.weight_s),
        ):
            if planned_s > 0:
                rows.append(_time_row(name, op, planned_s, measured_s))
    for way in status.transfer_times:
        measured_s = None if way.measured is None else way.measured.seconds
        name = f"{way.planned.sender} -> {way.planned.receiver}"
        rows.append(_time_row(name, "transfer", way.planned.seconds, measured_s))
    return rows


def _time_row(name: str, op: str, planned_s: float, measured_s: float | None) -> tuple[str, ...]:
    return name, op, *_beside(planned_s, measured_s)


def _beside(planned_s: float, measured_s: float | None) -> tuple[str, str, str]:
    """Planned and measured seconds, and how far these are off."""
    if not measured_s:
        return seconds_text(planned_s), _NONE, _NONE
    off = _off(measured_s / planned_s) if planned_s > 0 else _NONE
    return seconds_text(planned_s), seconds_text(measured_s), off


def _off(ratio: float) -> str:
    """
    >>> _off(1.25), _off(657.0)
    ('+25%', '657 times')
    """
    return f"{ratio - 1:+.0%}" if 1 / PARTED <= ratio <= PARTED else factor(ratio)


def seconds_text(seconds: float) -> str:
    """
    >>> seconds_text(0.0123), seconds_text(2.5)
    ('12.3 ms', '2.50 s')
    """
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


USE_COLUMNS = ("WORKER", "STAGES", "FIXED", "PLANNED PEAK", "HELD PEAK", "OF SLOTS", "IDLE, PLANNED", "IDLE")


def use_rows(status: JobStatus) -> list[tuple[str, ...]]:
    """Rows of memory and bubbles of each worker, planned beside told; see `USE_COLUMNS`."""
    return [
        (
            use.worker,
            ",".join(map(str, use.stages)),
            format_bytes(use.fixed_bytes),
            _peak(sum(use.planned_peaks), use.planned_bytes),
            _peak(sum(use.held_peaks), use.held_bytes) if use.held_peaks else _NONE,
            _peak(sum(use.slots), use.most_bytes - use.fixed_bytes),
            f"{use.planned_bubble:.0%}",
            _NONE if use.bubble is None else f"{use.bubble:.0%}",
        )
        for use in status.uses
    ]


FORM_COLUMNS = ("WORKER", "STAGE", "DEVICES", "FORM")


def form_rows(status: JobStatus) -> list[tuple[str, ...]]:
    """Rows of stages that devices of meshes share; see `FORM_COLUMNS`."""
    return [
        (use.worker, str(told.stage), str(told.num_devices), told.form)
        for use in status.uses
        for told in use.forms
    ]


COLLECTIVE_COLUMNS = ("WORKER", "COLLECTIVES", "NUMBER", "PLANNED", "MEASURED", "OFF BY", "FITTED", "R2")


def collective_rows(status: JobStatus) -> list[tuple[str, ...]]:
    """Rows of collectives between devices of meshes: time of one, planned beside measured, and how well that is known.

    See `COLLECTIVE_COLUMNS`.
    """
    return [
        (
            use.worker,
            told.kind,
            str(told.num_collectives),
            *_beside(told.predicted_s / told.num_collectives, told.measured_s / told.num_collectives),
            str(told.num_fits),
            _NONE if told.r_squared is None else f"{told.r_squared:.3f}",
        )
        for use in status.uses
        for told in use.collectives
    ]


def _peak(num_microbatches: int, num_bytes: int) -> str:
    return f"{num_microbatches} ({format_bytes(num_bytes)})"


WORKER_COLUMNS = (
    "WORKER",
    "STATE",
    "SITE",
    "ADDRESS",
    "DEVICE",
    "GFLOP/S",
    "MEMORY",
    "JOB",
    "STAGES",
    "HEARD",
)


def worker_row(status: WorkerStatus) -> tuple[str, ...]:
    """A worker in a list; see `WORKER_COLUMNS`."""
    profile = status.profile
    return (
        status.worker,
        status.state,
        status.site + _labelled(status),
        status.address + _reached(status),
        profile.device,
        _speed(profile),
        format_bytes(profile.memory_bytes),
        status.job or _NONE,
        ",".join(map(str, status.stages)) or _NONE,
        f"{status.beat_age_s:.1f} s ago",
    )


def _labelled(status: WorkerStatus) -> str:
    said = [*map(str, status.labels), *(f"{OFFERED}{name}" for name in status.offers)]
    return f" ({', '.join(said)})" if said else ""


def _reached(status: WorkerStatus) -> str:
    """Ways to a worker beside its address, and whether it carries for others, in words."""
    ways = [
        "called back" if relay == status.worker else f"by {relay or 'the coordinator'}"
        for relay in status.reached_by
    ]
    told = [*ways, *(["relays"] if status.offers_relay else [])]
    return f" ({', '.join(told)})" if told else ""


def _speed(profile: Profile) -> str:
    """GFLOP/s, with how far runs lay apart where that is much."""
    doubt = f" ± {profile.spread / 2:.0%}" if profile.spread >= _MUCH else ""
    return f"{profile.flops_per_s / 1e9:,.0f}{doubt}"


_MUCH = 0.1


def event_text(event: JobEvent) -> str:
    """An event in one line, without its time."""
    match event.body:
        case StateChanged(state=state, reason=reason):
            return f"{state}: {reason}" if reason else str(state)
        case EpochsCounted(num_train_samples=num_samples, num_steps=num_steps):
            return f"{counted(num_samples, 'sample')} in an epoch, {counted(num_steps, 'step')} in all"
        case StepFinished(record=record, tokens_per_s=rate):
            skipped = "" if record.decision == "apply" else f"  skipped: {record.reason}"
            balance = "" if record.balance_loss is None else f"balance {number(record.balance_loss)}  "
            balance += f"dropped {record.drop_ratio:.2g}  " if record.drop_ratio else ""
            return (
                f"step {record.step + 1}  loss {number(record.loss)}  norm {number(record.gradient_norm)}  "
                f"{balance}tokens/s {count(rate)}{skipped}"
            )
        case EvaluationFinished(version=version, loss=loss):
            return f"step {version}  validation loss {number(loss)}"
        case CheckpointFinished(version=version, url=url):
            return f"step {version}  checkpoint {'at the coordinator' if url is None else f'at {url}'}"
        case GenerationBegun(generation=generation, workers=names, reason=reason):
            return f"generation {generation}: {', '.join(names) or 'no workers'} ({reason})"
        case WentBack(from_version=before, to_version=after, reason=reason):
            return f"went back from step {before} to {after}: {reason}"
        case IncidentEnded(incident=incident):
            return f"incident in step {incident.step + 1}: {what(incident)}: {remedied(incident)}; {cost(incident)}"
        case LineLogged(worker=worker, line=line):
            return f"{worker or 'coordinator'}  {line.level.upper()}  {line.text}"
        case Ended(state=state, reason=reason):
            return f"{state}: {reason}" if reason else str(state)
        case _:
            assert_never(event.body)


def timed(event: JobEvent) -> str:
    """An event in one line, with its time of day here."""
    return f"{time.strftime('%H:%M:%S', time.localtime(event.wall_s))}  {event_text(event)}"
