"""Groups that end a step: those reduced as soon as ledgers are complete, and those that exchange after that.

Rules of this file
- Under ONE walker without an exchange, the plan's groups are reduced. Else every chunk is its own group first: its
  holder votes the norm of its own sums, and from all norms come the numbers with which the exchange is asked for.
- Members of an exchange are in the order of the plan's groups, which is that of the walkers.
- Equal inputs give equal groups: a coordinator that begins anew asks for the same exchange.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from skein.config.aggregation import AggregationSpec
from skein.config.rule import Due, GraphName, Reach
from skein.plan.agreeing.exchange import Broadcast, Direct, Neighbours, Row
from skein.plan.agreeing.quorum import Eager, Quorum, token_weights
from skein.plan.plan import Group, Plan
from skein.topology.graphs import GraphKind, Mixing, mixing_at
from skein.types import ChunkRef, Exchanged, GroupId, Local, StageIndex, WorkerId

_PIECES = 4
"""In how many pieces each shard of a leader's parameters is handed on, so that nobody waits for the whole."""

Tree = Callable[[Sequence[WorkerId], int], tuple[int, ...]]
"""Parents by which what one of these workers has, by position, is handed on to the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """The groups of one step: `reduced`, then `exchanged`, of which `reach[i]` says which exchange of the rule it is.

    `units` are the reduced groups whose norms are taken together; with `has_one_norm` that is all of them.
    `num_sharing[i]` chunks, `reduced[i]` one of them, have parts of one gradient, which an exchange makes of their
    mean; none: each has a gradient of its own. `may_lose_some`: a unit that is not finite makes no step, and the
    others do. `num_tokens` is what each walker has learned from since the last exchange and before this step, where
    that is what its part weighs; empty: nothing.
    """

    reduced: tuple[Group, ...]
    units: tuple[tuple[GroupId, ...], ...]
    exchanged: tuple[Group, ...] = ()
    reach: tuple[Reach, ...] = ()
    num_sharing: tuple[int, ...] = ()
    has_one_norm: bool = False
    may_lose_some: bool = False
    checkers: tuple[tuple[WorkerId, ...], ...] = ()
    """Followers that check what their leader claims, by exchange; none given: nobody."""
    clips_result: bool = False
    """Whether an exchange gives a gradient: the norm of that is clipped then, and none before."""
    num_tokens: tuple[int, ...] | None = None
    quorum: Quorum | Eager | None = None
    """Rule by which late units are left out; None: none ever is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaders:
    """Walkers that lead, by position: the leader of all, and for each walker that of its own group."""

    of_all: int
    of_group: tuple[int, ...]


def local_group(chunk: ChunkRef) -> Group:
    """A chunk on its own."""
    return Group(group=Local(chunk), members=(chunk,), num_shards=1)


def exchanged_stage(group: GroupId) -> StageIndex | None:
    """The stage whose holders exchange something in this group; None for a reduction."""
    return group.stage if isinstance(group, Exchanged) else None


def plain_groups(plan: Plan) -> StepGroups:
    """Groups of a step whose gradients are summed over all holders, and nothing else."""
    units = (tuple(group.group for group in plan.groups),)
    return StepGroups(reduced=plan.groups, units=units, has_one_norm=True)


def step_groups(
    plan: Plan,
    aggregation: AggregationSpec,
    step: int,
    *,
    num_steps: int,
    seed: int,
    num_tokens: Sequence[int],
    leaders: Leaders | None,
    tree: Tree,
) -> StepGroups:
    """The groups of `step`.

    Args:
        plan: in place.
        aggregation: the job's.
        step: 0-based.
        num_steps: of the whole job. An exchange that may go on beside later steps is none of this one's.
        seed: the job's, for graphs that are drawn.
        num_tokens: by walker, what it has learned from since the last exchange; empty: nothing.
        leaders: where the rule has any; None: nobody leads this time, and there is no exchange.
        tree: how a leader's parameters spread.
    """
    dues = tuple(due for due in aggregation.dues_at(step, num_steps=num_steps) if not due.overlap_steps)
    if aggregation.walkers.sum_every_step and not dues:
        return plain_groups(plan)
    asked = [
        (due.reach, exchange)
        for due in dues
        for group in plan.groups
        for exchange in _exchanges(group, due, aggregation, seed=seed, leaders=leaders, tree=tree)
    ]
    chunks = [group.members for group in plan.groups]
    groups = StepGroups(
        reduced=tuple(local_group(member) for members in chunks for member in members),
        units=(),
        exchanged=tuple(exchange for _, exchange in asked),
        reach=tuple(reach for reach, _ in asked),
    )
    if not aggregation.walkers.are_lines:
        alone = tuple((group.group,) for group in groups.reduced)
        if aggregation.exchanges_gradients:
            # Each sends the mean of its own, weighed by what it is of: who has more to do is not longer for that.
            return replace(groups, units=alone, num_tokens=(), clips_result=True)
        sharing = tuple(len(members) for members in chunks for _ in members)
        return replace(groups, units=alone, num_sharing=sharing)
    units = tuple(tuple(Local(x) for x in walker) for walker in zip(*chunks, strict=True))
    groups = replace(groups, units=units, may_lose_some=True)
    return replace(
        groups,
        num_tokens=tuple(num_tokens) if aggregation.weighs_tokens else None,
        quorum=_quorum(aggregation, has_dues=bool(dues)),
    )


def _quorum(aggregation: AggregationSpec, *, has_dues: bool) -> Quorum | Eager | None:
    """Rule for late walkers: the job's quorum, or eager in a step without an exchange; None: all are waited for."""
    late = aggregation.lateness
    if late is not None:
        return Quorum(share=late.share, grace=late.grace)
    return Eager() if aggregation.is_eager and not has_dues else None


def weighed(group: Group, num_tokens: Sequence[int]) -> Group:
    """An exchange in which each member counts by what it has learned from."""
    pairs = [(i, weight) for i, weight in token_weights(dict(enumerate(num_tokens))) if weight]
    row = Row(members=tuple(i for i, _ in pairs), weights=tuple(weight for _, weight in pairs))
    return replace(group, weights=(row,) * group.num_shards)


def exchange_of_all(group: Group, due: Due, aggregation: AggregationSpec) -> Group:
    """An exchange in which shards have owners, all members count alike, and all get all results."""
    n, is_in_pieces = len(group.members), aggregation.num_fragments > 1
    row = Row(members=tuple(range(n)), weights=(1.0 / n,) * n)
    num_shards = 1 if aggregation.is_whole else group.num_shards
    return replace(
        group,
        group=Exchanged(stage=group.members[0].stage, fragment=due.fragment if is_in_pieces else None),
        num_shards=num_shards,
        pattern=Direct(),
        weights=(row,) * num_shards,
        fragment=due.fragment,
    )


def _exchanges(
    group: Group, due: Due, aggregation: AggregationSpec, *, seed: int, leaders: Leaders | None, tree: Tree
) -> list[Group]:
    """Exchanges of one stage's holders; none where a rule has leaders and nobody leads this time."""
    stage, n = group.members[0].stage, len(group.members)
    base = replace(group, group=Exchanged(stage=stage), pattern=Direct(), weights=(), fragment=due.fragment)
    if aggregation.leadership is not None:
        return [] if leaders is None else _pulls(base, due.reach, leaders, tree)
    if aggregation.neighbourhood is not None:
        rows = group.weights or rows_of(
            mixing_at(_drawn(aggregation.neighbourhood.graph), n, due.round, seed=seed)
        )
        return [replace(base, num_shards=n, pattern=Neighbours(), weights=rows)]
    return [exchange_of_all(group, due, aggregation)]


def _pulls(base: Group, reach: Reach, leaders: Leaders, tree: Tree) -> list[Group]:
    """Each leader's group, unless the leader is alone in it."""
    followers: dict[int, list[int]] = {}
    for walker in range(len(base.members)):
        leader = leaders.of_all if reach is Reach.ALL else leaders.of_group[walker]
        followers.setdefault(leader, []).append(walker)
    groups = []
    for leader, walkers in sorted(followers.items()):
        members, place = tuple(base.members[i] for i in walkers), walkers.index(leader)
        if len(walkers) > 1:
            name = Exchanged(stage=members[0].stage, leader=leader if reach is Reach.GROUP else "all")
            pattern = Broadcast(leader=place, parents=tree([x.worker for x in members], place))
            pieces = base.num_shards * _PIECES
            groups.append(replace(base, group=name, members=members, pattern=pattern, num_shards=pieces))
    return groups


def _drawn(graph: GraphName) -> GraphKind:
    """The graph by its name, for a plan without weights of its own: the measured are in the plan where links are."""
    return "ring" if graph == "measured" else graph


def rows_of(mixing: Mixing) -> tuple[Row, ...]:
    """Rows of a mixing: for each member those whose parts it takes, with their weights."""
    rows = []
    for i in range(mixing.num_members):
        senders = [j for j in range(mixing.num_members) if mixing.rows[i, j]]
        rows.append(Row(members=tuple(senders), weights=tuple(float(mixing.rows[i, j]) for j in senders)))
    return tuple(rows)
