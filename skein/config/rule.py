"""Answers of every aggregation rule about itself, so that nobody else asks which rule it is.

Rules of this file
- `RuleSpec` has the usual answer to each question; a rule says where it differs.
- A check takes the whole job and raises `UserError` with the dotted field, its value and what would be right. What
  depends on a model's sizes or on a graph's stability is checked where those are known: `skein.plan.admission`.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from skein.config.robust import NoRobust, RobustSpec
from skein.errors import UserError
from skein.spec import Spec
from skein.types import Precision

if TYPE_CHECKING:
    from skein.config.job import JobSpec

Wire = Literal["fp32", "bf16", "int8", "int4", "int2"]
PatternName = Literal["auto", "direct", "ring", "tree"]
GossipMethod = Literal["decentlam", "dsgd", "dmsgd", "da_dmsgd", "qg_dmsgd"]
GraphName = Literal[
    "measured",
    "ring",
    "mesh",
    "symmetric_exponential",
    "static_exponential",
    "one_peer_exponential",
    "random_matching",
]


class Walkers(StrEnum):
    """Number of trajectories of parameters that a job has: one for all replicas, or one for each."""

    ONE = "one"
    MANY = "many"

    @property
    def have_equal_holders(self) -> bool:
        """Whether holders of a stage are equal, so that any may give its state, save it or do another's part."""
        return self is Walkers.ONE

    @property
    def are_lines(self) -> bool:
        """Whether each walker is a line of holders of its own, with microbatches and files that are no other's."""
        return self is Walkers.MANY

    @property
    def sum_every_step(self) -> bool:
        """Whether gradients of all holders are summed in every step, unless an exchange ends it."""
        return self is Walkers.ONE


class Reach(StrEnum):
    """Walkers that take part in an exchange: every one, those of one group (a site), or each with its neighbours."""

    ALL = "all"
    GROUP = "group"
    NEIGHBOURS = "neighbours"


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """An exchange at the end of a step: the how-manieth of its kind (from 0), which fragment, who takes part.

    `overlap_steps` steps later the result is applied; 0: in the same.
    """

    round: int
    fragment: int = 0
    reach: Reach = Reach.ALL
    overlap_steps: int = 0


class ExportOf(StrEnum):
    """Parameters that an export has, in words for people."""

    ALL = ""
    MEAN = "the mean of all"
    LEADER = "the leader's"
    AGREED = "the weights they last agreed on"


# --- what rules have that not all have ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Leadership:
    """Exchanges in which all take what one walker has: on how many samples all are scored, how many check that."""

    probe_samples: int
    recheck_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbourhood:
    """Exchanges in which each averages with its neighbours in a graph; `fallback`: the method to take if unstable."""

    method: GossipMethod
    graph: GraphName
    every_steps: int
    fallback: GossipMethod | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """The share of the walkers that is waited for, and how many times the usual wait the others are given then."""

    share: float
    grace: float


# --- what exchanges send ---

_PLAIN = NoRobust()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """So often a step, one of `num_pieces` equal pieces of everybody's vector is combined and handed out to all."""

    per_step: float
    wire: Wire
    pattern: PatternName = "auto"
    robust: RobustSpec = _PLAIN
    num_pieces: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """The same with a bit for each number, and scales for each tensor or one for all."""

    per_step: float
    is_by_tensor: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Spreads:
    """So often a step a leader's parameters go to all that it leads."""

    per_step: float
    reach: Reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixes:
    """So often a step neighbours get so many vectors, and `has_ratios`: a number for each tensor besides."""

    per_step: float
    graph: GraphName
    num_vectors: int
    has_ratios: bool


Sending = Sums | Signs | Spreads | Mixes


# --- what a worker holds ---


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldNumbers:
    """Memory of a worker besides parameters, sums of gradients and activations, as numbers for each parameter.

    Args:
        state: that stay from step to step: moments, residuals, global parameters.
        exchange: that are there besides at the fullest moment of a reduction or an exchange: copies of the walker that
            it works on, parts as they travel, results, vectors that are joined of them.
    """

    state: float
    exchange: float

    @staticmethod
    def by_copy(state: float, vectors: float) -> "HeldNumbers":
        """Numbers of a rule whose exchange works on a copy of the walker and so many vectors of its length."""
        return HeldNumbers(state=state, exchange=1 + state + vectors)


SUMMED = 4.0
"""Numbers that a plain reduction holds for each parameter: parts that are sent, parts that came and their sum, the
shards of the result, and the joined result."""
EXCHANGED = 6.0
"""Vectors as long as a walker that its exchange works with: what it has to say, that with what it has not said yet, the
same in the wire's type and as peers read it, and the result. Allocators add what they keep between tensors; measured by
`python -m bench.memory`."""


class RuleSpec(Spec):
    """An aggregation rule, with the usual answers."""

    # --- who talks when ---

    @property
    def walkers(self) -> Walkers:
        """Number of trajectories of parameters: one for all replicas, or one for each."""
        return Walkers.ONE

    def due(self, step: int) -> tuple[Due, ...]:
        """The exchanges that end `step`, in the order of their application."""
        raise NotImplementedError

    def dues_at(self, step: int, *, num_steps: int) -> tuple[Due, ...]:
        """The same in a job of so many steps, whose last one may end with more."""
        return self.due(step)

    @property
    def lag_steps(self) -> int:
        """Steps that training goes on beside an exchange before its result is applied."""
        return 0

    # --- who takes part, and who is waited for ---

    @property
    def leadership(self) -> Leadership | None:
        """Way in which leaders are found; None: nobody leads."""
        return None

    @property
    def neighbourhood(self) -> Neighbourhood | None:
        """With whom each averages; None: all take part in an exchange."""
        return None

    @property
    def lateness(self) -> Lateness | None:
        """Quorum and grace after which late walkers are left out; None: all are waited for."""
        return None

    @property
    def is_eager(self) -> bool:
        """Whether nobody is waited for but in an exchange: fast walkers take more steps."""
        return False

    # --- what travels ---

    @property
    def sum_pattern(self) -> PatternName | None:
        """Pattern by which shards of gradients go where these are plain sums of what travels; None: they are not."""
        return None

    @property
    def is_additive(self) -> bool:
        """Whether gradients are plain sums of what travels, so that they may be added on the way."""
        return self.sum_pattern is not None

    @property
    def sum_wire(self) -> Wire:
        """Type that gradients travel as in steps without an exchange; fp32: as they are."""
        return "fp32"

    @property
    def exchanges_gradients(self) -> bool:
        """Whether what is exchanged is each holder's gradient, and not what an optimizer has made of it."""
        return False

    @property
    def weighs_tokens(self) -> bool:
        """Whether members count by what they have learned from."""
        return False

    @property
    def num_fragments(self) -> int:
        """In how many parts that are exchanged in turn."""
        return 1

    @property
    def combiner(self) -> RobustSpec:
        """Combiner that the owner of a shard puts its parts together with."""
        return _PLAIN

    @property
    def is_whole(self) -> bool:
        """Whether one owner must see all of what each member sends."""
        return False

    # --- what a worker holds ---

    def held(self, job: "JobSpec") -> HeldNumbers:
        """Numbers that a worker holds for each parameter in `job`."""
        return HeldNumbers(state=job.optimizer.num_moments, exchange=SUMMED)

    # --- what people are told ---

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings that an estimate names besides the rule."""
        return ()

    @property
    def has_warmup(self) -> bool:
        """Whether exchanges begin only after some steps."""
        return False

    @property
    def export_of(self) -> ExportOf:
        """Parameters that come out in an export."""
        return ExportOf.ALL

    # --- what it asks of a job ---

    def sendings(self, job: "JobSpec") -> tuple[Sending, ...]:
        """Sendings of the rule in `job`; the exchange that the rule is about comes last."""
        raise NotImplementedError

    def check(self, job: "JobSpec") -> None:
        """Refuses a job that gives it nothing to work with.

        Raises:
            UserError: with the first field that does not fit.
        """
        if self.walkers.are_lines:
            _check_lines(job)

    def _check_period(self, job: "JobSpec", field: str, period: int) -> None:
        if period > job.total_steps:
            hint = f"the job ends before walkers meet: give at most budget.steps ({job.total_steps})"
            raise UserError(f"aggregation.{field}", period, hint)

    def _check_wire(self, job: "JobSpec", wire: Wire, field: str = "wire") -> None:
        """Refuse a job that pays for float64 and would round it on the wire."""
        if job.precision is Precision.FP64 and wire != "fp32":
            hint = (
                "what travels in a job of precision fp64 is not rounded: give fp32, which means as computed"
            )
            raise UserError(f"aggregation.{field}", wire, hint)


def _check_lines(job: "JobSpec") -> None:
    """Every replica is a walker: there must be two, each with a microbatch and all stages of its own."""
    rule, replicas = job.aggregation.rule, job.parallel.replicas
    if replicas < 2:
        hint = f"with {rule} each replica is a walker of its own: give at least 2"
        raise UserError("parallel.replicas", replicas, hint)
    if replicas > job.batch.num_microbatches:
        most = job.batch.num_microbatches
        hint = (
            f"each walker needs a microbatch, a step has {most}: give at most {most}, or raise batch.samples"
        )
        raise UserError("parallel.replicas", replicas, hint)
    if job.skip.ratio:
        hint = f"with {rule} a walker holds each stage once, and all must learn in every step: give 0"
        raise UserError("skip.ratio", job.skip.ratio, hint)
