"""Aggregation rules of a job file: how the holders of a stage come to agree, and when each rule talks.

Rules of this file
- `due(step)`, the exchanges that end a step in order, is a pure function of the spec, so that coordinator, workers
  and simulator agree without a message.
- Under ONE walker all holders have equal parameters; under MANY each replica is a walker with parameters of its own.
"""

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, Tag, model_validator

from skein.config.optimizer import GossipOptimizer, LambSpec, SgdSpec
from skein.config.robust import CentredClip, NormClip, NoRobust, RobustSpec, check_robust
from skein.config.rule import (
    EXCHANGED,
    Due,
    ExportOf,
    GossipMethod,
    GraphName,
    HeldNumbers,
    Lateness,
    Leadership,
    Mixes,
    Neighbourhood,
    PatternName,
    Reach,
    RuleSpec,
    Sending,
    Signs,
    Spreads,
    Sums,
    Walkers,
    Wire,
)
from skein.errors import UserError
from skein.spec import told_by

if TYPE_CHECKING:
    from skein.config.job import JobSpec

_LEAST_SHARE, _MOST_SHARE = 0.15, 0.25
"""Least and most share of all steps for a 1-bit rule's warm-up; see `OneBitLamb.warmup_steps`."""

Ratio = Annotated[float, Field(ge=0, le=1)]


class AllReduce(RuleSpec):
    """Every step ends with the sum of all gradients: one walker, exactly the batch's gradient."""

    rule: Literal["all_reduce"] = "all_reduce"
    wire: Literal["fp32", "bf16", "int8"] = "fp32"
    """Type that gradients travel as; bf16 and int8 keep what they round away for the next step (error feedback)."""
    pattern: PatternName = "auto"
    """Way of the shards: each part to its owner at once, along a ring, or up and down a tree; auto: the cheapest."""
    robust: RobustSpec = NoRobust()
    """Combiner of the members' parts; take a rule if a member may be broken or lie."""

    def due(self, step: int) -> tuple[Due, ...]:
        """Every step, unless plain sums will do: those are reduced like every gradient."""
        return () if self.is_additive else (Due(round=step),)

    @property
    def sum_pattern(self) -> PatternName | None:
        return self.pattern if self.wire == "fp32" and isinstance(self.robust, NoRobust) else None

    @property
    def exchanges_gradients(self) -> bool:
        return True

    @property
    def weighs_tokens(self) -> bool:
        return True

    @property
    def combiner(self) -> RobustSpec:
        return self.robust

    @property
    def is_whole(self) -> bool:
        return self.robust.compares_norms or self.robust.compares_vectors

    def held(self, job: "JobSpec") -> HeldNumbers:
        moments, replicas = job.optimizer.num_moments, job.parallel.replicas
        if self.is_additive:
            return super().held(job)
        # What was rounded away of this worker's gradient, and of the shards that it owns.
        residuals = 0.0 if self.wire == "fp32" else 1 + 1 / replicas
        return HeldNumbers.by_copy(moments + residuals, EXCHANGED + replicas * self.is_whole)

    def sendings(self, job: "JobSpec") -> tuple[Sending, ...]:
        return (Sums(per_step=1.0, wire=self.wire, pattern=self.pattern, robust=self.robust),)

    def check(self, job: "JobSpec") -> None:
        if self.pattern in ("ring", "tree"):
            field, along = "aggregation.pattern", f"along a {self.pattern} only sums are seen"
            if not isinstance(self.robust, NoRobust):
                hint = f"{self.robust.kind} must see every member's part, and {along}: give direct or auto"
                raise UserError(field, self.pattern, hint)
            if self.wire != "fp32":
                hint = f"{self.wire} would round at every hop, as {along}: give direct or auto, or wire: fp32"
                raise UserError(field, self.pattern, hint)
        check_robust(self.robust, job.parallel.replicas, "parallel.replicas gives")
        self._check_wire(job, self.wire)


class _OneBit(RuleSpec):
    """Settings that both 1-bit rules have."""

    warmup_steps: Annotated[int, Field(ge=2)] = 1000
    """Steps in full precision before the variance is frozen: 15 to 25 % of all, and not before the learning rate is
    warm."""
    warmup_wire: Literal["fp32", "bf16"] = "bf16"
    """Type that gradients travel as in the warm-up; fp32 leaves them in the precision of the job."""
    variance_floor: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Least frozen variance, as a share of the mean of its tensor: without it units that were dead in the warm-up make
    the model diverge."""
    error_feedback: bool = True
    """Send next time what a bit could not say. Only a comparison turns it off."""

    def due(self, step: int) -> tuple[Due, ...]:
        """Every step after the warm-up."""
        return (Due(round=step - self.warmup_steps),) if step >= self.warmup_steps else ()

    @property
    def sum_wire(self) -> Wire:
        return self.warmup_wire

    @property
    def has_warmup(self) -> bool:
        return True

    def held(self, job: "JobSpec") -> HeldNumbers:
        """Both moments, and what a bit could not say of this worker's momentum and of the shards that it owns."""
        return HeldNumbers.by_copy(job.optimizer.num_moments + 1 + 1 / job.parallel.replicas, EXCHANGED)

    def _sendings(self, job: "JobSpec", *, is_by_tensor: bool) -> tuple[Sending, ...]:
        warm = min(1.0, self.warmup_steps / job.total_steps)
        warming = Sums(per_step=warm, wire=self.warmup_wire)
        return warming, Signs(per_step=1 - warm, is_by_tensor=is_by_tensor)

    def _check_warmup(self, job: "JobSpec", *, rule: str, wanted: str) -> None:
        if job.optimizer.name != wanted:
            raise UserError("optimizer.name", job.optimizer.name, f"{rule} is made of it: give {wanted}")
        field, steps = "aggregation.warmup_steps", self.warmup_steps
        if steps >= job.total_steps:
            low, high = (max(2, math.ceil(share * job.total_steps)) for share in (_LEAST_SHARE, _MOST_SHARE))
            hint = f"all {job.total_steps} steps would be warm-up: give {low} to {high}, or another rule"
            raise UserError(field, steps, hint)
        if steps < job.optimizer.warmup_steps:
            hint = (
                "the variance is frozen before the learning rate is warm: give at least "
                f"optimizer.warmup_steps ({job.optimizer.warmup_steps})"
            )
            raise UserError(field, steps, hint)
        self._check_wire(job, self.warmup_wire, "warmup_wire")


class OneBitAdam(_OneBit):
    """1-bit Adam: after a warm-up the momentum travels as signs, with a frozen variance. Wants optimizer `adamw`."""

    rule: Literal["one_bit_adam"]

    def sendings(self, job: "JobSpec") -> tuple[Sending, ...]:
        return self._sendings(job, is_by_tensor=True)

    def check(self, job: "JobSpec") -> None:
        self._check_warmup(job, rule=self.rule, wanted="adamw")


class OneBitLamb(_OneBit):
    """1-bit LAMB: the same with LAMB's layer ratios, kept up to date. Wants optimizer `lamb`."""

    rule: Literal["one_bit_lamb"]
    ratio_beta: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the mean of layer ratios in the warm-up."""
    min_factor: Annotated[float, Field(gt=0)] = 0.5
    """Lower bound of what the variance's drift may make of a layer ratio."""
    max_factor: Annotated[float, Field(gt=0)] = 4.0
    """Upper bound of the same."""
    factor_change: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """By which share that factor may change in one step."""

    def sendings(self, job: "JobSpec") -> tuple[Sending, ...]:
        return self._sendings(job, is_by_tensor=False)

    def held(self, job: "JobSpec") -> HeldNumbers:
        """The same, and a variance that goes on beside the frozen one."""
        return HeldNumbers.by_copy(super().held(job).state + 1, EXCHANGED)

    def check(self, job: "JobSpec") -> None:
        self._check_warmup(job, rule=self.rule, wanted="lamb")
        # A mean with decay b has seen what it is a mean of after 1 / (1 - b) steps; the margin is for rounding.
        least = math.ceil(1 / (1 - self.ratio_beta) - 1e-6)
        if self.warmup_steps < least:
            mean = f"the mean of layer ratios (ratio_beta {self.ratio_beta:g})"
            hint = f"{mean} is not settled: give at least {least}"
            raise UserError("aggregation.warmup_steps", self.warmup_steps, hint)
        if self.min_factor > self.max_factor:
            hint = f"give at most max_factor ({self.max_factor:g})"
            raise UserError("aggregation.min_factor", self.min_factor, hint)
        if isinstance(job.optimizer, LambSpec) and job.optimizer.bias_correction:
            hint = "one_bit_lamb freezes the moments as they are: give false"
            raise UserError("optimizer.bias_correction", True, hint)


class Lsgd(RuleSpec):
    """Leader SGD: every walker is pulled towards the best of its site now and then, and towards the best of all."""

    rule: Literal["lsgd"]
    local_every_steps: Annotated[int, Field(ge=1)] = 4
    """Period in steps at which walkers of a group meet; raise this if links within sites are slow."""
    global_every_steps: Annotated[int, Field(ge=1)] = 16
    """Period in steps at which all meet, a multiple of the groups'; raise this if links between sites are slow."""
    local_pull: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the way to the leader of the site. Not multiplied by the learning rate."""
    global_pull: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """The same to the leader of all."""
    groups: Literal["sites", "all"] = "sites"
    """`sites`: the walkers of a site have a leader of their own; `all`: nobody leads but the leader of all."""
    probe_samples: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Validation samples that all walkers are scored on before an exchange, other ones each time."""
    recheck_ratio: Ratio = 0.1
    """Probability that a follower computes the leader's score again from what it received, one at least in every
    exchange unless this is 0. Wants models in one stage; with several, digests alone are compared."""
    asynchronous: bool = False
    """Fast walkers take more local steps between two exchanges: steps are counted whenever some walker ends one, those
    that end together as one. Wants models in one stage; samples that a slow walker does not come to are left out."""
    export: Literal["average", "leader"] = "average"
    """Parameters that come out: the walkers' mean, or those of the walker that led last."""

    @model_validator(mode="after")
    def _check(self) -> "Lsgd":
        if self.global_every_steps % self.local_every_steps:
            hint = f"give a multiple of local_every_steps ({self.local_every_steps})"
            raise UserError("global_every_steps", self.global_every_steps, hint)
        return self

    @property
    def walkers(self) -> Walkers:
        return Walkers.MANY

    def due(self, step: int) -> tuple[Due, ...]:
        """First the pull to the leader of the group, then the one to the leader of all, if its time has come too."""
        done = step + 1
        if done % self.local_every_steps:
            return ()
        dues = []
        if self._has_groups:
            dues.append(Due(round=done // self.local_every_steps - 1, reach=Reach.GROUP))
        if done % self.global_every_steps == 0:
            dues.append(Due(round=done // self.global_every_steps - 1))
        return tuple(dues)

    @property
    def _has_groups(self) -> bool:
        return self.groups != "all" and self.global_every_steps != self.local_every_steps

    @property
    def leadership(self) -> Leadership:
        return Leadership(probe_samples=self.probe_samples, recheck_ratio=self.recheck_ratio)

    def held(self, job: "JobSpec") -> HeldNumbers:
        """The optimizer's moments; at work, the parameters as the step found them too, for anyone may lead."""
        return HeldNumbers.by_copy(job.optimizer.num_moments, EXCHANGED + 1)

    @property
    def is_eager(self) -> bool:
        return self.asynchronous

    @property
    def export_of(self) -> ExportOf:
        return ExportOf.MEAN if self.export == "average" else ExportOf.LEADER

    def sendings(self, job: "JobSpec") -> tuple[Sending, ...]:
        to_group = Spreads(per_step=1 / self.local_every_steps, reach=Reach.GROUP)
        to_all = Spreads(per_step=1 / self.global_every_steps, reach=Reach.ALL)
        return (to_group, to_all) if self._has_groups else (to_all,)

    def check(self, job: "JobSpec") -> None:
        super().check(job)
        self._check_period(job, "global_every_steps", self.global_every_steps)
        if not (job.data.held_out_ratio or job.data.validation):
            hint = "lsgd scores walkers on validation samples: give more than 0, such as 0.02"
            raise UserError("data.validation_ratio", 0, hint)
        if self.asynchronous and job.parallel.is_cut:
            hint = (
                "a walker of several stages cannot go on between two steps: "
                "give false, or parallel: {stages: 1, layout: line}"
            )
            raise UserError("aggregation.asynchronous", True, hint)


class Gossip(RuleSpec):
    """Every walker averages with its neighbours in a graph, and sends to nobody else. Momentum is the optimizer's."""

    rule: Literal["gossip"]
    method: GossipMethod = "decentlam"
    """Method, which says where momentum enters; `qg_dmsgd` bears graphs that others do not."""
    graph: GraphName = "measured"
    """`measured`: the symmetric graph and weights that agree soonest over the links as they are."""
    every_steps: Annotated[int, Field(ge=1)] = 1
    """Raise this, with `qg_dmsgd`, if links bear no exchange in every step."""
    if_unstable: Literal["refuse", "qg_dmsgd"] = "refuse"
    """Remedy if method, momentum and graph together diverge: say so at submit, or take QG-DmSGD instead."""
    robust: RobustSpec = NoRobust()
    """Combiner of the members' parts; take a rule if a member may be broken or lie."""

    @property
    def walkers(self) -> Walkers:
        return Walkers.MANY

    def due(self, step: int) -> tuple[Due, ...]:
        """Each `every_steps` steps."""
        round_, left = divmod(step + 1, self.every_steps)
        return () if left else (Due(round=round_ - 1, reach=Reach.NEIGHBOURS),)

    @property
    def neighbourhood(self) -> Neighbourhood:
        may_change = self.if_unstable != "refuse" and self.method != "qg_dmsgd"
        return Neighbourhood(
            method=self.method,
            graph=self.graph,
            every_steps=self.every_steps,
            fallback="qg_dmsgd" if may_change else None,
        )

    @property
    def settings(self) -> tuple[str, ...]:
        """The method may be another than was asked for: see `skein.plan.admission.settled_job`."""
        return self.method, self.graph

    @property
    def export_of(self) -> ExportOf:
        return ExportOf.MEAN

    @property
    def _num_vectors(self) -> int:
        return 2 if self.method == "da_dmsgd" else 1

    def held(self, job: "JobSpec") -> HeldNumbers:
        """Momentum, and statistics of Adam or LAMB; at work, a vector of each neighbour and its weighted share.

        A walker has about as many neighbours as walkers have binary digits.
        """
        shared = {"sgd": 0, "lamb": 3}.get(job.optimizer.name, 2)
        vectors = self._num_vectors + (shared > 0)
        neighbours = max(1, math.ceil(math.log2(job.parallel.replicas)))
        state = shared + (self.method != "dsgd")
        return HeldNumbers.by_copy(state, EXCHANGED + 2 * neighbours * vectors)

    def sendings(self, job: "JobSpec") -> tuple[Sending, ...]:
        """Parameters, DA-DmSGD's momentum, and what Adam or LAMB divides by."""
        mixing = Mixes(
            per_step=1 / self.every_steps,
            graph=self.graph,
            num_vectors=1 + (self.method == "da_dmsgd") + (not isinstance(job.optimizer, SgdSpec)),
            has_ratios=isinstance(job.optimizer, LambSpec),
        )
        return (mixing,)

    def check(self, job: "JobSpec") -> None:
        super().check(job)
        self._check_period(job, "every_steps", self.every_steps)
        if not isinstance(job.optimizer, GossipOptimizer):
            hint = "its momentum, or how it decays weights, is not gossip's to share: give adamw, sgd or lamb"
            raise UserError("optimizer.name", job.optimizer.name, hint)
        if isinstance(job.optimizer, SgdSpec) and job.optimizer.nesterov:
            hint = f"{self.method} says itself where momentum goes: give false"
            raise UserError("optimizer.nesterov", True, hint)
        if self.method == "dsgd":
            _check_no_momentum(job.optimizer)
        if not isinstance(self.robust, NoRobust | NormClip | CentredClip):
            hint = "of other combiners neighbours' means part: give none, median_norm_clip or centred_clip"
            raise UserError("aggregation.robust.kind", self.robust.kind, hint)


def _check_no_momentum(optimizer: GossipOptimizer) -> None:
    if isinstance(optimizer, SgdSpec):
        field, momentum = "momentum", optimizer.momentum
    else:
        field, momentum = "betas[0]", optimizer.betas[0]
    if momentum:
        raise UserError(f"optimizer.{field}", momentum, "dsgd has no momentum: give 0, or method: dmsgd")


class DiLoCo(RuleSpec):
    """Many local steps, then one outer step on the mean of what they changed: the rule for slow links."""

    rule: Literal["diloco"]
    local_steps: Annotated[int, Field(ge=1)] = 50
    """Steps on one's own between two exchanges of a parameter; raise this if links are slow."""
    outer_learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.7
    """Share of the mean change that the global parameters take, before momentum."""
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Lower this, to 0.6 or so, if a job has few rounds: twenty rather than hundreds."""
    nesterov: bool = True
    """Look ahead along the outer momentum."""
    wire: Wire = "int8"
    """Type that changes travel as; below fp32 what is rounded away goes into the next round (error feedback)."""
    error_feedback: bool = True
    """Send in the next round what was rounded away. Only a comparison turns it off."""
    fragments: Annotated[int, Field(ge=1, le=1024)] = 1
    """Into how many pieces a walker's parameters are cut, that are exchanged in turn: the same bytes, evenly spread."""
    overlap_steps: Annotated[int, Field(ge=0)] = 0
    """Local steps that a fragment's exchange may take while training goes on."""
    mix: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the new global parameters in what a walker goes on with; less than 1 keeps some of its own way."""
    quorum: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the walkers without which a round is not closed."""
    grace: Annotated[float, Field(ge=1, le=100)] = 3.0
    """Wait of a round that has its quorum, as a multiple of the usual wait for the last walker."""
    robust: RobustSpec = NoRobust()
    """Combiner of the members' parts; take a rule if a member may be broken or lie."""

    @model_validator(mode="after")
    def _check(self) -> "DiLoCo":
        if self.fragments > self.local_steps:
            raise UserError("fragments", self.fragments, f"give at most local_steps ({self.local_steps})")
        if self.overlap_steps >= self.local_steps:
            hint = f"give less than local_steps ({self.local_steps})"
            raise UserError("overlap_steps", self.overlap_steps, hint)
        return self

    @property
    def walkers(self) -> Walkers:
        return Walkers.MANY

    def due(self, step: int) -> tuple[Due, ...]:
        """Fragment k of K comes (k + 1) / K of the way through each `local_steps` steps."""
        cycle, at = divmod(step, self.local_steps)
        for fragment in range(self.fragments):
            if at == (fragment + 1) * self.local_steps // self.fragments - 1:
                return (Due(round=cycle, fragment=fragment, overlap_steps=self.overlap_steps),)
        return ()

    def dues_at(self, step: int, *, num_steps: int) -> tuple[Due, ...]:
        """The last step ends with all that local steps have brought: every fragment is due then.

        >>> rule = DiLoCo(rule="diloco", local_steps=4, fragments=2)
        >>> [[due.fragment for due in rule.dues_at(step, num_steps=7)] for step in range(7)]
        [[], [0], [], [1], [], [0], [0, 1]]
        """
        if step + 1 < num_steps:
            return self.due(step)
        return tuple(Due(round=step // self.local_steps, fragment=k) for k in range(self.fragments))

    @property
    def lag_steps(self) -> int:
        return self.overlap_steps

    @property
    def lateness(self) -> Lateness:
        return Lateness(share=self.quorum, grace=self.grace)

    @property
    def weighs_tokens(self) -> bool:
        return True

    @property
    def num_fragments(self) -> int:
        return self.fragments

    @property
    def combiner(self) -> RobustSpec:
        return self.robust

    @property
    def is_whole(self) -> bool:
        """Parts say the norm of the whole, so that clipping by norms may be done by piece."""
        return self.robust.compares_vectors

    @property
    def export_of(self) -> ExportOf:
        return ExportOf.AGREED

    def held(self, job: "JobSpec") -> HeldNumbers:
        """Global parameters and their momentum, residuals, the combiner's centre, the optimizer's moments."""
        replicas = job.parallel.replicas
        residuals = 1 + 1 / replicas if self.error_feedback and self.wire != "fp32" else 0.0
        centre = isinstance(self.robust, CentredClip)
        state = 2 + residuals + centre + job.optimizer.num_moments
        vectors = (EXCHANGED + replicas * self.is_whole) / self.fragments
        return HeldNumbers.by_copy(state, vectors)

    def sendings(self, job: "JobSpec") -> tuple[Sending, ...]:
        often = self.fragments / self.local_steps
        return (Sums(per_step=often, wire=self.wire, robust=self.robust, num_pieces=self.fragments),)

    def check(self, job: "JobSpec") -> None:
        super().check(job)
        self._check_period(job, "local_steps", self.local_steps)
        check_robust(self.robust, job.parallel.replicas, "parallel.replicas gives")
        self._check_wire(job, self.wire)


AggregationSpec = Annotated[
    Annotated[AllReduce, Tag("all_reduce")]
    | Annotated[OneBitAdam, Tag("one_bit_adam")]
    | Annotated[OneBitLamb, Tag("one_bit_lamb")]
    | Annotated[Lsgd, Tag("lsgd")]
    | Annotated[Gossip, Tag("gossip")]
    | Annotated[DiLoCo, Tag("diloco")],
    told_by("rule", "all_reduce"),
]
