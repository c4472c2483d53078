"""Judge of quotas: no namespace is above what it may have, but for who comes back and for who is being called away."""

from skein.config.quota import UNBOUNDED
from skein.protocol.coordinator.quotas import QuotaUses
from skein.sim.judging.invariants import Violated
from skein.sim.world import World

MOST_ABOVE_S = 30.0
"""Seconds for which a namespace may be above: a worker that comes back is with its run before another is let go, which
takes a step, or a checkpoint if the store hangs meanwhile."""
LOOK_S = 0.5
_HELD = ("workers", "running_jobs")
"""Quotas of what can be taken back."""


class Bounds:
    """Follows which namespaces are above a quota, and since when."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], float] = {}
        self._looks_at = 0.0

    def look(self, world: World) -> None:
        """Look at all namespaces whose jobs have workers.

        Raises:
            Violated: one has been above a quota for too long.
        """
        now = world.clock.now
        if world.quotas == UNBOUNDED or world.coordinator is None or now < self._looks_at:
            return
        self._looks_at = now + LOOK_S
        view = world.coordinator.view
        crews = {job: len(run.crew) for job, run in view.runs.items()}
        found = QuotaUses(quotas=world.quotas, history=view.history, crews=crews)
        namespaces = {view.history.jobs[job].namespace for job in crews}
        uses = {(name, use.quota): use for name in sorted(namespaces) for use in found.of(name)}
        above = {key: use for key, use in uses.items() if use.quota in _HELD and use.used > use.most}
        self._since = {key: self._since.get(key, now) for key in above}
        for key, since_s in self._since.items():
            if now > since_s + MOST_ABOVE_S:
                raise Violated(f"namespace {key[0]} has {above[key].shown} for {now - since_s:.1f} s")
