"""Whole simulated jobs by name, and what became of each: every line and every record."""

import hashlib
from collections.abc import Callable, Iterator
from functools import partial

from skein.protocol.log.records import Record
from skein.sim.moments import STRUCK, judge_struck, struck
from skein.sim.scenario import disturbed, judge
from skein.sim.shapes import SHAPES, shape_of
from skein.sim.world import World
from skein.wire.codec import RECORD

FAULTS = 8


def drawn(shape: str, seed: int) -> World:
    """A world of this shape, after the faults of a seed and the job's end."""
    of = shape_of(shape)
    world = disturbed(of, seed=seed, num_faults=FAULTS)
    judge(of, world)
    return world


def strike(rule: str, seed: int) -> World:
    """A world under this rule, after a strike amid an exchange and the job's end."""
    world = struck(rule, seed)
    judge_struck(world)
    return world


def digest(world: World) -> str:
    """SHA-256 over the coordinator's lines and the bytes of its log, in hexadecimal, its first half."""
    sums = hashlib.sha256("\n".join(world.lines).encode())
    for payload in payloads(world.log):
        sums.update(payload)
    return sums.hexdigest()[:32]


def payloads(log: list[Record]) -> Iterator[bytes]:
    """What a run log holds of each record."""
    return map(RECORD.to_bytes, log)


def stories() -> Iterator[tuple[str, Callable[[], World]]]:
    """Each by its name: every shape with faults, every rule with a strike amid an exchange."""
    for seed, shape in enumerate(SHAPES, start=100):
        yield f"{shape.text}, seed {seed}", partial(drawn, shape.text, seed)
    for seed, rule in enumerate(STRUCK, start=100):
        yield f"by {rule}, seed {seed}", partial(strike, rule, seed)
