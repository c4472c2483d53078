"""Checks of a coordinator that answers: version, clock, pace of the link, and whether its workers can be reached."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from client.api import Client
from client.doctor.finding import DoctorFinding, doubtful, fine, wrong
from client.doctor.way import look_for_black_hole, reach
from client.errors import NotReachable
from skein.errors import UserError
from skein.topology.fleet import Link
from skein.units import format_bytes
from skein.wire.channel import split_address
from skein.wire.greeting import VersionReply
from skein.wire.views import WorkerState, WorkerStatus

MAX_SKEW_S, HOPELESS_SKEW_S = 2.0, 60.0
MIN_BYTES_PER_S = 1e6
MAX_ROUND_TRIP_S = 0.3
_NUM_TRIPS = 5
_BALLAST_BYTES = (1 << 16, 1 << 18, 1 << 20)
_ENOUGH_S = 0.5
"""A call that takes so long is measured well enough."""
_AT_ONCE = 32


def look_at_version(client: Client) -> DoctorFinding:
    """Release and epoch of a coordinator.

    Raises:
        SkeinError: it does not answer, or not to us.
    """
    version = client.version()
    return fine("coordinator", f"{client.target} runs release {version.release}, epoch {version.epoch}")


def look_at_link(client: Client) -> Iterator[DoctorFinding]:
    """Findings on the clock, and on the pace of the connection that everything else goes over.

    Raises:
        SkeinError: the coordinator has stopped answering.
    """
    trips = [_timed(client.weigh) for _ in range(_NUM_TRIPS)]
    began_s, took_s, reply = min(trips, key=lambda trip: trip[1])
    yield clock_skew(began_s, reply.wall_s, began_s + took_s)
    try:
        up = _pace(lambda size: client.weigh(sent_bytes=size), took_s)
        down = _pace(lambda size: client.weigh(received_bytes=size), took_s)
    except NotReachable as error:
        cure = "small calls work and larger ones do not: see mtu above, and whether the link drops packets"
        yield wrong("link", f"stands still ({error})", cure)
        return
    yield pace_finding(took_s, up, down)


def _timed(call: Callable[[], VersionReply]) -> tuple[float, float, VersionReply]:
    """This machine's clock before a call, seconds of it, and the reply."""
    began_s, since_s = time.time(), time.monotonic()
    reply = call()
    return began_s, time.monotonic() - since_s, reply


def _pace(call: Callable[[int], VersionReply], round_trip_s: float) -> float:
    """Bytes per second that calls of growing size get."""
    pace = 0.0
    for size in _BALLAST_BYTES:
        for _ in range(2):  # the first finds out what the link bears
            _, took_s, _ = _timed(partial(call, size))
            pace = size / max(took_s - round_trip_s, 1e-6)
            if took_s > _ENOUGH_S:
                return pace
    return pace


def clock_skew(began_s: float, their_s: float, ended_s: float) -> DoctorFinding:
    """Finding on the difference of two clocks, by a time that was read between two of ours."""
    if not their_s:
        cure = "the coordinator is of an older release, which does not tell its clock: upgrade it"
        return doubtful("clock", "not compared", cure)
    ahead_s, behind_s = began_s - their_s, their_s - ended_s
    skew_s = max(0.0, ahead_s, behind_s)
    if skew_s <= MAX_SKEW_S:
        return fine("clock", f"at most {max(abs(ahead_s), abs(behind_s)):.2f} s from the coordinator's")
    side = "ahead of" if ahead_s > behind_s else "behind"
    cure = "set both clocks, for instance with NTP: times in logs do not fit together, and certificates are refused"
    kind = wrong if skew_s > HOPELESS_SKEW_S else doubtful
    return kind("clock", f"{skew_s:.1f} s {side} the coordinator's", cure)


def pace_finding(round_trip_s: float, up_bytes_per_s: float, down_bytes_per_s: float) -> DoctorFinding:
    """Whether a link of that round trip and those rates can carry a job's tensors."""
    found = (
        f"round trip {1e3 * round_trip_s:.1f} ms, {format_bytes(up_bytes_per_s)}/s up, "
        f"{format_bytes(down_bytes_per_s)}/s down"
    )
    if min(up_bytes_per_s, down_bytes_per_s) < MIN_BYTES_PER_S:
        cure = "a slow link: join by a wire or another provider, or train with a rule that sends less (aggregation)"
        return doubtful("link", found, cure)
    if round_trip_s > MAX_ROUND_TRIP_S:
        cure = "a long way: put workers that hand stages to each other into one site, or train with diloco"
        return doubtful("link", found, cure)
    return fine("link", found)


def look_at_peers(client: Client) -> Iterator[DoctorFinding]:
    """Findings on every worker's address, as a worker here would have to dial it, and on links between workers.

    Raises:
        SkeinError: the coordinator has stopped answering.
    """
    workers = [worker for worker in client.workers() if worker.state is not WorkerState.LOST]
    if not workers:
        yield doubtful("workers", "none", f"start some: skein worker up --join {client.target}")
        return
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        dialled = list(pool.map(_dial, workers))
    yield from (trouble for _, trouble in dialled if trouble is not None)
    if all(trouble is None for _, trouble in dialled):
        far_s, farthest = max((took_s, x.worker) for (took_s, _), x in zip(dialled, workers, strict=True))
        reached = f"{len(workers)} of {len(workers)} can be reached from here"
        yield fine("workers", f"{reached}, the farthest is {farthest}, {1e3 * far_s:.1f} ms away")
    if links := client.links():
        yield slowest_link(links)


def _dial(worker: WorkerStatus) -> tuple[float, DoctorFinding | None]:
    """Seconds that a connection to a worker takes to open, and why it cannot be used from here, if so."""
    began_s = time.monotonic()
    try:
        host, port = split_address("worker", worker.address)
        finding = reach((host, port))
        took_s = time.monotonic() - began_s
        hole = None if finding.is_failed else look_for_black_hole(host, port)
    except (OSError, UserError) as error:
        return 0.0, _unusable(worker, str(error))
    if finding.is_failed:
        return took_s, _unusable(worker, finding.found)
    if hole is not None and hole.is_failed:
        return took_s, wrong("workers", f"{worker.worker}: {hole.found}", hole.cure)
    return took_s, None


def _unusable(worker: WorkerStatus, cause: str) -> DoctorFinding:
    cure = "open its port, or start it with --advertise and an address that its peers reach"
    return wrong(
        "workers", f"{worker.worker} cannot be reached at {worker.address} from here ({cause})", cure
    )


def slowest_link(links: Sequence[Link]) -> DoctorFinding:
    """Finding on the slowest of the links that workers measured."""
    slowest = min(links, key=lambda link: link.bytes_per_s)
    pace = f"{format_bytes(slowest.bytes_per_s)}/s, {1e3 * slowest.latency_s:.1f} ms"
    found = f"slowest of {len(links)}: {slowest.sender} to {slowest.receiver}, {pace}"
    if slowest.bytes_per_s >= MIN_BYTES_PER_S:
        return fine("links", found)
    return doubtful(
        "links", found, "see skein links; sites far apart want a rule that sends less (aggregation)"
    )
