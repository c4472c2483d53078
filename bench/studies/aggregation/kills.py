"""One strike in the midst of an exchange, for every rule: members killed, frozen, gone or new, coordinators begun anew.

Simulated, with the protocol's own machines and each rule's real tensors. A seed is kept if the job ends, no committed
step is lost, replicas are bit-equal at every version and every exchange has kept what its rule promises.
"""

from collections import Counter
from collections.abc import Sequence

from bench.report import Row
from bench.studies.aggregation.measured import Measured
from skein.sim.moments import STRUCK, draw_strike, judge_struck, struck

NUM_SEEDS, QUICK_SEEDS = 200, 4


def measure(*, is_quick: bool) -> Measured:
    """A row for each rule."""
    seeds = range(QUICK_SEEDS if is_quick else NUM_SEEDS)
    return Measured(rows=tuple(_row(rule, seeds) for rule in STRUCK))


def violations(rule: str, seeds: Sequence[int]) -> dict[int, str]:
    """What was broken, by seed; `python -m skein.sim --rule RULE --seed SEED` tells the story of one."""
    found = {}
    for seed in seeds:
        try:
            judge_struck(struck(rule, seed))
        except Exception as error:  # noqa: BLE001 - whatever breaks is what is looked for
            found[seed] = repr(error)
    return found


def _row(rule: str, seeds: Sequence[int]) -> Row:
    broken = violations(rule, seeds)
    moments = Counter(draw_strike(rule, seed).moment for seed in seeds)
    first = f", the first of them {min(broken)}" if broken else ""
    return Row(
        what=f"{rule}: seeds of {len(seeds)} in which a strike broke something{first}",
        value=len(broken),
        unit="seeds",
        against=", ".join(f"{moment} {count}" for moment, count in sorted(moments.items())),
        ratio=len(broken) / len(seeds),
        goal="0",
        holds=not broken,
        spread=0.0,
    )
