"""Choices of experts in contributions that are computed again: those of whoever computed them first."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path as FilePath

import pytest
import torch
from torch import Tensor, nn

from skein.model.sparse.routing import RouterKind, RoutingSpec
from skein.plan.ops import Direction
from skein.plan.order import PlacedOp
from skein.plan.plan import Plan
from skein.protocol.worker.ops import Loss
from skein.types import Layout, StageIndex, WorkerId
from tests.support.extent import part
from tests.support.halfway import num_ops
from tests.worker.lab import Lab, sparse_job
from tests.worker.test_resuming import Stoppable, Sums
from worker.model.base import Stage
from worker.model.sparse.junction import Junction
from worker.model.sparse.layer import SparseMlp

MOVED = 1e-6
"""How much the logit of one expert differs where a contribution is computed again."""


class Unlike(Stoppable):
    """A lab in which two experts of each layer score alike, and whoever computes again scores the second one higher.

    That is where something depends on it already: the next hop has gone on with what the first one gave, or the hop
    before has gone back with its gradient. What nobody has used may come out otherwise.
    """

    def __init__(self, lab: Lab, *, is_split: bool) -> None:
        super().__init__(lab, is_split=is_split)
        self.dead: WorkerId | None = None
        self.num_moved = 0
        self._used: set[tuple[int, StageIndex]] = set()
        for bench in lab.benches.values():
            for chunk in bench.holding.chunks.values():
                _score_alike(chunk.module)

    def lose(self, dead: WorkerId) -> None:
        """A worker dies; what it has done and others have used may not come out otherwise."""
        self.dead = dead
        ran = [placed for placed in self.halfway.ran if placed.chunk.worker != dead]
        self._used = {x for placed in ran for x in self._used_by(placed)}
        self.halfway.lose([dead])

    def _used_by(self, placed: PlacedOp) -> Iterator[tuple[int, StageIndex]]:
        """Contribution of the hop that an op has its operand of."""
        path, takes = self.plan.paths[placed.op.microbatch], placed.op.kind.row.takes
        if takes is not None and path.makers(takes, placed.hop):
            (maker,) = path.makers(takes, placed.hop)
            yield placed.op.microbatch, path.hops[maker].stage

    def _is_again(self, placed: PlacedOp) -> bool:
        """Whether another worker than this one was to do it."""
        first = self.plan.paths[placed.op.microbatch].hops[placed.hop]
        return first != placed.chunk

    def _compute(self, placed: PlacedOp, plan: Plan) -> None:
        place = placed.op.microbatch, placed.chunk.stage
        if self.dead is None or place not in self._used or not self._is_again(placed):
            super()._compute(placed, plan)
            return
        self.num_moved += placed.op.kind.row.takes is Direction.FORWARD
        chunk = self.lab.benches[placed.chunk.worker].holding.chunks[placed.chunk.stage]
        with _moved(chunk.module):
            super()._compute(placed, plan)


def _layers(module: Stage) -> list[SparseMlp]:
    return [layer for layer in module.modules() if isinstance(layer, SparseMlp)]


@torch.no_grad()
def _score_alike(module: Stage) -> None:
    for layer in _layers(module):
        weight = layer.get_parameter("gate.weight")
        weight[1] = weight[0]


@contextmanager
def _moved(module: Stage) -> Iterator[None]:
    """The second expert's logit is higher in every layer until the end of the block."""

    def moved(_gate: nn.Module, _given: tuple[Tensor, ...], scores_NE: Tensor) -> Tensor:
        more = torch.zeros_like(scores_NE)
        more[:, 1] = MOVED
        return scores_NE + more

    hooks = [layer.gate.register_forward_hook(moved) for layer in _layers(module)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def difference(found: Sums, wanted: Sums) -> float:
    """Largest difference of the sums of any stage's gradients, over its largest element."""
    worst = 0.0
    for stage in {at.stage for at in wanted}:
        there = [sums for at, sums in wanted.items() if at.stage == stage]
        here = [sums for at, sums in found.items() if at.stage == stage]
        for name in there[0]:
            expected = sum((sums[name] for sums in there), torch.zeros(()))
            total = sum((sums[name] for sums in here), torch.zeros(()))
            worst = max(worst, float((total - expected).abs().max() / expected.abs().max()))
    return worst


@pytest.fixture
def built(text: FilePath, labs: list[Lab]) -> Callable[..., Unlike]:
    def make(kind: RouterKind, layout: Layout, *, is_split: bool) -> Unlike:
        routing = RoutingSpec(router=kind, allow_lookahead=kind.row.looks_ahead)
        job = sparse_job(text, stages=3, replicas=2, layout=layout, num_chosen=2, routing=routing)
        labs.append(Lab(job))
        return Unlike(labs[-1], is_split=is_split)

    return make


CASES = [
    (RouterKind.SOFTMAX_TOPK, Layout.LINE, False),
    (RouterKind.SIGMOID, Layout.LOOP, True),
]


def disturbed(lab: Unlike, wanted: Sums, losses: Mapping[int, Loss]) -> float:
    """Largest difference of sums after any of some deaths; losses are equal but for the moved logits."""
    worst, num_moved = 0.0, 0
    for most in part(range(num_ops(lab.plan) + 1), every=3, start=2):
        lab.dead, lab.num_moved = None, 0
        lab.begin(random.Random(most))
        lab.run(most)
        lab.lose(lab.plan.workers[most % len(lab.plan.workers)])
        lab.go_on()
        num_moved += lab.num_moved
        worst = max(worst, difference(lab.sums(), wanted))
        for microbatch, loss in losses.items():
            assert lab.losses[microbatch].num_tokens == loss.num_tokens
    assert num_moved > 3
    return worst


@pytest.mark.parametrize(("kind", "layout", "is_split"), CASES)
def test_whoever_computes_again_routes_as_the_first_one_though_a_logit_differs(
    built: Callable[..., Unlike],
    monkeypatch: pytest.MonkeyPatch,
    kind: RouterKind,
    layout: Layout,
    is_split: bool,
) -> None:
    lab = built(kind, layout, is_split=is_split)
    lab.begin(random.Random(0))
    lab.run()
    wanted, losses = lab.sums(), lab.losses
    # The weights of the moved experts differ by a millionth.
    assert disturbed(lab, wanted, losses) < 10 * MOVED
    # Were it not told what was chosen, other experts would take the tokens.
    monkeypatch.setattr(Junction, "settled", lambda _junction, choices, _form: choices)
    assert disturbed(lab, wanted, losses) > 1e-3
