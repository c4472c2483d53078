"""Experts in parts over the devices of a mesh, in real processes over gloo, against one device."""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from skein.config.mesh.tensor import MeshForm, TensorSpec
from skein.errors import UserError
from skein.model.families.mixtral import MixtralModel, MixtralShape
from skein.model.families.qwen3_moe import Qwen3MoeModel, Qwen3MoeShape
from skein.model.sparse.experts import ExpertPlacement
from skein.model.sparse.model import SparseModel
from skein.model.sparse.routing import DropOrder, RouterKind, RoutingSpec
from skein.plan.pieces.collectives import LaneKind
from skein.plan.pieces.lanes import Pieces
from tests.worker.mesh.test_stage import ROUNDING, assert_same_sums, counted, job_of, sums, zeroed
from tests.worker.model.builders import NUM_TOKENS, assert_near, part, samples, whole
from worker.mesh.frames import DeviceAnswer, Metered, StageAsk
from worker.mesh.mesh import Mesh
from worker.mesh.pieces.piecing import Piecing
from worker.mesh.stage import MeshStage
from worker.mesh.traffic import Collective
from worker.model.base import Crossing, Stage
from worker.model.pending import add_up
from worker.model.sparse.junction import RoutedMicrobatch

_SIZES: dict[str, object] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    # Drawn as narrowly as usual, routers would hardly tell tokens apart.
    "initializer_range": 0.2,
}
NUM_VALID = 17
# Through two blocks and back.
GRADIENT_ROUNDING = 1e-10


def mixtral(
    num_chosen: int = 2, capacity: float | None = None, drop: DropOrder = DropOrder.CHOICE_MAJOR
) -> SparseModel:
    shape = {"intermediate_size": 20, "num_local_experts": 6, "num_experts_per_tok": num_chosen}
    return MixtralModel(
        shape=MixtralShape.model_validate(_SIZES | shape),
        routing=RoutingSpec(balance_coefficient=0.5, capacity=capacity, drop=drop),
        placement=ExpertPlacement.MESH,
    )


def routed(kind: RouterKind) -> SparseModel:
    """By another router, with a balance loss and room for 1 where tokens choose."""
    settings = {"balance_coefficient": 0.5, "capacity": 1.0} if kind.row.tokens_choose else {}
    routing = RoutingSpec.model_validate({"router": kind, "allow_lookahead": kind.row.looks_ahead} | settings)
    return mixtral().model_copy(update={"routing": routing})


def by_chance(*, noise: float | None = None, random_second: bool = False) -> SparseModel:
    routing = RoutingSpec(
        router=RouterKind.GSHARD,
        noise=noise,
        random_second=random_second,
        balance_coefficient=0.5,
        capacity=1.0,
    )
    return mixtral().model_copy(update={"routing": routing})


def qwen() -> SparseModel:
    shape = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": False}
    return Qwen3MoeModel(
        shape=Qwen3MoeShape.model_validate(_SIZES | shape | {"head_dim": 16, "tie_word_embeddings": False}),
        routing=RoutingSpec(balance_coefficient=0.5),
        placement=ExpertPlacement.MESH,
    )


def deep(model: SparseModel) -> SparseModel:
    """The same, with three blocks."""
    assert model.shape is not None
    return model.model_copy(update={"shape": model.shape.model_copy(update={"num_hidden_layers": 3})})


MODELS: dict[str, SparseModel] = {
    "top 2": mixtral(),
    "qwen": qwen(),
    "top 1, room for 1": mixtral(num_chosen=1, capacity=1.0),
    **{f"top 2, room for 1, {order}": mixtral(capacity=1.0, drop=order) for order in DropOrder},
    **{str(kind): routed(kind) for kind in RouterKind if kind is not RouterKind.SOFTMAX_TOPK},
    "gshard, noise": by_chance(noise=1.0),
    "gshard, random second": by_chance(random_second=True),
}


@dataclass(frozen=True, slots=True)
class Trained:
    """What one pass there and back gives."""

    loss: Tensor
    microbatch: RoutedMicrobatch


def chosen(passed: Trained) -> list[object] | None:
    """Choices of all layers, if any were made."""
    choices = passed.microbatch.choices
    return None if choices is None else choices.tolist()


@contextmanager
def in_pieces(mesh: Mesh, forward: int, backward: int, num_summed: int = 0) -> Iterator[None]:
    """So many, whatever devices measure."""
    mesh.pieces = Pieces(forward=forward, backward=backward, num_summed=num_summed)
    try:
        yield
    finally:
        mesh.pieces = None


def trained(stage: MeshStage | Stage, x: Tensor, labels: Tensor) -> Trained:
    with stage.junction.visited(NUM_VALID, luck=7) as microbatch:
        loss, _ = stage.score(Crossing(x), labels)
    torch.autograd.backward(loss)
    return Trained(loss.detach(), microbatch)


@pytest.mark.parametrize(("size", "in_sequence"), [(2, False), (4, True)])
@pytest.mark.parametrize("name", MODELS)
def test_devices_together_route_and_learn_like_one(
    four: Mesh, name: str, size: int, in_sequence: bool
) -> None:
    model = MODELS[name]
    alone, shared = zeroed(whole(model)), zeroed(whole(model))
    stage = MeshStage(four, job_of(model, size, in_sequence=in_sequence), shared)
    # 5 samples are 60 tokens; 1 sample leaves the last device fewer than others.
    for num_samples in (5, 1):
        x, labels = samples(model, num_samples)
        wanted, found = trained(alone, x, labels), trained(stage, x, labels)
        assert_near(found.loss, wanted.loss, tolerance=ROUNDING)
        assert found.microbatch.losses == pytest.approx(wanted.microbatch.losses, rel=ROUNDING)
        assert found.microbatch.num_choices == wanted.microbatch.num_choices
        assert chosen(found) == chosen(wanted)
        assert (chosen(found) is None) == model.experts.mixes_tokens
        assert found.microbatch.num_dropped == wanted.microbatch.num_dropped
        assert (wanted.microbatch.num_dropped > 0) == (model.routing.capacity is not None)
    stage.gather_sums()
    assert_same_sums(shared, alone)


def test_a_microbatch_of_no_numbers_is_told_as_it_is(four: Mesh) -> None:
    stage = MeshStage(four, job_of(mixtral(), 2), zeroed(part(mixtral(), 1, 2)))
    given = Crossing(torch.full((2, NUM_TOKENS, 32), math.nan, dtype=torch.float64))
    with stage.junction.visited(NUM_VALID, luck=7) as microbatch:
        made = stage.onward(given.followed(is_sample=False), None)
    torch.autograd.backward(made.differentiable, [torch.ones_like(made.hidden)])
    assert made.hidden.isnan().all()
    assert len(microbatch.losses) == 1
    assert math.isnan(microbatch.losses[0])
    stage.drop_sums()


@pytest.mark.parametrize("in_sequence", [False, True])
@pytest.mark.parametrize(("size", "num_tokens"), [(2, NUM_TOKENS), (4, NUM_TOKENS), (4, 5)])
@pytest.mark.parametrize("name", ["top 2", "qwen", "top 2, room for 1, probs"])
def test_blocks_of_experts_give_what_they_give_on_one_device(
    four: Mesh, name: str, size: int, num_tokens: int, in_sequence: bool
) -> None:
    model = MODELS[name]
    alone, shared = zeroed(part(model, 1, 3)), zeroed(part(model, 1, 3))
    stage = MeshStage(four, job_of(model, size, in_sequence=in_sequence), shared)
    # Of five tokens the last of four devices has none; of two sequences of five, in parts, neither.
    x = torch.randn(1 + in_sequence, num_tokens, 32, dtype=torch.float64)
    given = [Crossing(x.clone()).followed(is_sample=False) for _ in range(2)]
    exchanged = {Collective.EXCHANGE: 2 * 2}
    # Of attention, and of what experts give, or the scores of tokens in parts.
    there = back = exchanged | {Collective.SUM: 2, Collective.GATHER: 2}
    if in_sequence:
        there = exchanged | {Collective.SCATTER: 2, Collective.GATHER: 2 * 2}
        back = exchanged | {Collective.SCATTER: 2, Collective.GATHER: 2}
    before = counted(four)
    with in_pieces(four, 1, 1), stage.junction.visited(NUM_VALID):
        found = stage.onward(given[0], None).hidden
    with alone.junction.visited(NUM_VALID):
        wanted = alone.onward(given[1], None).hidden
    assert_near(found.detach(), wanted.detach(), tolerance=ROUNDING)
    assert counted(four, before) == there
    before = counted(four)
    torch.autograd.backward(found, wanted.detach())
    torch.autograd.backward(wanted, wanted.detach())
    assert counted(four, before) == back
    assert_same_gradients(stage, shared, alone, given)


def assert_same_gradients(stage: MeshStage, shared: Stage, alone: Stage, given: Sequence[Crossing]) -> None:
    """What went back to a mesh's input, and to the parameters that its devices share, is that of one device."""
    here, there = (crossing.hidden.grad for crossing in given)
    assert there is not None
    assert_near(here, there, tolerance=GRADIENT_ROUNDING)
    stage.gather_sums()
    assert_same_sums(shared, alone, tolerance=GRADIENT_ROUNDING)


@pytest.mark.parametrize(
    ("forward", "backward", "size", "in_sequence"),
    [(1, 2, 2, False), (2, 1, 4, False), (3, 4, 2, True), (4, 3, 4, True), (7, 5, 2, False)],
)
def test_pieces_give_what_all_rows_at_once_give(
    four: Mesh, forward: int, backward: int, size: int, in_sequence: bool
) -> None:
    model = MODELS["top 2, room for 1, probs"]
    alone, shared = zeroed(part(model, 1, 3)), zeroed(part(model, 1, 3))
    stage = MeshStage(four, job_of(model, size, in_sequence=in_sequence), shared)
    # Of 11 tokens devices have 6 and 5, or 3, 3, 3 and 2: few numbers of pieces divide them, and some pieces are empty.
    x = torch.randn(1, 11, 32, dtype=torch.float64)
    given = [Crossing(x.clone()).followed(is_sample=False) for _ in range(2)]
    before = four.traffic.counts[Collective.EXCHANGE]
    with alone.junction.visited(NUM_VALID) as wanted_told:
        wanted = alone.onward(given[1], None).hidden
    with in_pieces(four, forward, backward):
        with stage.junction.visited(NUM_VALID) as told:
            found = stage.onward(given[0], None).hidden
        assert four.traffic.counts[Collective.EXCHANGE] == before + 2 * 2 * forward
        torch.autograd.backward(found, wanted.detach())
        assert four.traffic.counts[Collective.EXCHANGE] == before + 2 * 2 * (forward + backward)
    torch.autograd.backward(wanted, wanted.detach())
    assert told.num_dropped == wanted_told.num_dropped > 0
    assert_near(found.detach(), wanted.detach(), tolerance=ROUNDING)
    assert_same_gradients(stage, shared, alone, given)


@pytest.mark.parametrize("in_sequence", [False, True])
def test_means_of_tokens_are_summed_over_devices_without_what_pads_a_sequence(
    four: Mesh, in_sequence: bool
) -> None:
    model = MODELS["softmoe"]
    alone, shared = zeroed(part(model, 1, 3)), zeroed(part(model, 1, 3))
    stage = MeshStage(four, job_of(model, 4, in_sequence=in_sequence), shared)
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    given = [Crossing(x.clone()).followed(is_sample=False) for _ in range(2)]
    # Two blocks, as those with a feed-forward.
    each_way = {Collective.SUM: 2 * 2}
    if in_sequence:
        each_way = {Collective.GATHER: 2 * 2, Collective.SCATTER: 2 * 2}
    before = counted(four)
    found, wanted = stage.onward(given[0], None).hidden, alone.onward(given[1], None).hidden
    assert counted(four, before) == each_way
    assert_near(found.detach(), wanted.detach(), tolerance=ROUNDING)
    before = counted(four)
    torch.autograd.backward(found, wanted.detach())
    torch.autograd.backward(wanted, wanted.detach())
    assert counted(four, before) == each_way
    assert_same_gradients(stage, shared, alone, given)


def test_pieces_are_chosen_by_what_devices_measure(four: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    model = MODELS["top 2"]
    stage = MeshStage(four, job_of(model, 2), zeroed(part(model, 1, 3)))
    with caplog.at_level("INFO", logger="worker.mesh.pieces.piecing"):
        for num_samples in (1, 8, 8):
            stage.onward(Crossing(torch.randn(num_samples, NUM_TOKENS, 32, dtype=torch.float64)), None)
    # Twelve tokens are too few for a line; ninety-six are measured for once.
    (told,) = [x.getMessage() for x in caplog.records if "experts of" in x.getMessage()]
    assert re.match(
        r"stage=0 experts of 96 rows a device in \d+ pieces forward, \d+ backward,"
        r" room to sum \d+ elements: exchange ",
        told,
    )
    assert told.count("(R2 ") == 3
    (untimed,) = [x.getMessage() for x in caplog.records if "in one piece" in x.getMessage()]
    assert untimed == "stage=0 rows go to experts in one piece: 12 a device are too few to time 8 sizes"


def test_times_of_sums_and_exchanges_are_told_beside_what_is_predicted(four: Mesh) -> None:
    model = MODELS["top 2"]
    stage = MeshStage(four, job_of(model, 2), zeroed(part(model, 1, 3)))
    before = {kind: four.times.num[kind] for kind in LaneKind}
    given = Crossing(torch.randn(8, NUM_TOKENS, 32, dtype=torch.float64)).followed(is_sample=False)
    y = stage.onward(given, None).hidden
    torch.autograd.backward(y, torch.ones_like(y))
    # Of two blocks attention's sum and the experts' gathering each way; and a layer of experts each way.
    assert {kind: four.times.num[kind] - before[kind] for kind in LaneKind} == {
        LaneKind.TP: 8,
        LaneKind.A2A: 4,
    }
    assert all(four.times.predicted_s[kind] > 0 and four.times.measured_s[kind] > 0 for kind in LaneKind)


def test_what_is_off_for_long_is_timed_again(four: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    model, num_tokens = MODELS["top 2"], 8 * NUM_TOKENS
    job, form = job_of(model, 2), MeshForm(size=2)
    stage = part(model, 1, 3).stage
    four.form(form)
    chunk = four.new_number()
    asked = (stage.index, stage.first, stage.stop)
    four.ask(2, StageAsk(chunk=chunk, job=job.model_dump_json(), stage=asked, form=form))
    piecing, before = Piecing(four, form, model, stage), four.times.num_fits.copy()

    def visit(seconds: float) -> None:
        """One that waits so long for a sum, and for each of its two layers."""
        piecing.time_sums(chunk, num_tokens)
        piecing.pieces(chunk, num_tokens)
        metered = Metered(num_layers=2, layers_s=2 * seconds, experts_s=seconds, waited_s=seconds)
        answer = DeviceAnswer(collectives={Collective.SUM: 1}, elements={Collective.SUM: 10}, metered=metered)
        piecing.observe(num_tokens, metered, is_forward=True)
        piecing.observe_sums(answer)

    with caplog.at_level("INFO", logger="worker.mesh.pieces.piecing"):
        # Of any machine: no sum and no layer takes a thousand seconds.
        for _ in range(8):
            visit(1000.0)
        assert four.times.num_fits - before == {LaneKind.TP: 1, LaneKind.A2A: 1}
        visit(1000.0)
    assert four.times.num_fits - before == {LaneKind.TP: 2, LaneKind.A2A: 2}
    told = [record.getMessage() for record in caplog.records]
    again = re.compile(
        r"stage=\d+ (experts|sums) take \d+\.\d\d times as long as predicted: they are timed again"
    )
    assert sorted(found[1] for text in told if (found := again.fullmatch(text))) == ["experts", "sums"]
    assert sum("(R2 " in text for text in told) == 4
    assert set(four.times.r_squared) == {LaneKind.TP, LaneKind.A2A}
    assert all(x <= 1 for x in four.times.r_squared.values())


# Of each block 192 elements of the router; of qwen's 160, and 32 of norms of heads.
@pytest.mark.parametrize(("name", "size", "in_sequence"), [("top 2", 4, True), ("qwen", 2, False)])
@pytest.mark.parametrize(
    ("room", "summed"), [(0, []), (1, [1, 1]), (100, [100, 100]), (150, [150, 150]), (250, [192, 192])]
)
def test_gradients_are_summed_beside_layers_of_experts_as_far_as_there_is_room(
    four: Mesh, name: str, room: int, summed: list[int], size: int, in_sequence: bool
) -> None:
    model = deep(MODELS[name])
    alone, shared = zeroed(part(model, 1, 4)), zeroed(part(model, 1, 4))
    stage = MeshStage(four, job_of(model, size, in_sequence=in_sequence), shared)
    if in_sequence:
        # And both norms, of this device's tokens.
        summed = [min(room, 192 + 2 * 32) for _ in summed]
    with in_pieces(four, 1, 2, room):
        for _ in range(2):
            before, come = counted(four), four.traffic.elements[Collective.GRADIENT]
            x = torch.randn(2, NUM_TOKENS, 32, dtype=torch.float64)
            for module in (alone, stage):
                given = Crossing(x.clone()).followed(is_sample=False)
                with module.junction.visited(NUM_VALID):
                    y = module.onward(given, None).hidden
                torch.autograd.backward(y, torch.ones_like(y))
            # Beside the last of three layers there is nothing yet; each other has that of the layer after.
            assert counted(four, before).get(Collective.GRADIENT, 0) == len(summed)
            assert four.traffic.elements[Collective.GRADIENT] - come == sum(
                2 * num * (size - 1) // size for num in summed
            )
    stage.gather_sums()
    assert_same_sums(shared, alone, tolerance=GRADIENT_ROUNDING)


def test_weight_gradients_of_experts_wait_at_their_devices(four: Mesh) -> None:
    model = MODELS["top 2"]
    alone, shared = zeroed(part(model, 1, 4)), zeroed(part(model, 1, 4))
    stage = MeshStage(four, job_of(model, 2), shared)
    x, (_, labels) = torch.randn(3, NUM_TOKENS, 32, dtype=torch.float64), samples(model)
    aside = stage.put_aside(stage.score(Crossing(x.clone()).followed(is_sample=False), labels)[:1])
    torch.autograd.backward(alone.score(Crossing(x.clone()).followed(is_sample=False), labels)[0])
    stage.gather_sums()
    assert all(not gradient.any() for gradient in sums(shared).values())
    add_up(aside)
    stage.gather_sums()
    assert_same_sums(shared, alone)


def test_a_mesh_uses_as_many_devices_as_heads_and_experts_allow() -> None:
    few = mixtral().model_copy(
        update={"shape": MixtralShape.model_validate(_SIZES | {"num_local_experts": 3})}
    )
    sizes = [TensorSpec().size_on(n, few) for n in (1, 2, 3, 4)]
    assert sizes == [1, 2, 2, 2], "four heads, three experts"
    with pytest.raises(
        UserError, match="with one of 3 experts for each device at least, divide into 1, 2: give one"
    ):
        TensorSpec(size=4).check(few, 1)
