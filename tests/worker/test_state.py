"""State by name, whatever an optimizer keeps: scalars, vectors of no parameter's shape, what is not copied or saved."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skein.config.aggregation import AggregationSpec, AllReduce
from skein.errors import LocalError
from skein.numeric.aggregate.all_reduce import AllReduceRule
from skein.numeric.walker import Slot, StateClass, Tensors, Walker
from skein.types import StageIndex, StageSpec, Step
from tests.support.device import DEVICE
from tests.worker.lab import tiny_job
from tests.worker.test_operands import RULES
from worker.compute.chunk import Chunk
from worker.compute.state import STEP, by_name, copied, named_tensors, saved, state_sizes, walker_from
from worker.model.stage import build_stage

FLAT, SCALES, ERROR, SCRATCH = "flat", "scales", "error", "scratch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd:
    """Keeps one of everything, and counts in all of it."""

    @property
    def slots(self) -> Mapping[str, Slot]:
        return {
            FLAT: Slot(kind=StateClass.REPLICATED),
            SCALES: Slot(kind=StateClass.REPLICATED),
            ERROR: Slot(kind=StateClass.PRIVATE, is_copied=False),
            SCRATCH: Slot(kind=StateClass.TRANSIENT, is_copied=False, is_saved=False),
        }

    def init(self, params: Mapping[str, Tensor]) -> dict[str, Tensors]:
        num_elements = sum(param.numel() for param in params.values())
        like = next(iter(params.values()))
        return {
            FLAT: {"all": like.new_zeros(num_elements)},
            SCALES: {name: like.new_ones(()) for name in params},
            ERROR: {"all": like.new_zeros(num_elements + 3)},
            SCRATCH: {},
        }

    def update(
        self,
        walker: Walker,
        grads: Mapping[str, Tensor],
        *,
        learning_rate: float,
        gradient_scale: float,
    ) -> None:
        for slot in (FLAT, SCALES, ERROR):
            for tensor in walker.state[slot].values():
                tensor.add_(1.0)
        walker.num_updates += 1


ODD = Odd()
RULE = AllReduceRule(spec=AllReduce(), optimizer=ODD)
PARAMS = {"a.weight": torch.ones(2, 3), "b": torch.full((4,), 2.0)}


def odd_walker() -> Walker:
    """After three updates."""
    walker = Walker(params=dict(PARAMS), state=ODD.init(PARAMS))
    for _ in range(3):
        ODD.update(walker, {}, learning_rate=1.0, gradient_scale=1.0)
    return walker


def odd_chunk(text: Path) -> Chunk:
    job = tiny_job(text, stages=1)
    stage = StageSpec(index=StageIndex(0), first=0, stop=6)
    module = build_stage(
        job.model,
        stage,
        sequence_tokens=job.data.sequence_tokens,
        seed=job.seed,
        precision=job.precision,
        device=DEVICE,
    )
    return Chunk(module, RULE, version=Step(0))


def test_a_walker_goes_by_its_names_and_comes_back() -> None:
    walker = odd_walker()
    state = named_tensors(walker, copied(ODD.slots))
    assert state.keys() == {"a.weight", "b", "flat.all", "scales.a.weight", "scales.b", STEP}
    back = walker_from(state, RULE)
    assert back.num_updates == 3
    assert back.params.keys() == PARAMS.keys()
    assert all(back.params[name] is PARAMS[name] for name in PARAMS), "nothing is copied"
    assert {name: x.item() for name, x in back.state[SCALES].items()} == {"a.weight": 4.0, "b": 4.0}
    assert back.state[FLAT]["all"] is walker.state[FLAT]["all"]
    assert not back.state[ERROR]["all"].any(), "what is not copied begins anew"


def test_a_state_without_a_count_is_refused() -> None:
    with pytest.raises(LocalError, match="how many"):
        walker_from(PARAMS, RULE)


def test_what_is_saved_and_what_is_copied_is_as_the_slots_say() -> None:
    assert copied(ODD.slots) == {FLAT, SCALES}
    assert saved(ODD.slots) == {FLAT, SCALES}, "what nobody else begins with is not saved either"


def test_a_chunk_takes_over_a_copy_and_begins_anew_what_the_copy_lacks(text: Path) -> None:
    donor, newcomer = odd_chunk(text), odd_chunk(text)
    for chunk in (donor, newcomer, newcomer):
        ODD.update(chunk.walker, {}, learning_rate=1.0, gradient_scale=1.0)
    newcomer.load_state(donor.copy_state(), version=Step(1))
    assert newcomer.walker.num_updates == 1
    assert {x.item() for x in newcomer.walker.state[SCALES].values()} == {2.0}
    assert set(newcomer.walker.state[FLAT]["all"].tolist()) == {1.0}
    assert set(newcomer.walker.state[ERROR]["all"].tolist()) == {0.0}


def test_a_chunk_takes_over_all_that_a_checkpoint_has(text: Path) -> None:
    before, after = odd_chunk(text), odd_chunk(text)
    ODD.update(before.walker, {}, learning_rate=1.0, gradient_scale=1.0)
    params, state = before.copy_for_checkpoint()
    assert params.keys() == before.params.keys()
    assert state.keys() == {*by_name(before.walker.state, [FLAT, SCALES]), STEP}
    after.load_state({**params, **state}, version=Step(1))
    assert set(after.walker.state[FLAT]["all"].tolist()) == {1.0}
    assert not after.walker.state[ERROR]["all"].any()


@pytest.mark.parametrize("spoilt", ["flat.all", STEP])
def test_a_state_that_lacks_what_every_copy_has_changes_nothing(text: Path, spoilt: str) -> None:
    donor, newcomer = odd_chunk(text), odd_chunk(text)
    ODD.update(donor.walker, {}, learning_rate=1.0, gradient_scale=1.0)
    state = donor.copy_state()
    del state[spoilt]
    with pytest.raises(LocalError, match=f"{spoilt} should be"):
        newcomer.load_state(state, version=Step(1))
    assert newcomer.walker.num_updates == 0
    assert {x.item() for x in newcomer.walker.state[SCALES].values()} == {1.0}


def test_a_tensor_of_another_shape_is_refused(text: Path) -> None:
    donor, newcomer = odd_chunk(text), odd_chunk(text)
    state = donor.copy_state() | {"flat.all": torch.zeros(3)}
    with pytest.raises(LocalError, match=r"flat.all should be .*, found \(3,\)"):
        newcomer.load_state(state, version=Step(1))


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_names_and_sizes_of_state_are_known_without_any(rule: AggregationSpec, tmp_path: Path) -> None:
    job = tiny_job(tmp_path).model_copy(update={"aggregation": rule})
    chunk = Chunk.drawn(job, StageSpec(index=StageIndex(1), first=1, stop=3), version=Step(0), device=DEVICE)
    state = chunk.state()
    assert state_sizes(job, chunk.stage) == {name: tensor.nbytes for name, tensor in state.items()}


_ASKS = """
import sys
from pathlib import Path
from skein.types import StageIndex, StageSpec
from tests.worker.lab import tiny_job
from worker.compute.state import state_names
before = set(sys.modules)
state_names(tiny_job(Path("text")), StageSpec(index=StageIndex(0), first=0, stop=2))
print(len(set(sys.modules) - before))
"""


def test_the_event_loop_stands_still_for_no_module_when_it_asks_for_names_of_state() -> None:
    found = subprocess.run([sys.executable, "-c", _ASKS], capture_output=True, text=True, check=True)
    assert int(found.stdout) == 0
