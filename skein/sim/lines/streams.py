"""Control streams between simulated workers and the coordinator: ordered; a break loses what was in flight.

Rules of this file
- A cut link holds back what is said on a stream, in order; only a death or `breaks` ends the stream itself.
- What is under way is the term's in which it was said: another coordinator never hears it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from skein.errors import OutOfRangeError
from skein.protocol.coordinator.coordinator_io import ReportArrived, ReportRefused, Send, StreamBroken
from skein.protocol.messages.directives import Assign, NewGeneration, Prefetch
from skein.protocol.messages.ranges import check_numbers
from skein.protocol.messages.reports import Beat, Hello, Report
from skein.protocol.worker.worker_io import DirectiveArrived, StreamLost, StreamOpened
from skein.sim.judging.invariants import FoundStage
from skein.sim.lines.network import COORDINATOR, Network
from skein.sim.lines.reach import ReachTimes
from skein.sim.lines.transport import Give
from skein.sim.processes.coordinator import SimService
from skein.sim.processes.worker import SimWorker
from skein.types import Incarnation, WorkerId

CONTROL_S = 0.01
"""A message on a control stream, one way."""
DIAL_S = 0.05
"""Seconds from a broken stream to the next try."""
LARGE = (NewGeneration, Assign, Prefetch)
"""Directives that are larger than what a link lets through that drops full packets."""
UNHEARD_S = 2.2
"""Seconds from a directive that is lost on its way to the end of the stream."""
DIAL_AGAIN_S = 0.5
"""Seconds from that to the one after, where nobody answers."""


class Streams:
    """Carries directives down and reports up, and knows who hears the coordinator.

    Args:
        service: the coordinator's process.
        workers: all processes, by name; the caller changes it.
        take: hands a worker a directive.
        give: hands a worker any other event.
    """

    def __init__(
        self,
        service: SimService,
        network: Network,
        workers: Mapping[WorkerId, SimWorker],
        *,
        take: Callable[[SimWorker, DirectiveArrived], None],
        give: Give,
    ) -> None:
        self._service = service
        self._clock = service.clock
        self._network = network
        self._workers = workers
        self._take = take
        self._give = give
        self._reach = ReachTimes()
        self._choked: set[WorkerId] = set()

    # --- who hears whom ---

    def within_reach(self) -> Iterator[FoundStage]:
        """Stages held by processes that hear the coordinator, or may do so again in time.

        Whose name another process took, when it was silent, is none of them.
        """
        coordinator = self._service.coordinator
        for name, worker in self._workers.items():
            incarnation = worker.machine.identity.incarnation
            is_refused = coordinator is not None and (
                coordinator.membership.is_refused(incarnation)
                or coordinator.absence.is_replaced(name, incarnation)
            )
            if is_refused or not self._reach.counts(incarnation, now=self._clock.now):
                continue
            for chunk in worker.executor.chunks.values():
                yield FoundStage(worker=name, stage=chunk.stage, version=chunk.version, lineage=chunk.lineage)

    def note_reach(self, worker: SimWorker) -> None:
        """A process, or its way to the coordinator, has changed."""
        name, incarnation = worker.machine.identity.worker, worker.machine.identity.incarnation
        is_cut = self._network.is_cut(name, COORDINATOR) or self._network.is_cut(COORDINATOR, name)
        is_reached = worker.is_connected and not worker.is_frozen and not is_cut
        self._reach.note(incarnation, is_reached=is_reached, now=self._clock.now)

    def pass_on(self) -> None:
        """Links are cut or healed: streams pass on what was said meanwhile, in order."""
        for worker in self._workers.values():
            self.note_reach(worker)
        for name in sorted(self._workers):
            worker = self._workers[name]
            while worker.up and not self._network.is_cut(name, COORDINATOR):
                worker.up.popleft()()
            while worker.down and not self._network.is_cut(COORDINATOR, name):
                worker.down.popleft()()

    # --- opening and breaking ---

    def coordinator_is_up(self) -> None:
        """Have every worker dial."""
        self._reach.serves(now=self._clock.now)
        for name in sorted(self._workers):
            self.dial_soon(name, self._workers[name].machine.identity.incarnation)

    def coordinator_is_down(self) -> None:
        """All streams break."""
        for name in sorted(self._workers):
            self.disconnect(self._workers[name], "the coordinator died")

    def dial_soon(self, name: WorkerId, incarnation: Incarnation) -> None:
        """Have a process, if it is still this one, open a stream."""
        self._clock.after(DIAL_S, partial(self._dial, name, incarnation))

    def _dial(self, name: WorkerId, incarnation: Incarnation) -> None:
        worker = self._workers.get(name)
        if worker is None or worker.machine.identity.incarnation != incarnation or worker.is_connected:
            return
        if self._service.coordinator is None or self._clock.now < worker.dials_at:
            return
        if self._network.is_cut(name, COORDINATOR) or self._network.is_cut(COORDINATOR, name):
            self._clock.after(DIAL_AGAIN_S, partial(self._dial, name, incarnation))
            return
        worker.is_connected = True
        self.note_reach(worker)
        self._give(worker, StreamOpened())

    def disconnect(self, worker: SimWorker, reason: str) -> None:
        """A stream ends; both sides hear of it."""
        if not worker.is_connected:
            return
        worker.disconnect()
        self.note_reach(worker)
        identity = worker.machine.identity
        broken = StreamBroken(worker=identity.worker, incarnation=identity.incarnation, reason=reason)
        self._clock.after(CONTROL_S, partial(self._service.tell_term, self._service.term, broken))
        self._give(worker, StreamLost(reason=reason))

    def breaks(self, name: WorkerId) -> None:
        """A worker's stream ends, and it dials again."""
        worker = self._workers.get(name)
        if worker is not None:
            self.disconnect(worker, "broken")
            self.dial_soon(name, worker.machine.identity.incarnation)

    def dial_again(self, worker: SimWorker, after_s: float) -> None:
        """A process ends its stream, and opens the next one after so long at the earliest."""
        identity = worker.machine.identity
        self.disconnect(worker, "turned away")
        worker.dials_at = self._clock.now + after_s
        self._clock.at(worker.dials_at, partial(self._dial, identity.worker, identity.incarnation))

    # --- down ---

    def choke(self, name: WorkerId, *, is_choked: bool) -> None:
        """Large directives to a worker are lost from now on, and break its stream; or they get through again."""
        (self._choked.add if is_choked else self._choked.discard)(name)

    def send(self, command: Send) -> None:
        """Put a directive on its way."""
        worker = self._workers.get(command.worker)
        if worker is None or not worker.is_connected:
            return
        if worker.machine.identity.incarnation == command.incarnation:
            event = DirectiveArrived(directive=command.directive)
            self._clock.after(CONTROL_S, partial(self._hear, worker, self._service.term, event))

    def _hear(self, worker: SimWorker, term: int, event: DirectiveArrived) -> None:
        if term != self._service.term or not worker.is_connected:
            return
        name = worker.machine.identity.worker
        if worker.is_unheard:
            return
        if name in self._choked and isinstance(event.directive, LARGE):
            # What is sent after it waits behind it, and is lost with it.
            worker.is_unheard = True
            self._clock.after(UNHEARD_S, partial(self._break_unheard, worker))
        elif self._network.is_cut(COORDINATOR, name):
            worker.down.append(partial(self._take, worker, event))
        else:
            self._take(worker, event)

    def _break_unheard(self, worker: SimWorker) -> None:
        if worker.is_unheard:
            self.breaks(worker.machine.identity.worker)

    # --- up ---

    def report(self, worker: SimWorker, report: Report) -> None:
        """Put a report on its way, as it is or as a liar has it."""
        if not worker.is_connected:
            return
        if isinstance(report, Beat) and worker.executor.share_of_time != 1.0:
            report = replace(report, running_s=report.running_s * worker.executor.share_of_time)
        said = (report,) if worker.says is None else worker.says(report)
        for one in said:
            event = arrived(worker, one)
            if isinstance(one, Hello) and isinstance(event, ReportRefused):
                self._clock.after(CONTROL_S, partial(self.breaks, worker.machine.identity.worker))
            else:
                self._clock.after(CONTROL_S, partial(self._say, worker, self._service.term, event))

    def _say(self, worker: SimWorker, term: int, event: ReportArrived | ReportRefused) -> None:
        if not worker.is_connected:
            return
        if self._network.is_cut(worker.machine.identity.worker, COORDINATOR):
            worker.up.append(partial(self._service.tell_term, term, event))
        else:
            self._service.tell_term(term, event)


def arrived(worker: SimWorker, report: Report) -> ReportArrived | ReportRefused:
    """Event that the coordinator's edge makes of a report: numbers that cannot be do not get to the machine."""
    identity = worker.machine.identity
    try:
        check_numbers(report)
    except OutOfRangeError as error:
        return ReportRefused(worker=identity.worker, incarnation=identity.incarnation, reason=str(error))
    return ReportArrived(worker=identity.worker, incarnation=identity.incarnation, report=report)
