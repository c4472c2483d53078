"""The guard against gossip that diverges: its verdict on every published pair, and what the rule itself then does.

For each pair of graph and momentum DecentLaM steps without gradients from parameters that differ, as it does in a
worker. By how much the difference grows in a step is measured, beside the radius that the guard computed.

Source of the pairs: our own finding on DecentLaM's published recursion, eight and sixteen peers.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from bench.report import Row
from bench.studies.aggregation.measured import Measured
from bench.studies.plot import Chart, Line
from skein.config.aggregation import Gossip
from skein.config.optimizer import SgdSpec
from skein.config.rule import Due, GossipMethod, Reach
from skein.numeric.aggregate.gossip import MOMENTUM, GossipRule
from skein.numeric.aggregate.rule import Terms
from skein.numeric.walker import Walker
from skein.rng import stream
from skein.topology.graphs import GraphKind, graph_of
from skein.topology.stability import Stable, radius_of, verdict
from tests.support.exchanges import exchange, talks_by_row

_KINDS: tuple[GraphKind, ...] = ("ring", "static_exponential", "one_peer_exponential", "one_peer_hypercube")
_COUNTS = (8, 16)
_MOMENTA = (0.5, 0.8, 0.9)
_UNSTABLE = {
    ("static_exponential", 8): (0.8, 0.9),
    ("one_peer_exponential", 8): (0.8, 0.9),
    ("one_peer_hypercube", 8): (0.8, 0.9),
    ("static_exponential", 16): (0.5, 0.8, 0.9),
    ("one_peer_exponential", 16): (0.8, 0.9),
    ("one_peer_hypercube", 16): (0.8, 0.9),
}
"""Momenta at which the source says that DecentLaM diverges; it is stable at all others of `_MOMENTA`."""
_WARM_STEPS, _NUM_STEPS = 120, 240
_GROWTH_ERROR = 0.01
"""Of a rate measured over `_NUM_STEPS`: eigenvectors that are not orthogonal leave a constant, whose root that is."""
_DIM = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """DecentLaM, or another method, on a graph."""

    method: GossipMethod
    kind: GraphKind
    num_peers: int
    momentum: float

    @property
    def is_stable(self) -> bool:
        """What the source says."""
        return self.momentum not in _UNSTABLE.get((self.kind, self.num_peers), ())

    @property
    def radius(self) -> float:
        """What the guard computes."""
        return radius_of(self.method, self.momentum, graph_of(self.kind, self.num_peers))

    @property
    def is_accepted(self) -> bool:
        """What the guard says; of a graph that no job file can name, what its radius says."""
        if self.kind == "one_peer_hypercube":
            return self.radius < 1.0
        return isinstance(verdict(self.method, self.momentum, self.kind, self.num_peers), Stable)


def pairs() -> Iterator[Pair]:
    """Every published one of DecentLaM."""
    for num_peers in _COUNTS:
        for kind in _KINDS:
            for momentum in _MOMENTA:
                yield Pair(method="decentlam", kind=kind, num_peers=num_peers, momentum=momentum)


def growth(pair: Pair) -> float:
    """By how much the peers' difference grows in a step of the rule, after a while, without gradients."""
    optimizer = SgdSpec(name="sgd", momentum=pair.momentum, weight_decay=0.0)
    rule = GossipRule(spec=Gossip(rule="gossip", method=pair.method), optimizer=optimizer)
    start_ND = stream(0, "stability", pair.num_peers).standard_normal((pair.num_peers, _DIM))
    walkers = []
    for x in start_ND - start_ND.mean(axis=0):
        params = {"x": torch.from_numpy(x.copy())}
        walkers.append(Walker(params=params, state=rule.init(params)))
    graph, logs = graph_of(pair.kind, pair.num_peers), 0.0
    terms = [Terms(step=0, learning_rate=1.0, gradient_scale=1.0)] * pair.num_peers
    still = [{"x": torch.zeros(_DIM, dtype=torch.float64)}] * pair.num_peers
    for step in range(_WARM_STEPS + _NUM_STEPS):
        talks = talks_by_row(Due(round=step, reach=Reach.NEIGHBOURS), graph.at(step, seed=0).rows.tolist())
        walkers = exchange(rule, walkers, still, terms, talks)
        # What is linear may be scaled as a whole, so that nothing overflows, and centred, for rounding moves the mean.
        logs += _scaled(walkers) if step >= _WARM_STEPS else 0.0 * _scaled(walkers)
    return float(np.exp(logs / _NUM_STEPS))


def _scaled(walkers: list[Walker]) -> float:
    """Takes the mean from all and divides what is left by its norm, whose logarithm it gives back."""
    tensors = [
        [walker.params["x"] for walker in walkers],
        [walker.state[MOMENTUM]["x"] for walker in walkers],
    ]
    for some in tensors:
        mean = torch.stack(some).mean(dim=0)
        for tensor in some:
            tensor.sub_(mean)
    norm = float(torch.stack([torch.stack(some) for some in tensors]).norm())
    for some in tensors:
        for tensor in some:
            tensor.div_(norm)
    return float(np.log(norm))


def measure(*, is_quick: bool) -> Measured:
    """Verdicts beside what is published, and radii beside what the rule does."""
    every = list(pairs())
    refused = [x for x in every if not x.is_stable]
    accepted = [x for x in every if x.is_stable]
    worst = [
        Pair(method="qg_dmsgd", kind=kind, num_peers=n, momentum=beta)
        for n in _COUNTS
        for kind in _KINDS
        for beta in _MOMENTA
    ]
    rows = (
        _counted("unstable pairs refused", sum(not x.is_accepted for x in refused), len(refused)),
        _counted("stable pairs accepted", sum(x.is_accepted for x in accepted), len(accepted)),
        _counted("QG-DmSGD accepted on the same", sum(x.is_accepted for x in worst), len(worst)),
        _like_the_rule(every[::5] if is_quick else every),
    )
    return Measured(rows=rows, charts={"gossip-stability": _chart()})


def _counted(what: str, found: int, of: int) -> Row:
    return Row(
        what=what,
        value=found,
        unit="pairs",
        against=f"{of} published",
        ratio=found / of,
        goal="all",
        holds=found == of,
        spread=0.0,
    )


def _like_the_rule(some: list[Pair]) -> Row:
    """The largest relative difference of radius and growth."""
    apart = {pair: abs(growth(pair) / pair.radius - 1.0) for pair in some}
    pair = max(apart, key=lambda x: apart[x])
    return Row(
        what="growth per step of the rule without gradients, off its radius at most",
        value=apart[pair],
        unit="relative",
        against=f"radius {pair.radius:.4f}: {pair.kind}, {pair.num_peers} peers, momentum {pair.momentum}",
        ratio=1.0 + apart[pair],
        goal=f"<= {_GROWTH_ERROR}",
        holds=apart[pair] <= _GROWTH_ERROR,
        spread=0.0,
    )


def _chart() -> Chart:
    lines = []
    shown: tuple[tuple[str, GossipMethod, GraphKind], ...] = (
        ("ring", "decentlam", "ring"),
        ("symmetric exponential", "decentlam", "symmetric_exponential"),
        ("static exponential", "decentlam", "static_exponential"),
        ("one-peer exponential", "decentlam", "one_peer_exponential"),
        ("QG-DmSGD, one-peer", "qg_dmsgd", "one_peer_exponential"),
    )
    for look, (label, method, kind) in enumerate(shown):
        graph = graph_of(kind, 16)
        points = tuple((k / 50, radius_of(method, k / 50, graph)) for k in range(50))
        lines.append(Line(label=label, look=look, points=points))
    return Chart(
        title="DecentLaM's growth of disagreement, 16 peers",
        description=(
            "Growth per step over momentum. Above 1 gossip diverges: on the directed static exponential graph from a "
            "momentum of 0.5 on, on the one-peer graph from 0.56 on; on the ring and the symmetric exponential never."
        ),
        x_label="momentum",
        y_label="growth per step",
        lines=tuple(lines),
        y_from=0.4,
        y_to=1.3,
    )
