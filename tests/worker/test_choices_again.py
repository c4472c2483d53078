"""Choices of experts in what is computed again, after a death or to see who lies: those of whoever did it first."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path as FilePath

import pytest
import torch
from torch import Tensor, nn

from skein.config.checks import ChecksSpec
from skein.model.sparse.routing import RouterKind, RoutingSpec
from skein.plan.ops import Direction
from skein.plan.order import PlacedOp
from skein.plan.plan import Plan
from skein.protocol.coordinator.runs.checking.inquiry import TOLERANCE
from skein.protocol.coordinator.runs.placing.resuming import resume
from skein.protocol.worker.ops import Loss
from skein.types import Layout, Precision, StageIndex, WorkerId
from tests.support.extent import part
from tests.support.halfway import Halfway, num_ops, slots_of
from tests.worker.lab import Lab, sparse_job
from tests.worker.test_resuming import START, Stoppable, Sums
from worker.compute.visits.left import Left
from worker.model.base import Stage
from worker.model.sparse import choosing
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
def _moved(module: Stage, by: float = MOVED) -> Iterator[None]:
    """The second expert's logit is higher in every layer until the end of the block."""

    def moved(_gate: nn.Module, _given: tuple[Tensor, ...], scores_NE: Tensor) -> Tensor:
        more = torch.zeros_like(scores_NE)
        more[:, 1] = by
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


class Checked(Unlike):
    """A lab in which a step is computed again without one worker, once all have reduced it, by stand-ins unlike it."""

    def first(self, luck: int = 0) -> Sums:
        """The step, up to its sums, which holders of a stage have sent each other."""
        self.dead = None
        self.begin(random.Random(luck))
        self.run()
        sums = self.sums()
        for group in self.lab.arrangement.groups:
            self.lab.reduce(START, group)
        return sums

    def again(self, aside: WorkerId, *, is_unlike: bool = True) -> Sums:
        """The same step without a worker; nothing that was done of it counts."""
        acks = self.halfway.acks(self.plan)
        told = {worker: replace(ack, progress=()) for worker, ack in acks.items() if worker != aside}
        found = resume(self.plan, told, version=START)
        assert found is not None
        self.dead = aside
        places = {(m, hop.stage) for m, path in enumerate(self.plan.paths) for hop in path.hops}
        self._used = places if is_unlike else set()
        self._hold(dict(found.resumptions))
        slots = {chunk: size for chunk, size in slots_of(self.plan).items() if chunk.worker != aside}
        self.halfway = Halfway(slots, random.Random(0))
        stuck = self.halfway.run(found.plan.paths, [x.schedule for x in found.resumptions.values()], slots)
        assert not stuck
        for placed in self.halfway.ran:
            self._compute(placed, found.plan)
        return self.sums()


CHECKS = [
    (RouterKind.SOFTMAX_TOPK, Layout.LINE),
    (RouterKind.SIGMOID, Layout.LOOP),
]


@pytest.fixture
def checked(text: FilePath, labs: list[Lab]) -> Callable[..., Checked]:
    def make(kind: RouterKind, layout: Layout) -> Checked:
        routing = RoutingSpec(router=kind, allow_lookahead=kind.row.looks_ahead)
        job = sparse_job(text, stages=3, replicas=2, layout=layout, num_chosen=2, routing=routing)
        labs.append(Lab(job.model_copy(update={"checks": ChecksSpec(fraction=1.0)})))
        return Checked(labs[-1], is_split=False)

    return make


@pytest.mark.parametrize(("kind", "layout"), CHECKS)
def test_a_stand_in_of_a_check_routes_as_the_suspect_though_a_logit_differs(
    checked: Callable[..., Checked], monkeypatch: pytest.MonkeyPatch, kind: RouterKind, layout: Layout
) -> None:
    def worst() -> float:
        lab = checked(kind, layout)
        # One worker of each stage.
        firsts = ((aside, lab.first()) for aside in lab.plan.workers[:3])
        found = max(difference(lab.again(aside), first) for aside, first in firsts)
        assert lab.num_moved >= 3
        return found

    assert worst() < 10 * MOVED
    # Were holders of a stage not told what was chosen, an honest suspect would seem to lie.
    monkeypatch.setattr(Left, "hear_routed", lambda *_: None)
    assert worst() > TOLERANCE[Precision.FP32]


def test_a_stand_in_does_not_take_choices_that_no_scores_lead_to(
    checked: Callable[..., Checked], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of so few tokens none ties as nearly as this but by what is moved.
    monkeypatch.setattr(choosing, "NEAR_TIE", 1e-5)
    honest = checked(RouterKind.SOFTMAX_TOPK, Layout.LINE).first()
    lab = checked(RouterKind.SOFTMAX_TOPK, Layout.LINE)
    liar = lab.plan.workers[2]
    # Its stage is the last one, so that others compute by the same inputs.
    holding = lab.lab.benches[liar].holding
    with ExitStack() as lie:
        for chunk in holding.chunks.values():
            lie.enter_context(_moved(chunk.module, by=10.0))
        lied = lab.first()
    again = lab.again(liar, is_unlike=False)
    assert difference(again, honest) < 10 * MOVED
    assert difference(again, lied) > TOLERANCE[Precision.FP32]


@pytest.fixture
def built(text: FilePath, labs: list[Lab]) -> Callable[..., Unlike]:
    def make(routing: RoutingSpec, layout: Layout, *, is_split: bool) -> Unlike:
        job = sparse_job(text, stages=3, replicas=2, layout=layout, num_chosen=2, routing=routing)
        labs.append(Lab(job))
        return Unlike(labs[-1], is_split=is_split)

    return make


NOISY = RoutingSpec(router=RouterKind.GSHARD, noise=1.0, balance_coefficient=0.5)


RANDOM = RoutingSpec(router=RouterKind.GSHARD, random_second=True, balance_coefficient=0.5, capacity=1.0)


@pytest.mark.parametrize("routing", [NOISY, RANDOM], ids=["noise", "second"])
def test_whoever_computes_again_draws_what_the_first_one_drew(
    text: FilePath, labs: list[Lab], routing: RoutingSpec
) -> None:
    labs.append(Lab(sparse_job(text, stages=2, replicas=2, num_chosen=2, routing=routing)))
    lab = Stoppable(labs[-1])
    lab.begin(random.Random(0))
    lab.run()
    wanted = lab.sums()
    for most in range(4, num_ops(lab.plan), 4):
        lab.begin(random.Random(most))
        lab.run(most)
        lab.halfway.lose([lab.plan.workers[most % len(lab.plan.workers)]])
        lab.go_on()
        # Float64 sums of a few microbatches in another order.
        assert difference(lab.sums(), wanted) < 1e-12


@pytest.mark.parametrize(
    ("routing", "quiet"),
    [(NOISY, {"noise": 1e-3}), (RANDOM, {"random_second": False})],
    ids=["noise", "second"],
)
def test_chance_is_alike_in_any_cut(
    text: FilePath, labs: list[Lab], routing: RoutingSpec, quiet: dict[str, object]
) -> None:
    jobs = [sparse_job(text, stages=stages, num_chosen=2, routing=routing) for stages in (1, 2, 4)]
    without = routing.model_copy(update=quiet)
    labs += [Lab(job) for job in (*jobs, sparse_job(text, stages=1, num_chosen=2, routing=without))]
    wanted, *found, other = ([lab.step(step).loss for step in range(3)] for lab in labs)
    for losses in found:
        assert losses == pytest.approx(wanted, rel=1e-10)
    assert other != pytest.approx(wanted, rel=1e-4)


CASES = [
    pytest.param(RoutingSpec(), Layout.LINE, False, id="softmax_topk"),
    pytest.param(RoutingSpec(router=RouterKind.SIGMOID), Layout.LOOP, True, id="sigmoid"),
    pytest.param(
        RANDOM.model_copy(update={"balance_coefficient": 0.0}), Layout.LINE, False, id="random_second"
    ),
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


@pytest.mark.parametrize(("routing", "layout", "is_split"), CASES)
def test_whoever_computes_again_routes_as_the_first_one_though_a_logit_differs(
    built: Callable[..., Unlike],
    monkeypatch: pytest.MonkeyPatch,
    routing: RoutingSpec,
    layout: Layout,
    is_split: bool,
) -> None:
    lab = built(routing, layout, is_split=is_split)
    lab.begin(random.Random(0))
    lab.run()
    wanted, losses = lab.sums(), lab.losses
    # The weights of the moved experts differ by a millionth.
    assert disturbed(lab, wanted, losses) < 10 * MOVED
    # Were it not told what was chosen, other experts would take the tokens.
    monkeypatch.setattr(Junction, "settled", lambda _junction, choices, _scores, _form: choices)
    assert disturbed(lab, wanted, losses) > 1e-3
