"""A sparse job over the network, one of whose workers dies amid a step: who does its part again routes as it did."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path as FilePath

import pytest
import torch
from torch import Tensor, nn

from skein.config.job import BudgetSpec, JobSpec
from skein.model.families.mixtral import MixtralModel, MixtralShape
from skein.protocol.log.records import StepCommitted
from skein.protocol.worker.ops import Op, TensorKey, VisitOp
from skein.types import JobState, StageIndex, WorkerId
from tests.worker.cluster import Disk, cluster
from tests.worker.lab import write_text
from tests.worker.puppet import Running
from tests.worker.test_run import job_of
from worker.compute.ops import Compute, Done
from worker.compute.payload import Payload
from worker.model.base import Stage
from worker.model.sparse.junction import Junction
from worker.model.sparse.layer import SparseMlp
from worker.process import WorkerSetting

MOVED, NEAR = 1e-6, 1e-7
"""How much one logit of each token differs where a visit is repeated, and by how much it is too small elsewhere."""
NAMES = ("w0", "w1", "w2", "w3")
NUM_STEPS, DEADLY_STEP = 4, 1

_Place = tuple[int, int, StageIndex]
"""Step, microbatch and stage of a contribution."""


@dataclass(slots=True)
class Course:
    """Training visits so far: who made each first, which of them others have used, and who dies of it.

    `fatal`: as soon as another worker has used a visit of this stage in `DEADLY_STEP`, its maker dies; None: nobody.
    """

    fatal: StageIndex | None
    makers: dict[_Place, WorkerId] = field(default_factory=dict)
    used: set[_Place] = field(default_factory=set)
    doomed: WorkerId | None = None
    num_moved: int = 0

    def repeats(self, op: VisitOp, worker: WorkerId) -> bool:
        """Whether somebody has gone on already with what another worker made of it."""
        place = _place(op)
        return place in self.used and self.makers[place] != worker

    def ran(self, op: VisitOp, worker: WorkerId) -> None:
        """It has come to its end."""
        self.makers.setdefault(_place(op), worker)
        takes = op.kind.row.takes
        for hop in () if takes is None else op.path.makers(takes, op.hop):
            maker = op.path.hops[hop]
            self.used.add((op.step, op.microbatch, maker.stage))
            is_fatal = (op.step, maker.stage) == (DEADLY_STEP, self.fatal) and maker.worker != worker
            if is_fatal and self.doomed is None:
                self.doomed = maker.worker


def _place(op: VisitOp) -> _Place:
    return op.step, op.microbatch, op.chunk.stage


class UnlikeCompute(Compute):
    """Scores the last expert of each token just below those that are chosen; where it repeats a visit, just above."""

    def __init__(self, device: torch.device, *, worker: WorkerId, course: Course) -> None:
        super().__init__(device)
        self._worker = worker
        self._course = course

    def run(self, op: Op, operands: Mapping[TensorKey, Payload]) -> Done:
        """As `Compute.run`."""
        if self.holding is None or not isinstance(op, VisitOp):
            return super().run(op, operands)
        is_again = op.phase.trains and self._course.repeats(op, self._worker)
        self._course.num_moved += is_again
        with _near_ties(self.holding.chunks[op.chunk.stage].module, MOVED * is_again - NEAR):
            done = super().run(op, operands)
        if op.phase.trains:
            self._course.ran(op, self._worker)
        return done


@contextmanager
def _near_ties(module: Stage, above: float) -> Iterator[None]:
    """The last expert's logit is that of the last one chosen of the others, and so much more, in every layer."""

    def tied(num_chosen: int, _gate: nn.Module, _given: tuple[Tensor, ...], scores_NE: Tensor) -> Tensor:
        others_NE = scores_NE[:, :-1]
        least_N1 = others_NE.detach().topk(num_chosen).values[:, -1:]
        return torch.cat([others_NE, least_N1 + above], -1)

    layers = [layer for layer in module.modules() if isinstance(layer, SparseMlp)]
    hooks = [x.gate.register_forward_hook(partial(tied, x.sizes.num_chosen)) for x in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def sparse(text: FilePath) -> JobSpec:
    """Two stages of two workers each; weights of the chosen experts do not depend on the scores of others."""
    shape = MixtralShape(
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=5,
        num_experts_per_tok=2,
        # Drawn as narrowly as usual, routers would hardly tell tokens apart.
        initializer_range=0.2,
    )
    model, budget = MixtralModel(shape=shape), BudgetSpec(steps=NUM_STEPS)
    return job_of(text, replicas=2).model_copy(update={"model": model, "budget": budget})


async def trained(job: JobSpec, fatal: int | None) -> tuple[list[float], Course]:
    """Loss and norm of each step of a job; a holder of stage `fatal` dies amid one of them."""
    course = Course(fatal=None if fatal is None else StageIndex(fatal))
    living: dict[str, Running] = {}

    def watch(moment: str) -> None:
        # The maker has not heard yet of what came of its visit.
        if moment.startswith("after OpEnded") and course.doomed in living:
            living.pop(course.doomed).ended.cancel()

    def unlike(setting: WorkerSetting) -> WorkerSetting:
        compute = partial(UnlikeCompute, worker=setting.worker, course=course)
        return replace(setting, compute=compute, watch=watch)

    async with cluster(Disk()) as here, here.workers(*NAMES, adapt=unlike) as workers:
        living |= dict(zip(NAMES, workers, strict=True))
        here.submit(job)
        assert await here.finished() == JobState.FINISHED
        steps = [committed.record for committed in here.all(StepCommitted)]
        assert [record.step for record in steps] == list(range(NUM_STEPS))
        assert len(living) == len(NAMES) - (fatal is not None)
        return [x for record in steps for x in (record.loss, record.gradient_norm)], course


@pytest.fixture
def ignored(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets routers choose for themselves, whatever they are told."""
    return lambda: monkeypatch.setattr(
        Junction, "settled", lambda _junction, choices, _scores, _form: choices
    )


async def test_a_router_whose_logits_differ_a_little_repeats_the_choices_of_a_dead_worker(
    tmp_path: FilePath, ignored: Callable[[], None]
) -> None:
    job = sparse(write_text(tmp_path))
    undisturbed, _ = await trained(job, fatal=None)
    for stage in (0, 1):
        curve, course = await trained(job, fatal=stage)
        assert course.num_moved > 0
        # Weights are of chosen experts alone: the moved logit shows in choices, and nowhere else.
        assert curve == pytest.approx(undisturbed, rel=1e-9)
    ignored()
    curve, course = await trained(job, fatal=1)
    assert course.num_moved > 0
    # Other experts would have taken every token of what was repeated.
    assert curve != pytest.approx(undisturbed, rel=1e-5)
