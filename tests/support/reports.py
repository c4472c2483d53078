"""What workers say, in a line each."""

from skein import PROTOCOL_VERSION
from skein.protocol.messages.array_rounds import RowNumbers
from skein.protocol.messages.directives import Ledger
from skein.protocol.messages.reports import Hello, StageDone, Vote
from skein.topology.fleet import Profile
from skein.types import (
    Attempt,
    Epoch,
    Generation,
    GroupId,
    Incarnation,
    MicrobatchId,
    SiteId,
    StageIndex,
    Step,
    WorkerId,
    parse_group,
)


def profile(*, memory_bytes: int = 2**34) -> Profile:
    return Profile(device="cpu", device_name="test", flops_per_s=1e9, memory_bytes=memory_bytes)


def hello(
    worker: str,
    incarnation: str | None = None,
    *,
    version: int = PROTOCOL_VERSION,
    epoch: int = 0,
    secret: str | None = None,
) -> Hello:
    """The first thing that a worker says; by default its first incarnation is `{worker}-1`, and all know one secret."""
    return Hello(
        worker=WorkerId(worker),
        incarnation=Incarnation(incarnation or f"{worker}-1"),
        protocol_version=version,
        site=SiteId("here"),
        address=f"{worker}:1",
        profile=profile(),
        epoch=Epoch(epoch),
        host=f"{worker}.lab",
        secret=f"secret of {worker}" if secret is None else secret,
    )


def ledger(stage: int, worker: str, *ids: int) -> Ledger:
    return Ledger(
        stage=StageIndex(stage), worker=WorkerId(worker), microbatches=tuple(MicrobatchId(m) for m in ids)
    )


def stage_done(
    accumulated: Ledger,
    *,
    step: int = 0,
    generation: int = 1,
    loss_sum: float = 0.0,
    tokens: tuple[int, ...] = (),
) -> StageDone:
    return StageDone(
        generation=Generation(generation),
        step=Step(step),
        ledger=accumulated,
        loss_sum=loss_sum,
        tokens=tokens,
    )


def row_numbers(
    num_updates: int,
    *,
    loss: float = 1.0,
    num_tokens: int = 1,
    norm: float = 1.0,
    num_rewinds: int = 0,
    retired: str = "",
) -> RowNumbers:
    """Numbers of a row of an array after so many updates."""
    return RowNumbers(
        loss=loss,
        num_tokens=num_tokens,
        gradient_norm=norm,
        clip=1.0,
        learning_rate=0.1,
        num_updates=num_updates,
        num_rewinds=num_rewinds,
        retired=retired,
    )


def spread(total: int, parts: int) -> tuple[int, ...]:
    """`total` tokens over `parts` microbatches, the first ones having one more.

    >>> spread(5, 3), spread(0, 2)
    ((2, 2, 1), (0, 0))
    """
    return tuple(total // parts + (i < total % parts) for i in range(parts))


def attempt(number: int = 0, *, generation: int = 1, epoch: int = 1) -> Attempt:
    return Attempt(epoch=Epoch(epoch), generation=Generation(generation), number=number)


def vote(
    group: str | GroupId,
    *,
    number: int = 0,
    digest: str = "same",
    squared_norm: float = 1.0,
    is_finite: bool = True,
    step: int = 0,
) -> Vote:
    return Vote(
        generation=Generation(1),
        step=Step(step),
        group=parse_group(str(group)),
        attempt=attempt(number),
        digest=digest,
        squared_norm=squared_norm,
        is_finite=is_finite,
    )
