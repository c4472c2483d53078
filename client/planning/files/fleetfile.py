"""Fleet files: YAML with `fleet` and `job`, parsed into what planners take. Units are written out, never guessed.

Rules of this file
- A link between workers counts before one between sites, and of two equals the later one.
- A link that nobody gives is unknown, and planners count it as the median of its kind.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from client.jobfile import prepare_job
from skein.config.explain import Words, explain_mistakes
from skein.config.job import JobSpec
from skein.config.load import Document, JobFileErrors, job_from_document, parse_document
from skein.config.mesh.tensor import MOST_DEVICES
from skein.errors import UserError
from skein.spec import Spec
from skein.topology.fleet import Fleet, FleetWorker, Link, Profile, StageTime
from skein.types import WORKER_NAME_PATTERN, SiteId, StageIndex, StageSpec, WorkerId
from skein.units import parse_bytes, parse_seconds

_EXPONENT = r"([eE][+-]?[0-9]+)?"
_NUMBER = rf"[0-9]+(\.[0-9]+)?{_EXPONENT}"
_ABOVE_ZERO = rf"([0-9]*[1-9][0-9]*(\.[0-9]+)?|0+\.[0-9]*[1-9][0-9]*){_EXPONENT}"
_BITS = {"bit/s": 1, "kbit/s": 10**3, "mbit/s": 10**6, "gbit/s": 10**9}

Duration = Annotated[
    str,
    Field(pattern=rf"^{_NUMBER} ?(s|ms|us|min)$", description="a duration with its unit, such as '120 ms'"),
]
Size = Annotated[
    str,
    Field(
        pattern=rf"^{_ABOVE_ZERO} ?([kMGT]i?)?B$",
        description="a size with its unit, above 0, such as '24 GB'",
    ),
]
Rate = Annotated[
    str,
    Field(
        pattern=rf"^{_ABOVE_ZERO} ?(([kMGT]i?)?B|[kMG]?bit)/s$",
        description="a bandwidth with its unit, above 0, such as '40 MB/s' or '150 Mbit/s'",
    ),
]
WorkerName = Annotated[
    str,
    Field(
        pattern=rf"^{WORKER_NAME_PATTERN}$", description="1 to 64 letters, digits, dots, dashes, underscores"
    ),
]


class SiteSpec(Spec):
    """A place, and what any two workers there have between them."""

    name: WorkerName
    latency: Duration
    bandwidth: Rate


class StageTimeSpec(Spec):
    """Measured times of layers `first` to `stop - 1`; used where a plan cuts the model there."""

    first: Annotated[int, Field(ge=0)]
    stop: Annotated[int, Field(ge=1)]
    forward: Duration
    backward: Duration


class WorkerSpec(Spec):
    """A worker: its sustained speed, and the memory that a job may use."""

    name: WorkerName
    site: WorkerName
    flops_per_s: Annotated[float, Field(gt=0, le=1e18)]
    memory: Size
    devices: Annotated[int, Field(ge=1, le=MOST_DEVICES)] = 1
    """Devices of a mesh; `memory` is that of all together, evenly."""
    stage_times: Annotated[tuple[StageTimeSpec, ...], Field(max_length=512)] = ()


class LinkSpec(Spec):
    """Link between two workers or two sites, both ways unless `one_way`: from the first to the second then."""

    ends: tuple[WorkerName, WorkerName]
    latency: Duration
    bandwidth: Rate
    one_way: bool = False


class FleetSpec(Spec):
    """Sites, workers, and the links between them."""

    sites: Annotated[tuple[SiteSpec, ...], Field(min_length=1, max_length=10_000)]
    workers: Annotated[tuple[WorkerSpec, ...], Field(min_length=1, max_length=10_000)]
    links: Annotated[tuple[LinkSpec, ...], Field(max_length=1_000_000)] = ()


class _File(Spec):
    """The part of a fleet file that is described here; a job describes itself."""

    fleet: FleetSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFile:
    """Contents of a fleet file, and how many links between workers it leaves open."""

    fleet: Fleet
    job: JobSpec
    num_unknown_links: int


def parse_fleet_file(text: str, *, origin: str) -> FleetFile:
    """The fleet and the job in `text`, YAML or JSON. Relative paths in the job count from the working directory.

    Raises:
        UserError: what is wrong, with the path of the field.
    """
    is_json = text.lstrip().startswith("{")
    document: Document = json.loads(text) if is_json else parse_document(text, origin=origin)
    for key in document:
        if key not in ("fleet", "job"):
            raise UserError(key, Words("no such key"), "a fleet file has fleet and job")
    job_document = document.get("job")
    if not isinstance(job_document, dict):
        raise UserError(
            "job", Words("missing"), "give the fields of a job file: `skein job schema` lists them"
        )
    spec = _fleet_spec({"fleet": document.get("fleet")})
    job = _job({str(key): value for key, value in job_document.items()})
    links = tuple(_links(spec))
    num_workers = len(spec.workers)
    return FleetFile(
        fleet=Fleet(
            workers=tuple(sorted(map(_worker, spec.workers), key=lambda x: x.worker)),
            links=links,
            stage_times=tuple(_stage_times(spec.workers)),
        ),
        job=job,
        num_unknown_links=num_workers * (num_workers - 1) - len(links),
    )


def _fleet_spec(document: Document) -> FleetSpec:
    try:
        spec = _File.model_validate_json(json.dumps(document), strict=True).fleet
    except ValidationError as error:
        raise JobFileErrors(explain_mistakes(error, _File.model_json_schema())) from error
    _check_names(spec)
    return spec


def _job(document: Document) -> JobSpec:
    try:
        return prepare_job(job_from_document(document), base=Path())
    except JobFileErrors as error:
        raise JobFileErrors([_inside_job(x) for x in error.errors]) from error
    except UserError as error:
        raise _inside_job(error) from error


def _inside_job(error: UserError) -> UserError:
    return UserError(f"job.{error.field}", error.value, error.hint)


def _check_names(spec: FleetSpec) -> None:
    sites, workers = [x.name for x in spec.sites], [x.name for x in spec.workers]
    seen: set[str] = set()
    for field, names in (("sites", sites), ("workers", workers)):
        for i, name in enumerate(names):
            if name in seen:
                raise UserError(
                    f"fleet.{field}[{i}].name", name, "give each site and worker a name of its own"
                )
            seen.add(name)
    for i, worker in enumerate(spec.workers):
        if worker.site not in sites:
            raise UserError(f"fleet.workers[{i}].site", worker.site, f"give one of {_some(sites)}")
        for j, time in enumerate(worker.stage_times):
            if time.stop <= time.first:
                field = f"fleet.workers[{i}].stage_times[{j}].stop"
                raise UserError(field, time.stop, f"give more than first, {time.first}")
    for i, link in enumerate(spec.links):
        for j, end in enumerate(link.ends):
            if end not in seen:
                raise UserError(
                    f"fleet.links[{i}].ends[{j}]", end, f"give one of {_some([*sites, *workers])}"
                )


def _some(names: Sequence[str]) -> str:
    """A few of the names that would be right."""
    return ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")


def _worker(spec: WorkerSpec) -> FleetWorker:
    profile = Profile(
        device=",".join(["given"] * spec.devices),
        device_name="",
        flops_per_s=spec.flops_per_s,
        memory_bytes=parse_bytes(spec.memory),
    )
    return FleetWorker(worker=WorkerId(spec.name), site=SiteId(spec.site), profile=profile)


def _stage_times(workers: Iterable[WorkerSpec]) -> Iterator[StageTime]:
    """Stage times of every worker. Only a plan can say which stage is meant: its layers count, its index does not."""
    for worker in workers:
        for index, time in enumerate(worker.stage_times):
            yield StageTime(
                worker=WorkerId(worker.name),
                stage=StageSpec(index=StageIndex(index), first=time.first, stop=time.stop),
                forward_s=parse_seconds(time.forward),
                backward_s=parse_seconds(time.backward),
            )


def _links(spec: FleetSpec) -> Iterator[Link]:
    """Directed links between workers, sorted, where any are given."""
    figures = {(site.name, site.name): _figures(site) for site in spec.sites}
    for link in spec.links:
        one, other = link.ends
        figures[one, other] = _figures(link)
        if not link.one_way:
            figures[other, one] = _figures(link)
    for sender in sorted(spec.workers, key=lambda x: x.name):
        for receiver in sorted(spec.workers, key=lambda x: x.name):
            known = _known(figures, sender, receiver)
            if known is not None and sender.name != receiver.name:
                yield Link(
                    sender=WorkerId(sender.name),
                    receiver=WorkerId(receiver.name),
                    latency_s=known[0],
                    bytes_per_s=known[1],
                )


def _known(
    figures: Mapping[tuple[str, str], tuple[float, float]], sender: WorkerSpec, receiver: WorkerSpec
) -> tuple[float, float] | None:
    """The nearest that is given: of the workers, of a worker and a site, of the sites or the site that they share."""
    pairs = product((sender.name, sender.site), (receiver.name, receiver.site))
    return next((figures[ends] for ends in pairs if ends in figures), None)


def _figures(spec: SiteSpec | LinkSpec) -> tuple[float, float]:
    """Latency in seconds and bandwidth in bytes per second."""
    return parse_seconds(spec.latency), rate(spec.bandwidth)


def rate(text: str) -> float:
    """Bytes per second in a bandwidth.

    >>> rate("40 MB/s"), rate("150 Mbit/s"), rate("2GiB/s")
    (40000000.0, 18750000.0, 2147483648.0)
    """
    number, unit = re.match(r"([0-9.eE+-]*[0-9.]) ?(.*)", text).groups()  # type: ignore[union-attr]
    if unit.lower() in _BITS:
        return float(number) * _BITS[unit.lower()] / 8
    return float(parse_bytes(text.removesuffix("/s")))
