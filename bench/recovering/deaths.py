"""Workers that die: one at a time, each coming back, and a third of them at once."""

import time
from bisect import bisect_right
from dataclasses import dataclass
from statistics import median

from bench.chaosing.job import NUM_MICROBATCHES, make_job
from bench.recovering.cluster import (
    RecoveryCluster,
    commits_of,
    durations,
    holders,
    incidents_of,
    num_doubled,
    num_steps_lost,
    percentile,
    wait_for_steps,
    wait_until_placed,
)
from bench.report import Row, spread
from client.api import Client
from skein.protocol.log.records import Incident
from skein.rng import stream

NUM_WORKERS, NUM_STAGES = 6, 3
STEP_GOAL = 2.0
STEP_S = 1.5
"""About what a step is to take, so that there is something to lose in it."""
_NUM_TRIAL_STEPS, _NUM_WARM_STEPS = 8, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Deaths:
    """Steps of one job in which workers died one by one; `suffering_s`: those in which one did."""

    median_s: float
    suffering_s: tuple[float, ...]
    incidents: tuple[Incident, ...]
    num_lost: int
    num_doubled: int


def fitting_microbatches(client: Client, *, seed: int) -> int:
    """How many microbatches make a step of about `STEP_S` here and now."""
    job = client.submit(make_job("trial", num_workers=NUM_WORKERS, steps=_NUM_TRIAL_STEPS, seed=seed))
    job.wait()
    step_s = median(durations(commits_of(job.history()))[_NUM_WARM_STEPS:])
    return min(4 * NUM_MICROBATCHES, max(8, round(NUM_MICROBATCHES * STEP_S / step_s)))


def one_by_one(
    cluster: RecoveryCluster, client: Client, *, num_deaths: int, num_microbatches: int, seed: int
) -> Deaths:
    """A job in which workers die in turn, at any time of a step, while every stage has two holders."""
    luck = stream(seed, "deaths")
    job = client.submit(
        make_job(
            "deaths", num_workers=NUM_WORKERS, steps=100_000, seed=seed, num_microbatches=num_microbatches
        )
    )
    wait_for_steps(job, _NUM_WARM_STEPS)
    struck: list[float] = []
    for turn in range(num_deaths):
        name = cluster.names[(turn + int(luck.integers(2)) * 3) % NUM_WORKERS]
        wait_until_placed(cluster, client, cluster.names)
        wait_for_steps(job, 2)
        time.sleep(float(luck.random()) * STEP_S)
        struck.append(time.time())
        cluster.kill_worker(name)
        cluster.start_worker(name)
        wait_for_steps(job, 2)
    wait_for_steps(job, 2)
    events = job.history()
    job.cancel(discard=True)
    commits = commits_of(events)
    suffering = sorted({bisect_right(commits, at_s) for at_s in struck})
    return Deaths(
        median_s=median(durations(commits)[_NUM_WARM_STEPS:]),
        suffering_s=tuple(commits[at] - commits[at - 1] for at in suffering),
        incidents=tuple(incidents_of(events)),
        num_lost=num_steps_lost(events),
        num_doubled=num_doubled(events),
    )


def death_rows(deaths: Deaths) -> list[Row]:
    """The step that suffers, beside the median step."""
    ratios = [suffering_s / deaths.median_s for suffering_s in deaths.suffering_s]
    p50, p95 = percentile(ratios, 50), percentile(ratios, 95)
    took = [one.seconds for one in deaths.incidents] or [0.0]
    remedies = ", ".join(sorted({one.remedy.value for one in deaths.incidents}))
    return [
        Row(
            what=f"step that suffers a death, p95 of {len(ratios)}, {NUM_WORKERS} workers",
            value=p95 * deaths.median_s,
            unit="s",
            against=f"median step {deaths.median_s:.2f} s; p50 {p50:.2f}, max {max(ratios):.2f} times that",
            ratio=p95,
            goal=f"<= {STEP_GOAL}",
            holds=p95 <= STEP_GOAL,
            spread=spread(ratios),
        ),
        Row(
            what="committed steps lost or doubled by those deaths",
            value=deaths.num_lost + deaths.num_doubled,
            unit="steps",
            against=f"{len(deaths.incidents)} incidents ({remedies}), "
            f"from notice to work p50 {percentile(took, 50):.2f} s, p95 {percentile(took, 95):.2f} s",
            ratio=float(deaths.num_lost + deaths.num_doubled),
            goal="0",
            holds=deaths.num_lost + deaths.num_doubled == 0,
            spread=0.0,
        ),
    ]


# --- a third at once ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Third:
    """Two of six dead at once: committed steps lost, and seconds until the next step was committed."""

    num_lost: int
    seconds: float
    num_doubled: int
    backup_every: int


def third(cluster: RecoveryCluster, client: Client, *, run: int, takes_a_stage: bool) -> Third:
    """Kill one holder of two stages, or both holders of one, then bring them back.

    The second is done when copies of all stages are elsewhere, and a few steps have been made since.
    """
    name = f"third-{'stage' if takes_a_stage else 'spread'}-{run}"
    spec = make_job(name, num_workers=NUM_WORKERS, steps=100_000, seed=run)
    every = spec.backup.every_steps
    job = client.submit(spec)
    wait_until_placed(cluster, client, cluster.names)
    wait_for_steps(job, every + 3 + 5 * run if takes_a_stage else 4)
    stage = run % NUM_STAGES
    first, second = holders(client, stage), holders(client, (stage + 1) % NUM_STAGES)
    names = (first[0], first[1]) if takes_a_stage else (first[0], second[0])
    struck_s = time.time()
    for victim in names:
        cluster.kill_worker(victim)
    wait_for_steps(job, 3)
    events = job.history()
    job.cancel(discard=True)
    for victim in names:
        cluster.start_worker(victim)
    cluster.wait_for_workers(NUM_WORKERS)
    commits = commits_of(events)
    lost = num_steps_lost(events)
    return Third(
        num_lost=lost,
        seconds=commits[bisect_right(commits, struck_s)] - struck_s,
        num_doubled=num_doubled(events) - lost,
        backup_every=every,
    )


def third_rows(spread_out: list[Third], a_stage: list[Third]) -> list[Row]:
    """Steps lost: none while each stage has a holder, else as many as the job file allows."""
    limit = max(one.backup_every for one in a_stage)
    return [
        _third_row("2 of 6 workers killed at once, each stage with a holder left", spread_out, limit=0),
        _third_row("2 of 6 killed at once, both holders of one stage", a_stage, limit=limit),
    ]


def _third_row(what: str, found: list[Third], *, limit: int) -> Row:
    worst = max(one.num_lost for one in found)
    took = [one.seconds for one in found]
    listed = ", ".join(str(one.num_lost) for one in found)
    return Row(
        what=f"committed steps lost: {what}",
        value=worst,
        unit="steps",
        against=f"lost {listed}; next commit after {median(took):.1f} s, at most {max(took):.1f} s",
        ratio=worst / limit if limit else float(worst),
        goal=f"<= {limit}",
        holds=worst <= limit and all(one.num_doubled <= 0 for one in found),
        spread=spread(took),
    )
