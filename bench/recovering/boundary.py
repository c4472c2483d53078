"""What the boundary log costs while nothing fails: turns of a few steps of one job, with another log in each."""

from dataclasses import dataclass, field
from statistics import median

from bench.chaosing.job import make_job
from bench.recovering.cluster import RecoveryCluster
from bench.recovering.worker import Mode
from bench.report import Row, spread
from client.api import Client
from skein.wire.views import StepFinished

GOAL = 1.03
NUM_SETTLING = 2
"""Steps after a turn: the first may have both logs."""
NUM_WARM_STEPS = 4
_MODES = (Mode.NOTHING, Mode.MEMORY, Mode.DISK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Step times by what the log kept; each turn has the median of its steps."""

    medians: dict[Mode, list[float]] = field(default_factory=lambda: {mode: [] for mode in _MODES})

    def ratios(self, mode: Mode) -> list[float]:
        """Of each turn to the one beside it in which nothing was kept."""
        pairs = zip(self.medians[mode], self.medians[Mode.NOTHING], strict=False)
        return [with_log / without for with_log, without in pairs]


def take_turns(cluster: RecoveryCluster, client: Client, *, num_turns: int, num_steps: int) -> Turns:
    """One job, in which all logs take so many turns of so many counted steps.

    The order is another each time, so that a machine that slows down slows all of them down.
    """
    spec = make_job("log", num_workers=len(cluster.names), steps=100_000, seed=0)
    turns = Turns()
    job = client.submit(spec)
    events = (event for event in job.events() if isinstance(event.body, StepFinished))
    before_s = [next(events).wall_s for _ in range(NUM_WARM_STEPS)][-1]
    for turn in range(num_turns):
        for mode in _MODES[turn % 3 :] + _MODES[: turn % 3]:
            cluster.turn(mode)
            found = []
            for _ in range(NUM_SETTLING + num_steps):
                at_s = next(events).wall_s
                found.append(at_s - before_s)
                before_s = at_s
            turns.medians[mode].append(median(found[NUM_SETTLING:]))
    events.close()
    job.cancel(discard=True)
    return turns


def rows_of(turns: Turns) -> list[Row]:
    """The log as it is, and one with no room in memory, each beside none."""
    what = {Mode.MEMORY: "step with the boundary log", Mode.DISK: "the same, all of it spilled to disk"}
    return [_row(turns, mode, words) for mode, words in what.items()]


def _row(turns: Turns, mode: Mode, what: str) -> Row:
    ratios = turns.ratios(mode)
    ratio = median(ratios)
    return Row(
        what=what,
        value=median(turns.medians[mode]),
        unit="s",
        against=f"keeping nothing, turn about: {median(turns.medians[Mode.NOTHING]):.3f} s, {len(ratios)} turns",
        ratio=ratio,
        goal=f"<= {GOAL}",
        holds=ratio <= GOAL,
        spread=spread(ratios),
    )
