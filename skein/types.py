"""Names that every package shares. Words are those of docs/glossary.md."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NewType

JobId = NewType("JobId", str)
WorkerId = NewType("WorkerId", str)
WORKER_NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""Worker names are labels of metrics and parts of log lines."""
SiteId = NewType("SiteId", str)
Incarnation = NewType("Incarnation", str)
"""Random name of one worker process. Same worker, other incarnation: the old one died."""

Epoch = NewType("Epoch", int)
"""Counts the openings of the run log; a directive of a lower epoch is refused."""
Generation = NewType("Generation", int)
"""Number of the current plan of a run; stamped on every message."""
Step = NewType("Step", int)
"""0-based. Step t turns parameters of version t into version t + 1."""
StageIndex = NewType("StageIndex", int)
MicrobatchId = NewType("MicrobatchId", int)


class Layout(StrEnum):
    """Layout of a path's end: the loss is on the last stage (`LINE`), or back on the worker that began it (`LOOP`)."""

    LINE = "line"
    LOOP = "loop"

    @property
    def comes_back(self) -> bool:
        """Whether a path ends on the worker that began it, so that samples and labels stay there."""
        return self is Layout.LOOP

    @property
    def num_head_stages(self) -> int:
        """Number of stages, after those that the model is cut into, that hold the head alone."""
        return int(self is Layout.LOOP)

    @property
    def num_ends(self) -> int:
        """Number of stages, of those that the model is cut into, on every path: the first, and one with the loss."""
        return 2 - self.num_head_stages

    def inner(self, num_stages: int) -> range:
        """Stages, of so many, that a path may leave out or swap.

        >>> Layout.LOOP.inner(4), Layout.LINE.inner(4)
        (range(1, 4), range(1, 3))
        """
        return range(1, num_stages + 1 - self.num_ends)


class Precision(StrEnum):
    """Arithmetic of a job: FP32, FP64 throughout, or FP32 parameters under bfloat16 autocast."""

    FP32 = "fp32"
    FP64 = "fp64"
    BF16 = "bf16"

    @property
    def word_bytes(self) -> int:
        """Bytes of one number in parameters, residuals and losses."""
        return 8 if self is Precision.FP64 else 4

    @property
    def product_bytes(self) -> int:
        """Bytes of one number that enters or leaves a matrix product."""
        return 2 if self is Precision.BF16 else self.word_bytes


MOST_STEPS = 100_000_000
"""Steps that a budget may have."""
DEFAULT_NAMESPACE = "default"
"""Namespace of whoever names none."""


class JobState(StrEnum):
    """State of a job for users. `PAUSED` waits for workers and is no failure, `HELD` for somebody to let it go on."""

    PENDING = "pending"
    PLANNING = "planning"
    RUNNING = "running"
    PAUSED = "paused"
    HELD = "held"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (JobState.FINISHED, JobState.FAILED, JobState.CANCELLED)


class Condition(StrEnum):
    """Result of a look at a checkpoint's files: what was written, something else or nothing, or no answer."""

    WHOLE = "whole"
    DAMAGED = "damaged"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Attempt:
    """Try at reducing one group; newer tries compare greater."""

    epoch: Epoch
    generation: Generation
    number: int


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ChunkRef:
    """A stage as held by one worker."""

    stage: StageIndex
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Own:
    """The group of all holders of a stage, who sum what only that stage has."""

    stage: StageIndex

    def __str__(self) -> str:
        return f"s{self.stage}"


@dataclass(frozen=True, slots=True)
class Tied:
    """The group of the holders of the first and the last stage, who sum the tensors that both have.

    Where a tied vocabulary is cut, each shard of its output has a group of its own: of all who hold any of the tensors
    that `first <= layer < stop` have in common with layers before.
    """

    first: int | None = None
    stop: int | None = None

    def __str__(self) -> str:
        return "tied" if self.first is None else f"tied.{self.first}-{self.stop}"


@dataclass(frozen=True, slots=True)
class Local:
    """The group of one chunk, whose sums are weighed on their own."""

    chunk: ChunkRef

    def __str__(self) -> str:
        return f"s{self.chunk.stage}@{self.chunk.worker}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """The group of those holders of a stage who take part in one exchange of the job's rule."""

    stage: StageIndex
    fragment: int | None = None
    """The piece of a walker that is exchanged, where a rule exchanges one piece at a time."""
    leader: int | Literal["all"] | None = None
    """The walker whose followers these are, by position; "all": all follow one; None: nobody leads."""

    def __str__(self) -> str:
        if self.fragment is not None:
            return f"x{self.stage}.f{self.fragment}"
        return f"x{self.stage}" if self.leader is None else f"x{self.stage}.{self.leader}"


GroupId = Own | Tied | Local | Exchanged
"""Identity of a group that reduces or exchanges. Its `str` is what logs and messages have; `parse_group` reads that."""

_GROUP = re.compile(
    r"tied(\.(?P<first>\d{1,10})-(?P<stop>\d{1,10}))?|s(?P<own>\d{1,10})(@(?P<worker>.+))?"
    r"|x(?P<stage>\d{1,10})(\.(f(?P<fragment>\d{1,10})|(?P<leader>\d{1,10})|(?P<all>all)))?",
    re.ASCII | re.DOTALL,
)


def parse_group(text: str) -> GroupId:
    """The group whose `str` is `text`.

    Raises:
        ValueError: there is none.

    >>> [parse_group(text) for text in ("s2", "tied.8-9", "x2.f1")]
    [Own(stage=2), Tied(first=8, stop=9), Exchanged(stage=2, fragment=1, leader=None)]
    >>> str(parse_group("x2.all")), str(parse_group("s2@w1"))
    ('x2.all', 's2@w1')
    """
    found = _GROUP.fullmatch(text)
    if found is None:
        raise ValueError(f"group {text!r}: must be like s2, s2@w1, tied, x2, x2.f1, x2.0 or x2.all")
    if found["own"] is not None:
        own = StageIndex(int(found["own"]))
        return Local(ChunkRef(stage=own, worker=WorkerId(found["worker"]))) if found["worker"] else Own(own)
    if found["first"] is not None:
        return Tied(first=int(found["first"]), stop=int(found["stop"]))
    if found["stage"] is None:
        return Tied()
    return Exchanged(
        stage=StageIndex(int(found["stage"])),
        fragment=None if found["fragment"] is None else int(found["fragment"]),
        leader="all" if found["all"] else None if found["leader"] is None else int(found["leader"]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """A contiguous range of a model's layers, `first <= layer < stop`, in the layer list of `skein.model`.

    In the `loop` layout the head is a stage of its own, placed with the first stage.
    """

    index: StageIndex
    first: int
    stop: int
