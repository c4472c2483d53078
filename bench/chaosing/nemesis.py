"""Carries planned blows out against a cluster, and notes what it did and when."""

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from bench.chaosing.blows import COORDINATOR, OF_COORDINATOR, Blow, Fault, Strike
from bench.chaosing.cluster import ChaosCluster
from bench.chaosing.watch import ended_by_themselves
from client.api import Client
from skein.errors import SkeinError
from skein.wire.views import WorkerState

_ASK_S = 0.5
"""For one question to the coordinator; if it is away, what it said last is believed."""
_REVIVE_S = 0.5
_SPARE_S, _SPARE_POLL_S = 8.0, 0.25
"""How long a blow waits for somebody to hold what its target holds, as after a death that is not made up for yet."""

Holdings = Mapping[str, frozenset[int]]
"""Stages that each working worker holds."""


def choose_targets(blow: Blow, holdings: Holdings, struck: Collection[str]) -> tuple[str, ...]:
    """The first of the blow's targets that may be struck; empty: none, as every one holds nothing or some stage alone.

    May be struck who is whole and has stages, each of which another whole worker holds too. A cut has two ends.

    >>> blow = Blow(at_s=0.0, fault=Fault.KILL, lasts_s=1.0, targets=("w0", "w1", "w2"))
    >>> choose_targets(blow, {"w0": frozenset({0}), "w1": frozenset({1}), "w2": frozenset({1})}, ())
    ('w1',)
    """
    if blow.fault in OF_COORDINATOR:
        return blow.targets
    num_ends, chosen = (2 if blow.fault is Fault.CUT else 1), list[str]()
    for target in blow.targets:
        whole = {name: stages for name, stages in holdings.items() if name not in (*struck, *chosen, target)}
        held = frozenset[int]().union(*whole.values())
        stages = holdings.get(target, frozenset())
        if target not in struck and (target == COORDINATOR or (stages and stages <= held)):
            chosen.append(target)
        if len(chosen) == num_ends:
            return tuple(chosen)
    return ()


def second_choice(blow: Blow, holdings: Holdings, struck: Collection[str]) -> tuple[str, ...]:
    """Who holds nothing, rather than who holds something alone; nobody that is struck.

    >>> blow = Blow(at_s=0.0, fault=Fault.KILL, lasts_s=1.0, targets=("w0", "w1", "w2"))
    >>> second_choice(blow, {"w0": frozenset({0}), "w1": frozenset({1})}, ())
    ('w2',)
    """
    whole = [target for target in blow.targets if target not in struck]
    whole.sort(key=lambda target: bool(holdings.get(target)))
    return tuple(whole[: 2 if blow.fault is Fault.CUT else 1])


@dataclass(order=True)
class _Healing:
    at_s: float
    number: int
    strike: Strike = field(compare=False)


class Nemesis:
    """Strikes while there are blows, heals in time, and goes on until `is_over` is set.

    Processes that end without being struck are counted in `crashed`, and started again.

    Args:
        cluster: all of whose workers are up.
        blows: by time.
        is_over: set when there is nothing left to disturb.
        give_up_at: Unix seconds after which that is not waited for.
        tell: given a line for each strike.
    """

    def __init__(
        self,
        cluster: ChaosCluster,
        blows: Sequence[Blow],
        *,
        is_over: threading.Event,
        give_up_at: float,
        tell: Callable[[str], None],
    ) -> None:
        self.crashed: list[str] = []
        self._cluster = cluster
        self._blows = blows
        self._is_over = is_over
        self._give_up_at = give_up_at
        self._tell = tell
        self._strikes: list[Strike] = []
        self._healings: list[_Healing] = []
        self._holdings: dict[str, frozenset[int]] = {}

    def run(self) -> tuple[Strike, ...]:
        """Everything that was struck, in order; the last healing may be later than the last blow."""
        began_s = time.time()
        for blow in self._blows:
            self._wait_until(began_s + blow.at_s)
            if self._is_over.is_set():
                break
            self._strike(blow)
        self._wait_until(self._give_up_at)
        self._heal_until(math.inf)
        return tuple(self._strikes)

    def _wait_until(self, at_s: float) -> None:
        """Meanwhile, heal what is due."""
        while time.time() < at_s and not self._is_over.is_set():
            self._heal_until(time.time())
            self._revive()
            due_s = min([at_s, *(healing.at_s for healing in self._healings)])
            self._is_over.wait(min(_REVIVE_S, max(0.0, due_s - time.time())))

    def _revive(self) -> None:
        """As whoever runs a worker would, when it ends without having been told to."""
        for name in ended_by_themselves(self._cluster):
            self._tell(f"{name} ended by itself")
            self.crashed.append(name)
            self._cluster.kill_worker(name)
            self._cluster.start_worker(name)

    # --- blows ---

    def _strike(self, blow: Blow) -> None:
        began_s = time.time()
        targets = self._targets(blow)
        is_first_choice = bool(targets)
        targets = targets or second_choice(blow, self._holdings, self._struck())
        if self._is_over.is_set() or not targets:
            return
        holds_alone = not is_first_choice and any(self._holdings.get(target) for target in targets)
        strike = Strike(
            fault=blow.fault,
            targets=targets,
            struck_s=time.time(),
            healed_s=time.time() + blow.lasts_s,
            waited_s=time.time() - began_s,
            is_last_holder=holds_alone,
        )
        self._hit(strike)
        self._strikes.append(strike)
        heappush(self._healings, _Healing(at_s=strike.healed_s, number=len(self._strikes) - 1, strike=strike))
        self._tell(f"{blow.fault.value} {' '.join(targets)}{' (the last holder)' if holds_alone else ''}")

    def _targets(self, blow: Blow) -> tuple[str, ...]:
        until_s = time.time() + _SPARE_S
        while True:
            self._look()
            targets = choose_targets(blow, self._holdings, self._struck())
            if targets or time.time() >= until_s or self._is_over.is_set():
                return targets
            self._wait_until(time.time() + _SPARE_POLL_S)

    def _struck(self) -> set[str]:
        return {target for healing in self._healings for target in healing.strike.targets}

    def _look(self) -> None:
        """Ask who holds what; nothing is learnt from a coordinator that is away."""
        with suppress(SkeinError), Client(self._cluster.target, timeout_s=_ASK_S, patience_s=0.0) as client:
            working = [w for w in client.workers() if w.state is WorkerState.WORKING]
            # Between two plans nobody has work, and everybody still holds what he held.
            self._holdings = {w.worker: frozenset(w.stages) for w in working} or self._holdings

    def _hit(self, strike: Strike) -> None:
        match strike.fault:
            case Fault.KILL:
                self._cluster.kill_worker(strike.targets[0])
                self._holdings.pop(strike.targets[0], None)
            case Fault.FREEZE:
                self._cluster.freeze_worker(strike.targets[0])
            case Fault.CUT:
                self._cluster.wires.cut(*strike.targets)
            case Fault.ACTOR:
                self._cluster.kill_actor()
            case Fault.HOST:
                self._cluster.kill_host()

    # --- healing ---

    def _heal_until(self, now_s: float) -> None:
        while self._healings and self._healings[0].at_s <= now_s:
            healing = heappop(self._healings)
            self._heal(healing.strike)
            self._strikes[healing.number] = replace(healing.strike, healed_s=time.time())

    def _heal(self, strike: Strike) -> None:
        match strike.fault:
            case Fault.KILL:
                self._cluster.start_worker(strike.targets[0])
            case Fault.FREEZE:
                self._cluster.thaw_worker(strike.targets[0])
            case Fault.CUT:
                self._cluster.wires.heal(*strike.targets)
            case Fault.ACTOR:
                pass  # Ray does
            case Fault.HOST:
                self._cluster.start_coordinator()
