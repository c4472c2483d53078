"""Both 1-bit rules against what DeepSpeed 0.18.9 made of the same gradients on CPU over gloo, in float64.

`python -m bench.studies.aggregation.one_bit_deepspeed FILE` writes the figures; it installs DeepSpeed in an environment
of its own.
"""

import json
from itertools import product
from pathlib import Path

import pytest

from tests.support.extent import part
from tests.support.one_bit_contest import Contest, Kind, run_ours, sample

RECORDED: dict[str, dict[str, list[float]]] = json.loads(
    Path(__file__).with_name("one_bit_deepspeed.json").read_text()
)


@pytest.mark.parametrize(("kind", "num_peers"), part(list(product(("adam", "lamb"), (2, 4))), every=3))
def test_forty_steps_are_those_of_deepspeed(kind: Kind, num_peers: int) -> None:
    contest = Contest(kind=kind, dtype="float64", num_peers=num_peers)
    ours, theirs = run_ours(contest), RECORDED[contest.name]
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        # Both round in float64; a single bit of the other sign would show at 1e-3.
        assert sample(ours[name]) == pytest.approx(expected, rel=1e-12, abs=1e-13), name
