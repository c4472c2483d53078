"""The record of a choice of rows, and lines about it for people."""

from collections.abc import Iterator
from dataclasses import replace
from math import isnan

from skein.numeric.coreset.portions import MOST_ODD, Chosen
from skein.protocol.log.choosing import choice_before, drawn_by, overhead, passes_until_next
from skein.protocol.log.history import JobHistory
from skein.protocol.log.records import CoresetChosen
from skein.protocol.messages.coresets import ToldChoice
from skein.types import Step


def recorded(
    job: JobHistory,
    row: int,
    chosen: Chosen,
    *,
    looked_at: Step,
    num_rows: int,
    seconds: float,
    num_together: int,
    now: float,
) -> CoresetChosen:
    """The choice as it counts at the job's version: the one before stays where too many rows cannot be compared.

    Args:
        row: of an array, whose model was asked.
        looked_at: version of the parameters by which rows were compared.
        num_rows: of which it was chosen.
        seconds: for which training stood still for this one and those of other rows, `num_together` in all; each has
            its part of the time.
    """
    version, choice = job.version, chosen.choice
    share = overhead(job, seconds, row)
    fresh, passes = ToldChoice.of(choice, version), passes_until_next(job, share, row)
    record = CoresetChosen(
        job=job.job,
        version=version,
        ids=fresh.ids,
        sizes=fresh.sizes,
        digest=choice.digest,
        farness=None if isnan(choice.error) else choice.error,
        chance_farness=chosen.chance_error,
        num_rows=num_rows,
        num_set_aside=choice.num_set_aside,
        num_by_chance=chosen.num_by_chance,
        num_faults=len(chosen.faults),
        passes=passes,
        seconds=seconds / num_together,
        overhead=share,
        wall_s=now,
        rows=drawn_by(job, row, passes=passes, num_picks=fresh.num_picks),
        num_steps_beside=version - looked_at,
    )
    last = choice_before(job, row)
    if choice.num_set_aside <= MOST_ODD * num_rows or last is None:
        return record
    return replace(
        record,
        ids=last.ids,
        sizes=last.sizes,
        digest=last.digest,
        farness=last.farness,
        chance_farness=last.chance_farness,
        num_set_aside=last.num_set_aside,
        num_by_chance=last.num_by_chance,
        num_faults=len(chosen.faults) + 1,
    )


def told_lines(job: JobHistory, record: CoresetChosen, chosen: Chosen, *, wanted_at: Step) -> Iterator[str]:
    """Lines about a recorded choice; `wanted_at`: version by whose parameters it was to be made."""
    weights, num_odd = record.told.read().weights, chosen.choice.num_set_aside
    num_steps = record.num_steps_beside
    took = f"{record.seconds:.1f} s" + (f", beside {num_steps} steps" if num_steps else "")
    trials = ", ".join(str(job.spec.rows[x.row].trial) for x in record.rows)
    at = f"step={record.version} coreset: " + (f"trial {trials}: " if trials else "")
    yield (
        f"{at}{len(weights)} of {record.num_rows} rows, weights "
        f"{weights.min():.3g} to {weights.max():.3g}, choice {record.digest[:12]}, in {took}"
    )
    if wanted_at != record.version - num_steps:
        yield (
            f"{at}chosen by the model as it is now, not at step {wanted_at}: workers that were to look at rows "
            "beside steps have lost its parameters of then"
        )
    if num_odd:
        stays = "; the choice before stays" if record.digest != chosen.choice.digest else ""
        yield f"{at}features of {num_odd} rows are not finite{stays}"
    for worker, reason in sorted(chosen.faults.items()):
        yield f"{at}rows of {worker} are drawn by chance: {reason}"


def overhead_line(job: JobHistory, record: CoresetChosen) -> str | None:
    """Line where choosing takes too much of the time; None: it does not, or no other choice follows."""
    share, most = record.overhead, job.spec.data.coreset.max_overhead
    if share is None or share <= most or not record.passes:
        return None
    return (
        f"step={record.version} coreset: choosing took {share:.0%} of the training before, above "
        f"max_overhead of {most:.0%}: the next choice is made after {record.passes} passes"
    )
