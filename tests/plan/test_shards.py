"""Plans of models whose vocabulary is cut: every row once, a shard of each end for every worker."""

from collections import Counter
from dataclasses import replace

import pytest

from skein.config.job import JobSpec, ParallelSpec, PlanSpec
from skein.errors import UserError
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.model.reduced import reduced_by_group
from skein.model.rows import VocabularySpec, VocabularySplit, parse_block
from skein.plan.balanced import make_balanced_plan
from skein.plan.changing.leeway import settled, settlings
from skein.plan.changing.recut import recut
from skein.plan.check import violations
from skein.plan.cut import check_job, cut_job
from skein.plan.load import stage_loads
from skein.plan.plan import Infeasible, Plan
from skein.plan.searched import make_searched_plan
from skein.types import StageSpec, Tied
from tests.plan.builders import fleet, job, link, planned

SPLITS = (VocabularySplit.OUTPUT, VocabularySplit.BOTH)
ROWS = 1000


def sharded(
    split: VocabularySplit, *, stages: int = 4, chunks: int = 1, is_tied: bool = False, rows: int = ROWS
) -> JobSpec:
    shape = LlamaShape(
        vocab_size=rows,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2 * stages * chunks,
        tie_word_embeddings=is_tied,
    )
    parallel = ParallelSpec(stages=stages, chunks=chunks, vocabulary=VocabularySpec(split=split))
    changed = job().model_copy(update={"parallel": parallel, "model": LlamaModel(shape=shape)})
    return JobSpec.model_validate(changed.model_dump(mode="json"))


def rows_of(spec: JobSpec, stage: StageSpec) -> list[range]:
    layers = spec.model.layer_parameters()[stage.first : stage.stop]
    blocks = [parse_block(name) for layer in layers for name in layer]
    return [block.rows for block in blocks if block is not None]


def held_bytes(spec: JobSpec, plan: Plan) -> Counter[str]:
    """Bytes of the chunks of each worker, with a slot each."""
    held: Counter[str] = Counter()
    for load in stage_loads(spec, plan.stages):
        held.update(dict.fromkeys(plan.holders(load.stage.index), load.memory_bytes(1)))
    return held


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("chunks", [1, 2])
def test_shards_hold_every_row_once_and_every_worker_a_shard_of_each_end(
    split: VocabularySplit, chunks: int
) -> None:
    spec, on = sharded(split, chunks=chunks), fleet([1e9] * 4)
    plan = planned(spec, on)
    assert list(violations(plan, spec, on)) == []
    num_inputs, num_between, num_outputs = spec.parallel.shares
    assert num_outputs == 4
    assert num_inputs == (4 if split is VocabularySplit.BOTH else 0)
    for first, stop in ((0, num_inputs), (num_inputs + num_between, len(plan.stages))):
        shards = plan.stages[first:stop]
        held = [row for stage in shards for rows in rows_of(spec, stage) for row in rows]
        assert held == (list(range(ROWS)) if shards else [])
        workers = [worker for stage in shards for worker in plan.holders(stage.index)]
        assert len(set(workers)) == len(shards)


def test_tied_rows_are_summed_shard_by_shard_by_one_worker_each() -> None:
    spec, on = sharded(VocabularySplit.BOTH, is_tied=True), fleet([1e9] * 4)
    plan = planned(spec, on)
    tied = [group for group in plan.groups if isinstance(group.group, Tied)]
    assert [len(group.workers) for group in tied] == [1] * 4
    reduced = reduced_by_group(spec.model, plan.stages)
    num_tied = sum(x.num_parameters for group, x in reduced.items() if isinstance(group, Tied))
    assert num_tied == ROWS * 64


def test_a_search_keeps_tied_rows_on_one_worker_where_links_are_slow() -> None:
    spec = sharded(VocabularySplit.BOTH, is_tied=True, rows=20_000)
    names = [f"w{i}" for i in range(4)]
    links = [link(a, b, 1e-3, 1e7) for a in names for b in names if a != b]
    quick = spec.model_copy(update={"plan": PlanSpec(budget_s=0.3)})
    plan = make_searched_plan(quick, fleet([1e11] * 4, links=links), None, 0)
    assert isinstance(plan, Plan)
    assert all(len(group.workers) == 1 for group in plan.groups)


def test_a_slow_worker_has_fewer_rows() -> None:
    spec = sharded(VocabularySplit.OUTPUT, rows=30_000)
    on = fleet([2e9, 2e9, 2e9, 1.2e9])
    uneven = recut(spec, on, planned(spec, on))
    assert isinstance(uneven, Plan)
    assert list(violations(uneven, spec, on)) == []
    num_rows = {
        str(worker): sum(map(len, rows_of(spec, stage)))
        for stage in uneven.stages[4:]
        for worker in uneven.holders(stage.index)
    }
    assert num_rows.pop("w3") < min(num_rows.values())


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("rows", [64, 60_000])
def test_a_planner_that_may_choose_cuts_the_vocabulary_where_that_pays(rows: int, *, is_tied: bool) -> None:
    spec, on = sharded(VocabularySplit.AUTO, rows=rows, is_tied=is_tied), fleet([1e9] * 4)
    plan = planned(spec, on)
    assert list(violations(plan, spec, on)) == []
    ways = settlings(spec, None)
    made = {x.parallel.vocabulary.split: planned(x, on) for x in ways}
    assert [*made] == [VocabularySplit.OFF, *SPLITS]
    for split, one in made.items():
        assert settled(spec, one).parallel.vocabulary.split is split
        held = [row for stage in one.stages for x in rows_of(spec, stage) for row in x]
        assert sorted(held) == sorted([*range(rows)] * 2)
        assert list(violations(one, spec, on)) == []
        groups = reduced_by_group(spec.model, one.stages)
        num_tied = sum(x.num_parameters for group, x in groups.items() if isinstance(group, Tied))
        assert num_tied == is_tied * rows * 64
    whole_s = made[VocabularySplit.OFF].predicted_step_s
    cut_s = min(made[split].predicted_step_s for split in SPLITS)
    assert plan.predicted_step_s == (cut_s if cut_s < 0.95 * whole_s else whole_s)
    assert (plan.predicted_step_s == cut_s) is (rows == 60_000)
    # What was chosen stays as long as its stages are held.
    assert [x.parallel.vocabulary.split for x in settlings(spec, plan)] == [
        settled(spec, plan).parallel.vocabulary.split
    ]


def test_where_whole_ends_fit_nowhere_they_are_cut() -> None:
    spec = sharded(VocabularySplit.AUTO, rows=60_000)
    plans = {x.parallel.vocabulary.split: planned(x, fleet([1e9] * 4)) for x in settlings(spec, None)}
    fullest = {split: max(held_bytes(spec, plan).values()) for split, plan in plans.items()}
    room_bytes = fullest[VocabularySplit.BOTH]
    assert room_bytes < 0.8 * fullest[VocabularySplit.OFF]
    plan = planned(spec, fleet([1e9] * 4, memory_bytes=room_bytes))
    assert settled(spec, plan).parallel.vocabulary.split is VocabularySplit.BOTH


@pytest.mark.parametrize(
    "changes",
    [{"parallel": {"layout": "loop"}}, {"skip": {"ratio": 0.25}}, {"optimizer": {"name": "lamb"}}],
    ids=["loop", "skip", "lamb"],
)
def test_where_shards_cannot_be_a_planner_chooses_none(changes: dict[str, dict[str, object]]) -> None:
    spec = sharded(VocabularySplit.AUTO, rows=60_000)
    given = spec.model_dump(mode="json")
    other = JobSpec.model_validate(given | {field: given[field] | value for field, value in changes.items()})
    assert [x.parallel.vocabulary.split for x in settlings(other, None)] == [VocabularySplit.OFF]
    assert other.model.vocabulary_split is VocabularySplit.OFF


def test_more_shards_than_blocks_are_refused() -> None:
    spec = sharded(VocabularySplit.OUTPUT, stages=4, rows=40)
    with pytest.raises(UserError, match="cut into 2 shards at most") as refused:
        check_job(spec)
    assert refused.value.field == "parallel.vocabulary.split"


def test_a_job_without_shards_is_cut_as_ever() -> None:
    plain = sharded(VocabularySplit.OFF)
    assert len(cut_job(plain)) == 4
    assert not [x for stage in cut_job(plain) for x in rows_of(plain, stage)]


def test_a_plans_reason_says_who_holds_which_rows() -> None:
    spec, on = sharded(VocabularySplit.BOTH), fleet([1e9] * 4)
    searched = spec.model_copy(update={"plan": PlanSpec(budget_s=0.01)})
    for plan in (planned(spec, on), make_searched_plan(searched, on, None, 0)):
        assert isinstance(plan, Plan)
        for end, stages in (("input", plan.stages[:4]), ("output", plan.stages[-4:])):
            held = [(rows_of(spec, x), plan.holders(x.index)[0]) for x in stages]
            told = [f"{rows[0].start} to {rows[-1].stop - 1} on {worker}" for rows, worker in held]
            assert f"rows of the {end}: {', '.join(told)}" in str(plan.reason)
    assert "rows of" not in str(planned(job(), on).reason)


def with_rows(spec: JobSpec, **changes: object) -> JobSpec:
    """`spec` with other settings of its vocabulary."""
    given = spec.model_dump(mode="json")
    given["parallel"]["vocabulary"] |= changes
    return JobSpec.model_validate(given)


def shards_by_worker(spec: JobSpec, plan: Plan) -> dict[str, list[int]]:
    """Rows of each shard that a worker holds, the input's first."""
    found: dict[str, list[int]] = {}
    for run in spec.parallel.runs[::2]:
        for stage in run:
            for worker in plan.holders(plan.stages[stage].index):
                found.setdefault(worker, []).append(sum(map(len, rows_of(spec, plan.stages[stage]))))
    return found


@pytest.mark.parametrize("is_searched", [False, True], ids=["first", "searched"])
def test_even_rows_are_one_equal_shard_of_each_end_on_each_worker(*, is_searched: bool) -> None:
    spec = with_rows(sharded(VocabularySplit.BOTH, rows=32_000), rows="even")
    spec = spec.model_copy(update={"plan": PlanSpec(budget_s=0.3)})
    on = fleet([2e9, 1e9, 2e9, 1.5e9])
    plan = make_searched_plan(spec, on, None, 0) if is_searched else planned(spec, on)
    assert isinstance(plan, Plan)
    assert list(violations(plan, spec, on)) == []
    assert shards_by_worker(spec, plan) == {f"w{i}": [8000, 8000] for i in range(4)}
    if not is_searched:
        uneven = recut(spec, on, plan)
        assert uneven is not None
        assert shards_by_worker(spec, uneven) == shards_by_worker(spec, plan)


@pytest.mark.parametrize("rows", ["memory", "speed"])
def test_who_has_less_memory_has_fewer_rows(rows: str) -> None:
    spec = with_rows(sharded(VocabularySplit.BOTH, rows=60_000), rows="even")
    needed_bytes = max(held_bytes(spec, planned(spec, fleet([1e9] * 4))).values())
    on = fleet([1e9] * 4, memory_bytes=[needed_bytes * 13 // 10] * 3 + [needed_bytes * 7 // 10])
    refused = make_balanced_plan(spec, on, None, 0)
    assert isinstance(refused, Infeasible)
    assert "set parallel.vocabulary.rows: memory" in refused.reason
    fitting = with_rows(spec, rows=rows)
    plan = planned(fitting, on)
    assert list(violations(plan, fitting, on)) == []
    held = shards_by_worker(fitting, plan)
    assert all(inputs == outputs for inputs, outputs in held.values())
    assert held["w3"][0] < 0.6 * min(held[f"w{i}"][0] for i in range(3))


SITES = ("a", "a", "a", "a", "b", "b", "b", "b")


@pytest.mark.parametrize("is_searched", [False, True], ids=["first", "searched"])
@pytest.mark.parametrize("split", SPLITS)
def test_shards_of_a_site_are_where_the_last_layers_are(split: VocabularySplit, *, is_searched: bool) -> None:
    spec = with_rows(sharded(split, stages=8, rows=32_000), scope="site")
    spec = spec.model_copy(update={"plan": PlanSpec(budget_s=0.3)})
    far = [
        link(f"w{i}", f"w{j}", 0.0 if SITES[i] == SITES[j] else 0.02, 1e8)
        for i in range(8)
        for j in range(8)
        if i != j
    ]
    on = fleet([1e9] * 8, sites=SITES, links=far)
    first = planned(spec, on)
    for plan in (first, make_searched_plan(spec, on, None, 0) if is_searched else planned(spec, on, first)):
        assert isinstance(plan, Plan)
        assert list(violations(plan, spec, on)) == []
        last = spec.parallel.runs[1][-1]
        (site,) = {SITES[int(worker[1:])] for worker in plan.holders(plan.stages[last].index)}
        held = shards_by_worker(spec, plan)
        assert {SITES[int(worker[1:])] for worker in held} == {site}
        assert len(held) == 4


def test_shards_of_a_site_with_one_worker_are_refused() -> None:
    spec = with_rows(sharded(VocabularySplit.BOTH), scope="site")
    refused = make_balanced_plan(spec, fleet([1e9] * 4, sites=("a", "b", "c", "d")), None, 0)
    assert isinstance(refused, Infeasible)
    assert refused.reason.startswith("parallel.vocabulary.scope: site: ")
    assert "has one worker: give pipeline, or add workers there" in refused.reason


def test_a_site_that_is_lost_leaves_shards_where_there_is_room() -> None:
    spec = with_rows(sharded(VocabularySplit.BOTH), scope="site")
    on = fleet([1e9] * 4, sites=("a", "a", "b", "b"))
    plan = planned(spec, on)
    site = {"w0": "a", "w1": "a", "w2": "b", "w3": "b"}[next(iter(shards_by_worker(spec, plan)))]
    left = replace(on, workers=tuple(x for x in on.workers if x.site != site))
    again = planned(spec, left, plan)
    assert list(violations(again, spec, left)) == []
    assert {x.worker for x in left.workers} >= shards_by_worker(spec, again).keys()
