"""Jobs over an emulated WAN between real processes, and every byte that went over it.

Rules of this file
- Bytes are those of IP packets, as the WAN's router carries them: with headers of IP, TCP, HTTP/2 and gRPC, and with
  acknowledgements. Where namespaces are not permitted the lab's proxies count streams, which lack IP's and TCP's.
- What a job costs once (connections, beginnings, ends) is not what a step costs: two jobs that differ in nothing but
  their number of steps are taken from each other.
- The model has one stage, so that nothing goes between workers but aggregation. What goes to the coordinator and back
  is counted apart: it is the same for all rules.
"""

import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.cluster import ANY_ROOT
from client.lab.control import Ask, LabStatus, LinkStatus, ask
from client.lab.preset import COORDINATOR
from client.lab.start import LabOptions, RunningLab, start_lab, stop_lab, wait_for_workers
from client.lab.state import LabFolder
from client.local import NotStarted
from skein.config.aggregation import AggregationSpec
from skein.config.data.sources import TextSource
from skein.config.data.spec import DataSpec
from skein.config.job import (
    BatchSpec,
    BudgetSpec,
    CheckpointSpec,
    EvaluationSpec,
    JobSpec,
    ParallelSpec,
    PlanSpec,
)
from skein.config.optimizer import OptimizerSpec
from skein.errors import UserError
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.types import JobState
from skein.wire.views import GenerationBegun, JobEvent, StepFinished

_QUIET_S = 1.0
_IDLE_BYTES = 16_384
"""Workers that send each other less in so many seconds only tell each other that they live."""
_SETTLE_S = 60.0
_MAX_RUNS = 3
"""A machine that is busy with other things makes workers look slow, and plans change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes sent so far: from workers to workers, and between workers and the coordinator."""

    worker_bytes: int
    control_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A job that ended: what went over the WAN meanwhile, when each step was committed, by one clock, and how many
    plans it had: each but the first is a link or a worker that was given up."""

    traffic: Traffic
    ended_s: tuple[float, ...]
    num_plans: int


def job_of(
    name: str,
    rule: AggregationSpec,
    optimizer: OptimizerSpec,
    *,
    num_steps: int,
    replicas: int,
    shape: LlamaShape,
    tokens: int = 32,
) -> JobSpec:
    """A byte-level model as one stage, a microbatch of one sample for each worker."""
    text = TextSource(path=f"{sysconfig.get_path('stdlib')}/email", glob="*.py")
    return JobSpec(
        name=name,
        model=LlamaModel(shape=shape),
        data=DataSpec(sources=(text,), sequence_tokens=tokens, validation_ratio=0.1),
        batch=BatchSpec(samples=replicas, microbatch_samples=1),
        parallel=ParallelSpec(stages=1, replicas=replicas),
        aggregation=rule,
        optimizer=optimizer,
        budget=BudgetSpec(steps=num_steps),
        plan=PlanSpec(budget_s=0.2, replan_if_off_by=10),
        evaluation=EvaluationSpec(every_steps=0, samples=4),
        checkpoint=CheckpointSpec(every_steps=0, keep=1),
    )


@contextmanager
def shaped(preset: str, num_workers: int) -> Iterator[RunningLab]:
    """A lab of that preset whose workers all have joined; ended on the way out.

    Raises:
        UserError: it does not come up on this machine.
    """
    with TemporaryDirectory() as path:
        folder = LabFolder(Path(path) / "lab")
        try:
            yield _started(folder, LabOptions(preset=preset, num_workers=num_workers, data_roots=(ANY_ROOT,)))
        finally:
            stop_lab(folder)


def _started(folder: LabFolder, options: LabOptions) -> RunningLab:
    try:
        lab = start_lab(folder, options)
        wait_for_workers(lab, lambda _joined, _of: None)
    except NotStarted as error:
        raise UserError("lab", options.preset, str(error)) from error
    return lab


def trained(lab: RunningLab, job: JobSpec, *, may_be_disturbed: bool = False) -> Course:
    """Runs a job from its beginning to its end, with nothing else going on.

    Args:
        may_be_disturbed: if there was more than one plan, take that as it is; else run the job again.

    Raises:
        RuntimeError: it did not finish, or was disturbed each time.
    """
    reasons: list[str] = []
    for _ in range(_MAX_RUNS):
        before = _quiet(lab)
        with lab.client() as client:
            running = client.submit(job)
            status = running.wait()
            events = running.history()
        if status.state is not JobState.FINISHED:
            break
        plans = [event.body.reason for event in events if isinstance(event.body, GenerationBegun)]
        if len(plans) == 1 or may_be_disturbed:
            return _course(before, _quiet(lab), events, num_plans=len(plans))
        reasons += plans
    raise RuntimeError(f"{job.name} {status.state}: {status.reason}; plans: {', '.join(reasons)}")


def _course(before: Traffic, after: Traffic, events: Sequence[JobEvent], *, num_plans: int) -> Course:
    sent = Traffic(
        worker_bytes=after.worker_bytes - before.worker_bytes,
        control_bytes=after.control_bytes - before.control_bytes,
    )
    ended_s = tuple(event.wall_s for event in events if isinstance(event.body, StepFinished))
    return Course(traffic=sent, ended_s=ended_s, num_plans=num_plans)


def _quiet(lab: RunningLab) -> Traffic:
    """What has been sent, once workers have nothing more to send: neither measurements nor a job's last packets."""
    until_s = time.monotonic() + _SETTLE_S
    last = _traffic(_status(lab))
    while time.monotonic() < until_s:
        time.sleep(_QUIET_S)
        before, last = last, _traffic(_status(lab))
        if last.worker_bytes - before.worker_bytes < _IDLE_BYTES:
            return last
    raise RuntimeError("workers go on sending, though no job runs")


def _status(lab: RunningLab) -> LabStatus:
    status = ask(lab.folder.path, Ask()).status
    assert status is not None
    return status


def _traffic(status: LabStatus) -> Traffic:
    control = sum(_bytes(link) for link in status.links if COORDINATOR in (link.sender, link.receiver))
    total = sum(_bytes(link) for link in status.links)
    return Traffic(worker_bytes=total - control, control_bytes=control)


def _bytes(link: LinkStatus) -> int:
    return link.traffic.get("bytes", 0)
