"""Times of a job's ops, transfers and steps, as its workers tell: for the next plan, and for whoever looks.

Rules of this file
- Nothing here decides. Measurements are soft: a restarted coordinator learns them again within seconds.
- Times of a stage outlive the generation that they were measured in; those of a worker that is lost do not.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from statistics import median

from skein.config.job import JobSpec
from skein.plan.load import StageLoad, stage_loads
from skein.plan.plan import ChunkTime, Plan, TransferTime
from skein.protocol.coordinator.runs.watching.detection import Stragglers, Visit
from skein.protocol.messages.reports import TimesMeasured
from skein.topology.fleet import Fleet, FleetWorker, Link, StageTime
from skein.topology.links import link_cost_s
from skein.types import ChunkRef, StageSpec, WorkerId

NUM_STEPS = 5
"""Steps of one plan whose median is believed."""
PARTED = 2.0
"""Times as long as planned, or a part of that: first measurements are wrong then, not the plan."""
_LEAST_S = 1e-9
"""Seconds that a tensor takes at least on any link: less was not measured."""
_NUM_KEPT = 2 * NUM_STEPS
"""So few that a change shows within a few steps."""

_Pair = tuple[WorkerId, WorkerId]


class Measured:
    """Times that are known of one job."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._chunks: dict[WorkerId, dict[StageSpec, ChunkTime]] = {}
        self._transfers: dict[_Pair, TransferTime] = {}
        self._steps_s: deque[float] = deque(maxlen=_NUM_KEPT)
        self._stragglers = Stragglers()
        self.anew: set[WorkerId] = set()
        """Workers that measured another speed than plans were made with, and wait for a plan that knows."""

    # --- what is told ---

    def take(self, worker: WorkerId, report: TimesMeasured, plan: Plan) -> None:
        """A worker of `plan` tells what it measured under it; what is not of it, or cannot be, is ignored."""
        stages = {stage.index: stage for stage in plan.stages}
        held = {placed.chunk for placed in plan.chunks if placed.chunk.worker == worker}
        own = self._chunks.setdefault(worker, {})
        planned = {time.chunk: time.total_s for time in plan.chunk_times if time.chunk.worker == worker}
        visits: list[Visit] = []
        for time in report.chunks:
            is_possible = all(
                0 <= seconds < inf
                for seconds in (time.forward_s, time.backward_s, time.loss_s, time.total_s - time.weight_s)
            )
            if time.chunk in held and is_possible:
                stage = stages[time.chunk.stage]
                own[stage] = time
                planned_s = planned.get(time.chunk, 0.0)
                visits.append(Visit(stage=stage, measured_s=time.total_s, planned_s=planned_s))
        self._stragglers.told(worker, visits)
        peers = {placed.chunk.worker for placed in plan.chunks}
        for transfer in report.transfers:
            is_possible = 0 < transfer.seconds < inf and transfer.num_bytes > 0
            if transfer.sender == worker and transfer.receiver in peers and is_possible:
                self._transfers[worker, transfer.receiver] = transfer

    def planned_with(self) -> None:
        """A plan is asked for that knows what was measured anew."""
        self.anew.clear()

    def step_took(self, seconds: float) -> None:
        """A step under the present plan, from its beginning to its commit."""
        self._steps_s.append(seconds)

    def adopted(self) -> None:
        """Forget the times of steps: those of another plan are other steps."""
        self._steps_s.clear()

    def measured_again(self, worker: WorkerId, factor: float) -> None:
        """A worker without work has measured its device, and found so many times the speed."""
        if not 1 / (1 + self._spec.plan.replan_if_off_by) < factor < 1 + self._spec.plan.replan_if_off_by:
            self.anew.add(worker)

    def lost(self, worker: WorkerId) -> None:
        """A worker is gone; who comes in its name may be another machine."""
        self._chunks.pop(worker, None)
        self.anew.discard(worker)
        self._stragglers.lose(worker)
        for pair in [pair for pair in self._transfers if worker in pair]:
            del self._transfers[pair]

    # --- what it comes to ---

    @property
    def step_s(self) -> float | None:
        """Median of the last steps of the present plan; None while there are too few."""
        return median(self._steps_s) if len(self._steps_s) >= NUM_STEPS else None

    def has_parted(self, plan: Plan) -> bool:
        """Whether most ops take more than `PARTED` times as long as `plan` has them, or less than a part of that."""
        if self.step_s is None:
            return False
        ratios = [x.total_s / planned.total_s for planned, x in self._beside(plan) if planned.total_s > 0]
        return bool(ratios) and not 1 / PARTED <= median(ratios) <= PARTED

    def chunk_time(self, chunk: ChunkRef, stage: StageSpec) -> ChunkTime | None:
        """Time that a chunk's ops were measured to take; None: not yet."""
        return self._chunks.get(chunk.worker, {}).get(stage)

    def transfer_time(
        self, sender: WorkerId, receiver: WorkerId, links: Mapping[_Pair, Link]
    ) -> TransferTime | None:
        """Time of a tensor's way there: without that of the acknowledgement, as far as its latency is known."""
        found = self._transfers.get((sender, receiver))
        if found is None:
            return None
        back = links.get((receiver, sender))
        back_s = 0.0 if back is None else back.latency_s
        seconds = max(found.seconds - back_s, found.seconds / 2)
        return found if seconds == found.seconds else replace(found, seconds=seconds)

    def on(self, fleet: Fleet, links: Mapping[_Pair, Link]) -> Fleet:
        """`fleet` with times, speeds and links as measured while this job ran.

        A profile tells what a device can do at best. Who has not worked yet is expected to fall as short of it as
        those do who have, for otherwise every newcomer would look like a bargain.
        """
        times = tuple(self._stage_times(worker.worker) for worker in fleet.workers)
        speeds = [self._speed(own) for own in times]
        shares = [
            speed / worker.profile.flops_per_s
            for worker, speed in zip(fleet.workers, speeds, strict=True)
            if speed is not None and worker.profile.flops_per_s > 0
        ]
        usual = median(shares) if shares else 1.0
        return Fleet(
            workers=tuple(
                _with_speed(worker, worker.profile.flops_per_s * usual if speed is None else speed)
                for worker, speed in zip(fleet.workers, speeds, strict=True)
            ),
            links=self._links(fleet, links),
            stage_times=tuple(time for own in times for time in own),
        )

    def _stage_times(self, worker: WorkerId) -> tuple[StageTime, ...]:
        """In the order of stages; a loss is cut into forward and backward as its arithmetic is."""
        own = self._chunks.get(worker, {})
        stages = sorted(own, key=lambda stage: (stage.index, stage.first, stage.stop))
        found = []
        for stage, load in zip(stages, self._loads(stages), strict=True):
            time = own[stage]
            forward_s, backward_s = time.forward_s, time.backward_s
            # Only who lies says that a stage without arithmetic has a loss.
            if time.loss_s > 0 and load.flops > 0:
                forward_s = time.loss_s * load.forward_flops / load.flops
                backward_s = time.loss_s - forward_s
            if forward_s > 0 and backward_s > 0:
                found.append(
                    StageTime(
                        worker=worker,
                        stage=stage,
                        forward_s=forward_s,
                        backward_s=backward_s,
                        weight_s=min(time.weight_s, backward_s) or None,
                    )
                )
        return tuple(found)

    def _speed(self, times: Sequence[StageTime]) -> float | None:
        """FLOP/s over all that a worker was measured at; None if that has no arithmetic, as looking up embeddings."""
        seconds = sum(time.forward_s + time.backward_s for time in times)
        flops = sum(load.flops for load in self._loads([time.stage for time in times]))
        return flops / seconds if seconds > 0 and flops > 0 else None

    def _loads(self, stages: Sequence[StageSpec]) -> tuple[StageLoad, ...]:
        return stage_loads(self._spec, stages)

    def _links(self, fleet: Fleet, links: Mapping[_Pair, Link]) -> tuple[Link, ...]:
        """Links of the fleet; where tensors went, such that one takes what they took."""
        position = {worker.worker: i for i, worker in enumerate(fleet.workers)}
        matrices = link_cost_s(fleet)
        found = {(link.sender, link.receiver): link for link in fleet.links}
        for sender, receiver in sorted(self._transfers):
            if sender not in position or receiver not in position:
                continue
            taken = self.transfer_time(sender, receiver, links)
            assert taken is not None
            at = position[sender], position[receiver]
            known = Link(
                sender=sender,
                receiver=receiver,
                latency_s=float(matrices.latency_s[at]),
                bytes_per_s=float(matrices.bytes_per_s[at]),
            )
            found[sender, receiver] = _as_taken(known, taken)
        return tuple(found[pair] for pair in sorted(found))

    # --- beside what was planned ---

    @property
    def stragglers(self) -> tuple[tuple[WorkerId, float], ...]:
        """Workers that take much longer than they did, or than planned beside their peers, and how many times."""
        return self._stragglers.found()

    def blamed(self, plan: Plan, links: Mapping[_Pair, Link]) -> str:
        """Worker's speed or link that is farthest off what `plan` rests on, counted over a step, in words."""
        found = [
            *self._chunks_off(plan),
            *((f"the link {a} -> {b}", x) for (a, b), x in self._links_off(plan, links)),
        ]
        return max(found, key=lambda entry: (abs(entry[1]), entry[0]))[0] if found else "what was measured"

    def changed_links(
        self, plan: Plan, links: Mapping[_Pair, Link], *, off_by: float, step_s: float
    ) -> tuple[_Pair, ...]:
        """Links of `plan` whose tensors are off by this share, and by that share of a step too; the rest is noise."""
        planned = {(way.sender, way.receiver): way.seconds for way in plan.transfer_times}
        return tuple(
            pair
            for pair, excess_s in self._links_off(plan, links)
            if abs(excess_s) > off_by * step_s
            and abs(self._taken_s(pair, links) - planned[pair]) > off_by * planned[pair]
        )

    def _beside(self, plan: Plan) -> Iterator[tuple[ChunkTime, ChunkTime]]:
        """Times of the plan's chunks, as planned and as measured."""
        stages = {stage.index: stage for stage in plan.stages}
        for planned in plan.chunk_times:
            time = self.chunk_time(planned.chunk, stages[planned.chunk.stage])
            if time is not None:
                yield planned, time

    def _chunks_off(self, plan: Plan) -> Iterator[tuple[str, float]]:
        visits = plan.microbatches_by_chunk()
        for planned, time in self._beside(plan):
            if time.total_s > 0:
                num_visits = len(visits.get(planned.chunk, ()))
                yield f"{planned.chunk.worker}'s speed", (time.total_s - planned.total_s) * num_visits

    def _links_off(self, plan: Plan, links: Mapping[_Pair, Link]) -> Iterator[tuple[_Pair, float]]:
        num_tensors = Counter(
            pair
            for path in plan.paths
            for here, there in path.links
            for pair in ((here.worker, there.worker), (there.worker, here.worker))
        )
        for way in plan.transfer_times:
            pair = way.sender, way.receiver
            if pair in self._transfers:
                yield pair, (self._taken_s(pair, links) - way.seconds) * num_tensors[pair]

    def _taken_s(self, pair: _Pair, links: Mapping[_Pair, Link]) -> float:
        taken = self.transfer_time(*pair, links)
        assert taken is not None
        return taken.seconds


def _as_taken(known: Link, taken: TransferTime) -> Link:
    """A link that takes for a tensor what it took.

    What is too much is latency where the tensor is short, for then it is work at the ends; else both are off alike.
    """
    carried_s = taken.num_bytes / known.bytes_per_s
    known_s = max(known.latency_s + carried_s, _LEAST_S)
    if taken.seconds > known_s and carried_s < known.latency_s:
        return replace(known, latency_s=known.latency_s + taken.seconds - known_s)
    factor = taken.seconds / known_s
    return replace(known, latency_s=known.latency_s * factor, bytes_per_s=known.bytes_per_s / factor)


def _with_speed(worker: FleetWorker, flops_per_s: float) -> FleetWorker:
    return replace(worker, profile=replace(worker.profile, flops_per_s=flops_per_s))
