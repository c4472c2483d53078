"""How the holders of a stage come to agree: one part of a job file, by rule, and when each rule talks.

Rules of this file
- `due(step)`, the exchanges that end a step in order, is a pure function of the spec, so that coordinator, workers
  and simulator agree without a message.
- Under ONE walker all holders have equal parameters; under MANY each replica is a walker with parameters of its own.
"""

from typing import Annotated, Literal

from pydantic import Field, Tag, model_validator

from skein.config.robust import NoRobust, RobustSpec
from skein.config.rule import Due, PatternName, Reach, Walkers, Wire
from skein.errors import UserError
from skein.spec import Spec, told_by

Ratio = Annotated[float, Field(ge=0, le=1)]


class AllReduce(Spec):
    """Every step ends with the sum of all gradients: one walker, exactly the batch's gradient."""

    rule: Literal["all_reduce"] = "all_reduce"
    wire: Literal["fp32", "bf16", "int8"] = "fp32"
    """What gradients travel as; bf16 and int8 keep what they round away for the next step (error feedback)."""
    pattern: PatternName = "auto"
    """Which way shards go: each part to its owner at once, along a ring, or up and down a tree; auto: the cheapest."""
    robust: RobustSpec = NoRobust()
    """How parts are combined; take a rule if a member may be broken or lie."""

    @property
    def walkers(self) -> Walkers:
        return Walkers.ONE

    def due(self, step: int) -> tuple[Due, ...]:
        """Every step, unless plain sums will do: those are reduced like every gradient."""
        is_plain = self.wire == "fp32" and self.robust.kind == "none"
        return () if is_plain else (Due(round=step),)


class _OneBit(Spec):
    """What both 1-bit rules have."""

    warmup_steps: Annotated[int, Field(ge=2)] = 1000
    """Steps in full precision before the variance is frozen: 15 to 25 % of all, and not before the learning rate is
    warm."""
    warmup_wire: Literal["fp32", "bf16"] = "bf16"
    """What gradients travel as in the warm-up; fp32 leaves them in the precision of the job."""
    variance_floor: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Least frozen variance, as a share of the mean of its tensor: without it units that were dead in the warm-up make
    the model diverge."""
    error_feedback: bool = True
    """Send next time what a bit could not say. Only a comparison turns it off."""

    @property
    def walkers(self) -> Walkers:
        return Walkers.ONE

    def due(self, step: int) -> tuple[Due, ...]:
        """Every step after the warm-up."""
        return (Due(round=step - self.warmup_steps),) if step >= self.warmup_steps else ()


class OneBitAdam(_OneBit):
    """1-bit Adam: after a warm-up the momentum travels as signs, with a frozen variance. Wants optimizer `adamw`."""

    rule: Literal["one_bit_adam"]


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


class Lsgd(Spec):
    """Leader SGD: every walker is pulled towards the best of its site now and then, and towards the best of all."""

    rule: Literal["lsgd"]
    local_every_steps: Annotated[int, Field(ge=1)] = 4
    """How often walkers of a group meet; raise this if links within sites are slow."""
    global_every_steps: Annotated[int, Field(ge=1)] = 16
    """How often all meet, a multiple of it; raise this if links between sites are slow."""
    local_pull: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the way to the leader of the site. Not multiplied by the learning rate."""
    global_pull: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """The same to the leader of all."""
    groups: Literal["sites", "all"] = "sites"
    """`sites`: the walkers of a site have a leader of their own; `all`: nobody leads but the leader of all."""
    probe_samples: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Validation samples that all walkers are scored on before an exchange, other ones each time."""
    recheck_ratio: Ratio = 0.1
    """How often each follower computes the leader's score again from what it received, one at least in every exchange
    unless this is 0. Wants models in one stage; with several, digests alone are compared."""
    asynchronous: bool = False
    """Fast walkers take more local steps between two exchanges: steps are counted whenever some walker ends one, those
    that end together as one. Wants models in one stage; samples that a slow walker does not come to are left out."""
    export: Literal["average", "leader"] = "average"
    """What comes out: the walkers' mean, or whoever led last."""

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
        if self.groups != "all" and self.global_every_steps != self.local_every_steps:
            dues.append(Due(round=done // self.local_every_steps - 1, reach=Reach.GROUP))
        if done % self.global_every_steps == 0:
            dues.append(Due(round=done // self.global_every_steps - 1))
        return tuple(dues)


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


class Gossip(Spec):
    """Every walker averages with its neighbours in a graph, and sends to nobody else. Momentum is the optimizer's."""

    rule: Literal["gossip"]
    method: GossipMethod = "decentlam"
    """Where momentum enters; `qg_dmsgd` bears graphs that others do not."""
    graph: GraphName = "measured"
    """`measured`: the symmetric graph and weights that agree soonest over the links as they are."""
    every_steps: Annotated[int, Field(ge=1)] = 1
    """Raise this, with `qg_dmsgd`, if links bear no exchange in every step."""
    if_unstable: Literal["refuse", "qg_dmsgd"] = "refuse"
    """What to do if method, momentum and graph together diverge: say so at submit, or take QG-DmSGD instead."""
    robust: RobustSpec = NoRobust()
    """How parts are combined; take a rule if a member may be broken or lie."""

    @property
    def walkers(self) -> Walkers:
        return Walkers.MANY

    def due(self, step: int) -> tuple[Due, ...]:
        """Each `every_steps` steps."""
        round_, left = divmod(step + 1, self.every_steps)
        return () if left else (Due(round=round_ - 1, reach=Reach.NEIGHBOURS),)


class DiLoCo(Spec):
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
    """What changes travel as; below fp32 what is rounded away goes into the next round (error feedback)."""
    error_feedback: bool = True
    """Send in the next round what was rounded away. Only a comparison turns it off."""
    fragments: Annotated[int, Field(ge=1, le=1024)] = 1
    """Into how many pieces a walker's parameters are cut, that are exchanged in turn: the same bytes, evenly spread."""
    overlap_steps: Annotated[int, Field(ge=0)] = 0
    """How many local steps a fragment's exchange may take while training goes on."""
    mix: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the new global parameters in what a walker goes on with; less than 1 keeps some of its own way."""
    quorum: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the walkers without which a round is not closed."""
    grace: Annotated[float, Field(ge=1, le=100)] = 3.0
    """How many times the usual wait for the last walker a round waits, once it has its quorum."""
    robust: RobustSpec = NoRobust()
    """How parts are combined; take a rule if a member may be broken or lie."""

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


AggregationSpec = Annotated[
    Annotated[AllReduce, Tag("all_reduce")]
    | Annotated[OneBitAdam, Tag("one_bit_adam")]
    | Annotated[OneBitLamb, Tag("one_bit_lamb")]
    | Annotated[Lsgd, Tag("lsgd")]
    | Annotated[Gossip, Tag("gossip")]
    | Annotated[DiLoCo, Tag("diloco")],
    told_by("rule", "all_reduce"),
]


def dues_at(rule: AggregationSpec, step: int, *, num_steps: int) -> tuple[Due, ...]:
    """The exchanges that end `step` of a job of so many steps, in the order of their application.

    The last step ends with all that local steps have brought: every fragment of DiLoCo is due then.

    >>> rule = DiLoCo(rule="diloco", local_steps=4, fragments=2)
    >>> [[due.fragment for due in dues_at(rule, step, num_steps=7)] for step in range(7)]
    [[], [0], [], [1], [], [0], [0, 1]]
    """
    if isinstance(rule, DiLoCo) and step + 1 == num_steps:
        return tuple(Due(round=step // rule.local_steps, fragment=k) for k in range(rule.fragments))
    return rule.due(step)
