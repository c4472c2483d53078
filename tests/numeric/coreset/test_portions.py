"""Choices over portions of rows, of which some are wanting: they stand for all, and are near the choice of one."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from skein.config.data.coreset import CoresetSpec
from skein.numeric.coreset import portions as portions_module
from skein.numeric.coreset.choice import choose_by_chance, choose_coreset, cover_error
from skein.numeric.coreset.distributed import Candidates
from skein.numeric.coreset.features import Features, last_layer, vectors
from skein.numeric.coreset.portions import (
    Chosen,
    Picking,
    Portion,
    choose_of_portions,
    fault_of_candidates,
    pick_candidates,
)
from skein.types import WorkerId

NUM_ROWS, NUM_PICKS, BLOCK = 2_000, 200, 8
_GENERATOR = np.random.default_rng(0)
CLUSTER = _GENERATOR.integers(20, size=NUM_ROWS)
ROWS = _GENERATOR.normal(size=(NUM_ROWS, 16)) + 3 * _GENERATOR.normal(size=(20, 16))[CLUSTER]
GROUPS = CLUSTER % 4
FEATURES = vectors(ROWS)
NAMES = tuple(WorkerId(f"w{i}") for i in range(4))


def portions(num_workers: int = 4) -> dict[WorkerId, Portion]:
    return {
        name: Portion(num_rows=NUM_ROWS, block_rows=BLOCK, num_ways=num_workers, ways=(way,))
        for way, name in enumerate(NAMES[:num_workers])
    }


def picking(distributed: str = "greedi") -> Picking:
    spec = CoresetSpec.model_validate({"method": "craig", "fraction": 0.1, "distributed": distributed})
    return Picking.at(spec, 5, num_rows=NUM_ROWS, block_rows=BLOCK)


def proposed(
    asked: Picking, features: Features = FEATURES, num_workers: int = 4
) -> dict[WorkerId, Candidates]:
    ids = {name: portion.ids for name, portion in portions(num_workers).items()}
    return {name: pick_candidates(features.take(own), GROUPS[own], own, asked) for name, own in ids.items()}


def total(chosen: Chosen) -> float:
    return float(chosen.choice.sizes.sum(dtype=np.float64)) + chosen.choice.num_set_aside


def test_portions_are_disjoint_and_together_all_rows() -> None:
    ids = np.concatenate([x.ids for x in portions(3).values()])
    assert sorted(ids.tolist()) == list(range(NUM_ROWS))
    few = [Portion(num_rows=9, block_rows=4, num_ways=5, ways=(way, 4)) for way in range(4)]
    assert [x.has_rows for x in few] == [len(x.ids) > 0 for x in few] == [True, True, True, False]
    uneven = Portion(num_rows=NUM_ROWS, block_rows=BLOCK, num_ways=3, ways=(0, 2))
    assert len(uneven.ids) == NUM_ROWS - len(portions(3)[NAMES[1]].ids)


@pytest.mark.parametrize(("distributed", "most"), [("greedi", 1.06), ("local", 1.10)])
@pytest.mark.parametrize("num_workers", [1, 4])
def test_workers_that_know_their_own_rows_alone_come_near_the_choice_of_one(
    distributed: str, most: float, num_workers: int
) -> None:
    asked = picking(distributed)
    chosen = choose_of_portions(portions(num_workers), proposed(asked, num_workers=num_workers), asked)
    central = choose_coreset(FEATURES, GROUPS, NUM_PICKS)
    found = cover_error(FEATURES, GROUPS, chosen.choice.ids)
    assert found <= most * central.error
    assert found <= chosen.choice.error * (1 + 1e-6)
    assert total(chosen) == NUM_ROWS
    assert len(chosen.choice.ids) == pytest.approx(
        NUM_PICKS, abs=num_workers * 4 if distributed == "local" else 0
    )
    assert not chosen.faults


@pytest.mark.parametrize("num_rows_bytes", [None, 40_000])
def test_the_choice_does_not_depend_on_how_many_workers_pick(
    num_rows_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where nearly all rows are proposed nor where one for each pick is."""
    if num_rows_bytes is not None:
        monkeypatch.setattr(portions_module, "_MOST_PROPOSED_BYTES", num_rows_bytes)
    names = [WorkerId(f"w{i}") for i in range(90)]
    asked, found = picking(), []
    for num_ways in (1, 2, 3, 7, 64, 90):
        here = {
            name: Portion(num_rows=NUM_ROWS, block_rows=BLOCK, num_ways=num_ways, ways=(way,))
            for way, name in enumerate(names[:num_ways])
        }
        here = {name: portion for name, portion in here.items() if portion.has_rows}
        told = {
            name: pick_candidates(FEATURES.take(x.ids), GROUPS[x.ids], x.ids, asked)
            for name, x in here.items()
        }
        found.append(choose_of_portions(here, told, asked))
    assert len({x.choice.digest for x in found}) == 1
    assert len({round(x.choice.error, 6) for x in found}) == 1
    assert not any(x.faults for x in found)


@pytest.mark.parametrize("share", [0.01, 0.02, 0.1])
@pytest.mark.parametrize("num_workers", [1, 4])
def test_errors_of_a_choice_and_of_chance_are_about_what_they_are_over_all_rows(
    share: float, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portions_module, "_LEAST_PROPOSED", 100)
    spec = CoresetSpec.model_validate({"method": "craig", "fraction": share})
    asked = Picking.at(spec, 5, num_rows=NUM_ROWS, block_rows=BLOCK)
    told = proposed(asked, num_workers=num_workers)
    chosen = choose_of_portions(portions(num_workers), told, asked)
    over_all = cover_error(FEATURES, GROUPS, chosen.choice.ids)
    num_picks = asked.num_picks
    draws = [choose_by_chance(GROUPS, num_picks, seed=seed).ids for seed in range(10)]
    median = float(np.median([cover_error(FEATURES, GROUPS, ids) for ids in draws]))
    assert chosen.choice.error == pytest.approx(over_all, rel=0.05)
    assert chosen.chance_error == pytest.approx(median, rel=0.1)
    assert chosen.choice.error < median


@pytest.mark.parametrize("distributed", ["greedi", "local"])
def test_rows_of_whoever_picks_nothing_are_drawn_and_others_keep_theirs(distributed: str) -> None:
    asked = picking(distributed)
    all_here = proposed(asked)
    whole = choose_of_portions(portions(), all_here, asked)
    gone = NAMES[2]
    found = choose_of_portions(portions(), {**all_here, gone: "it was lost"}, asked)
    assert found.faults == {gone: "it was lost"}
    own = portions()[gone].ids
    assert found.num_by_chance == len(own)
    assert total(found) == pytest.approx(NUM_ROWS, rel=1e-6)  # sizes are float32
    is_own = np.isin(found.choice.ids, own)
    assert found.choice.sizes[is_own] == pytest.approx(np.full(is_own.sum(), len(own) / is_own.sum()))
    candidates = {name: set(x.ids.tolist()) for name, x in all_here.items()}
    assert all(
        set(found.choice.ids[~is_own].tolist()) & set(portions()[name].ids.tolist()) <= candidates[name]
        for name in NAMES
        if name != gone
    )
    if distributed == "local":  # what others have picked is what is taken, whoever else is there
        others = ~np.isin(whole.choice.ids, own)
        assert found.choice.ids[~is_own].tolist() == whole.choice.ids[others].tolist()


def test_rows_that_are_not_finite_are_set_aside_and_counted() -> None:
    error = _GENERATOR.normal(size=(NUM_ROWS, 3))
    odd = np.arange(7, NUM_ROWS, 200)
    error[odd] = np.inf
    asked = picking()
    found = choose_of_portions(portions(), proposed(asked, last_layer(ROWS, error)), asked)
    assert found.choice.num_set_aside == len(odd) == 10
    assert found.choice.sizes.sum(dtype=np.float64) == NUM_ROWS - 10
    assert not np.isin(found.choice.ids, odd).any()


@pytest.mark.parametrize("names", [NAMES, NAMES[:1]])
def test_where_nothing_can_be_compared_chance_draws_of_all(names: tuple[WorkerId, ...]) -> None:
    asked = picking()
    found = choose_of_portions(
        portions(len(names)),
        proposed(asked, vectors(np.full_like(ROWS, np.nan)), num_workers=len(names)),
        asked,
    )
    assert set(found.faults) == set(names)
    assert total(found) == found.num_by_chance == NUM_ROWS
    assert len(found.choice.ids) == NUM_PICKS


LIES: dict[str, Callable[[Candidates], Candidates]] = {
    "twice": lambda x: replace(x, ids=np.repeat(x.ids[:1], len(x.ids))),
    "of others": lambda x: replace(x, ids=x.ids + BLOCK),
    "inflated": lambda x: replace(x, sizes=x.sizes * 10),
    "negative": lambda x: replace(x, sizes=-x.sizes),
    "not finite": lambda x: replace(x, factors=(np.full_like(x.factors[0], np.inf),)),
    "too short": lambda x: replace(x, sizes=x.sizes[:-1]),
    "no features": lambda x: replace(x, factors=()),
    "other features": lambda x: replace(x, factors=(x.factors[0][:, :3],)),
    "groups without rows": lambda x: replace(x, counts={0: 3 * len(x.ids)}),
    "a group for each": lambda x: replace(x, counts=dict.fromkeys(range(9, 9 + len(x.ids)), 1)),
    "all set aside": lambda x: replace(x, num_set_aside=len(x.ids) + 10**6),
}


@pytest.mark.parametrize("lie", LIES)
def test_candidates_that_cannot_be_right_count_for_nothing(lie: str) -> None:
    asked = picking()
    here = proposed(asked)
    found = choose_of_portions(portions(), {**here, NAMES[0]: LIES[lie](here[NAMES[0]])}, asked)
    assert list(found.faults) == [NAMES[0]]
    assert total(found) == pytest.approx(NUM_ROWS, rel=1e-6)  # sizes are float32
    own = portions()[NAMES[0]].ids
    assert found.choice.sizes[np.isin(found.choice.ids, own)].sum() == pytest.approx(len(own))


@pytest.mark.parametrize(
    "factors", [(), (np.full((NUM_PICKS, 2), 3e38, np.float32),) * 5], ids=["none", "too long"]
)
def test_features_that_nothing_can_be_compared_by_are_no_error(factors: tuple[np.ndarray, ...]) -> None:
    asked = picking()
    lie = replace(proposed(asked, num_workers=1)[NAMES[0]], factors=factors)
    found = choose_of_portions(portions(1), {NAMES[0]: lie}, asked)
    assert list(found.faults) == [NAMES[0]]
    assert total(found) == pytest.approx(NUM_ROWS, rel=1e-6)  # sizes are float32


@pytest.mark.parametrize("distributed", ["greedi", "local"])
def test_honest_candidates_have_no_fault(distributed: str) -> None:
    asked = picking(distributed)
    for name, found in proposed(asked).items():
        assert fault_of_candidates(found, portions()[name].ids, found.widths, asked) is None
