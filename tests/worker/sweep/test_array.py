"""Arrays: a row trains as a trial alone, whoever is beside it, in any packing, and whatever becomes of the others."""

import math

import pytest
import torch

from bench.sweeping.trials import CNN, DECODER, MLP, OPTIMIZERS, Case, settings_of, together
from skein.config.optimizer import AdamWSpec, OptimizerSpec
from skein.protocol.messages.array_rounds import LOSS_NOT_FINITE, PassKind
from skein.types import Precision
from worker.model.base import IGNORED_LABEL
from worker.sweep.array import RowArray, RowSettings, RowStep
from worker.sweep.passes import RowBatch

CASES = {"mlp": MLP, "cnn": CNN, "decoder": DECODER}
NUM_ROWS = 4
NUM_STEPS = 4
WILD = 1e200


def array_of(
    case: Case,
    settings: list[RowSettings],
    kind: PassKind = PassKind.FUSED,
    precision: Precision = Precision.FP64,
) -> RowArray:
    stages = [case.stage(row, precision) for row in range(len(settings))]
    return RowArray.of(stages, settings, kind)


def all_settings(spec: OptimizerSpec) -> list[RowSettings]:
    return [settings_of(spec, row) for row in range(NUM_ROWS)]


def batch(case: Case, rows: list[int], step: int, dtype: torch.dtype = torch.float64) -> RowBatch:
    return together(case, rows, step, dtype)


def run(
    array: RowArray, case: Case, rows: list[int], steps: range, dtype: torch.dtype = torch.float64
) -> list[tuple[RowStep, ...]]:
    return [array.step([batch(case, rows, step, dtype)]) for step in steps]


@pytest.mark.parametrize(
    ("name", "spec"),
    [*(("mlp", spec) for spec in OPTIMIZERS), ("cnn", OPTIMIZERS[0]), ("decoder", OPTIMIZERS[1])],
    ids=str,
)
@pytest.mark.parametrize("packing", [((0, 1), (2, 3)), ((0, 1, 3), (2,))], ids=str)
def test_rows_go_on_in_any_packing_as_they_were(
    name: str, spec: OptimizerSpec, packing: tuple[tuple[int, ...], ...]
) -> None:
    case, everybody = CASES[name], [*range(NUM_ROWS)]
    array = array_of(case, all_settings(spec))
    run(array, case, everybody, range(NUM_STEPS))
    parts = [array.taken(rows, PassKind.FUSED) for rows in packing]
    whole = run(array, case, everybody, range(NUM_STEPS, 2 * NUM_STEPS))
    for rows, part in zip(packing, parts, strict=True):
        found = run(part, case, [*rows], range(NUM_STEPS, 2 * NUM_STEPS))
        for step, others in zip(found, whole, strict=True):
            for row, one in zip(rows, step, strict=True):
                # A batch of one product may sum in another order than a batch of several.
                assert math.isclose(one.loss, others[row].loss, rel_tol=1e-12)
                assert one.learning_rate == others[row].learning_rate


@pytest.mark.parametrize(
    ("case", "kind", "precision"),
    [
        *((CNN, kind, Precision.FP64) for kind in PassKind),
        (MLP, PassKind.FUSED, Precision.BF16),
        (DECODER, PassKind.FUSED, Precision.BF16),
        (DECODER, PassKind.VMAPPED, Precision.FP32),
    ],
    ids=str,
)
def test_a_row_that_diverges_is_frozen_and_the_others_hear_nothing_of_it(
    case: Case, kind: PassKind, precision: Precision
) -> None:
    calm, wild = all_settings(AdamWSpec()), all_settings(AdamWSpec())
    wild[2] = RowSettings(
        optimizer=wild[2].optimizer.model_copy(update={"learning_rate": WILD}), num_steps=NUM_STEPS
    )
    arrays = [array_of(case, settings, kind, precision) for settings in (calm, wild)]
    dtype = arrays[0].rows.params.dtype
    told = [run(array, case, [*range(NUM_ROWS)], range(NUM_STEPS), dtype) for array in arrays]
    assert arrays[1].frozen.keys() == {2}
    assert "not finite" in arrays[1].frozen[2]
    assert arrays[1].rows.num_updates[2] < NUM_STEPS
    for calm_step, wild_step in zip(*told, strict=True):
        for row in (0, 1, 3):
            assert calm_step[row] == wild_step[row]
    for row in (0, 1, 3):
        assert torch.equal(arrays[0].rows.params[row], arrays[1].rows.params[row])
    assert not arrays[0].frozen


def test_a_frozen_row_stays_as_it_was_when_it_left() -> None:
    settings = all_settings(AdamWSpec())
    array = array_of(MLP, settings)
    array.rows.params[1, 0] = math.inf
    before = array.rows.params[1].clone()
    (first, second) = (array.step([batch(MLP, [*range(NUM_ROWS)], step)]) for step in range(2))
    assert first[1].reason == second[1].reason == array.frozen[1]
    assert array.rows.num_updates == [2, 0, 2, 2]
    assert torch.equal(array.rows.params[1], before)
    assert array.taken([0, 1], PassKind.FUSED).frozen == {1: array.frozen[1]}


def test_a_row_whose_loss_is_beyond_what_can_be_told_is_frozen() -> None:
    array = array_of(MLP, all_settings(AdamWSpec()))
    array.rows.params[1] *= 1e80
    (told,) = run(array, MLP, [*range(NUM_ROWS)], range(1))
    assert 1e200 < told[1].loss < math.inf
    assert [step.reason for step in told] == ["", LOSS_NOT_FINITE, "", ""]


def test_arrays_are_joined_with_their_rows_as_they_were() -> None:
    settings = all_settings(AdamWSpec())
    whole = array_of(MLP, settings)
    whole.rows.params[1, 0] = math.inf
    run(whole, MLP, [*range(NUM_ROWS)], range(2))
    parts = [whole.taken(rows, PassKind.FUSED) for rows in ((3, 1), (0, 2))]
    joined = RowArray.joined(parts, PassKind.FUSED)
    assert joined.settings == tuple(settings[row] for row in (3, 1, 0, 2))
    assert joined.frozen == {1: whole.frozen[1]}
    assert joined.rows.num_updates == [2, 0, 2, 2]
    expected = run(whole, MLP, [*range(NUM_ROWS)], range(2, 4))
    for step, found in enumerate(run(joined, MLP, [3, 1, 0, 2], range(2, 4))):
        for place, row in enumerate((3, 1, 0, 2)):
            assert found[place].loss == pytest.approx(expected[step][row].loss, rel=1e-12, nan_ok=True)


def test_microbatches_make_the_step_of_their_batch() -> None:
    settings = all_settings(AdamWSpec())
    whole, parts = array_of(MLP, settings), array_of(MLP, settings)
    for step in range(NUM_STEPS):
        inputs, labels, *_ = batch(MLP, [*range(NUM_ROWS)], step)
        labels[0, 3] = IGNORED_LABEL
        (at_once,) = ([x.loss for x in whole.step([RowBatch(inputs, labels)])],)
        halves = zip(inputs.chunk(2, dim=1), labels.chunk(2, dim=1), strict=True)
        found = parts.step([RowBatch(*half) for half in halves])
        assert [x.loss for x in found] == pytest.approx(at_once, rel=1e-12)
        assert [x.num_tokens for x in found] == [31, 32, 32, 32]


def test_a_row_without_a_label_makes_no_step_and_is_not_frozen() -> None:
    array = array_of(MLP, all_settings(AdamWSpec()))
    inputs, labels, *_ = batch(MLP, [*range(NUM_ROWS)], 0)
    labels[2] = IGNORED_LABEL
    steps = array.step([RowBatch(inputs, labels)])
    assert steps[2].reason == "no valid token in the batch"
    assert array.rows.num_updates == [1, 1, 0, 1]
    assert not array.frozen
