"""Words about the experts of a sparse model in a job's status."""

from dataclasses import replace

import pytest

from client.cli.show import experts_text
from tests.client.scripted import status


@pytest.mark.parametrize(
    ("drop_ratio", "busiest", "idlest", "text"),
    [
        (0.0, None, None, "balance 1.25 (1: used evenly)"),
        (0.0, 1.75, 0.5, "balance 1.25 (1: used evenly), busiest 1.8 and idlest 0.5 of an even share"),
        (0.125, None, None, "balance 1.25 (1: used evenly), 0.12 of the choices dropped"),
    ],
)
def test_experts_are_told_of_as_far_as_anything_is_known(
    drop_ratio: float, busiest: float | None, idlest: float | None, text: str
) -> None:
    told = replace(
        status(), balance_loss=1.25, drop_ratio=drop_ratio, busiest_expert=busiest, idlest_expert=idlest
    )
    assert experts_text(told) == text
