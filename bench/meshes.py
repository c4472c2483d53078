"""Memory and traffic of a decoder block on each device of a mesh, for each form, as workers plan them.

    python -m bench.meshes [--hidden 4608] [--precision bf16] [--json]

Nothing is run: tests compare these figures with what devices hold and receive. Twelve samples of each length make a
microbatch; heads have 32 features, and the inner width is 11/4 of `--hidden`, so that 4, 9 and 16 devices divide all.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bench.report import finish
from skein.config.data.sources import TextSource
from skein.config.data.spec import DataSpec
from skein.config.job import BatchSpec, BudgetSpec, JobSpec
from skein.config.mesh.tensor import MeshForm
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.plan.mesh.devices import DeviceLoad, device_load
from skein.types import Precision, StageIndex, StageSpec

NUM_SAMPLES = 12
LENGTHS = (128, 1024, 8192)
SIZES = (4, 9, 16)
BLOCK = StageSpec(index=StageIndex(0), first=1, stop=2)
FORMS = ("1d", "1d, in parts", "2d")
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Loads of one block in each form of `FORMS`."""

    num_tokens: int
    size: int
    loads: tuple[DeviceLoad, ...]

    @property
    def least_traffic(self) -> str:
        """The form that carries least; of two alike the one that needs less memory."""
        best = min(self.loads, key=lambda load: (load.received_bytes, load.memory_bytes(1)))
        return FORMS[self.loads.index(best)]


def make_job(hidden: int, num_tokens: int, precision: Precision) -> JobSpec:
    """A block's job."""
    shape = LlamaShape(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=1,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=max(LENGTHS),
    )
    return JobSpec(
        name="block",
        model=LlamaModel(shape=shape),
        data=DataSpec(sources=(TextSource(path="text"),), sequence_tokens=num_tokens),
        batch=BatchSpec(samples=NUM_SAMPLES, microbatch_samples=NUM_SAMPLES),
        precision=precision,
        budget=BudgetSpec(steps=1),
    )


def lines(hidden: int, precision: Precision) -> Iterator[Line]:
    """All lines of the table, short samples first."""
    for num_tokens in LENGTHS:
        job = make_job(hidden, num_tokens, precision)
        for size in SIZES:
            forms = (
                MeshForm(size=size),
                MeshForm(size=size, in_sequence=True),
                MeshForm(size=size, is_grid=True),
            )
            loads = tuple(device_load(job, BLOCK, form) for form in forms)
            yield Line(num_tokens=num_tokens, size=size, loads=loads)


def table(found: list[Line]) -> str:
    """The table in Markdown, in MiB; of each form what a microbatch keeps, and what comes to a device for it."""
    heads = ["tokens of a sample", "devices", "parameters and sums", *FORMS, "carries least"]
    rows = [heads, ["---"] * len(heads)]
    for line in found:
        loads = [f"{load.slot_bytes / _MIB:,.0f}, {load.received_bytes / _MIB:,.0f}" for load in line.loads]
        fixed = f"{line.loads[0].fixed_bytes / _MIB:,.0f}"
        rows.append([str(line.num_tokens), str(line.size), fixed, *loads, line.least_traffic])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    """Print the table, then the line."""
    parser = argparse.ArgumentParser(prog="bench meshes", description=__doc__.split("\n")[0])
    parser.add_argument("--hidden", type=int, default=4608, help="features; a multiple of 4608")
    parser.add_argument("--precision", choices=[x.value for x in Precision], default="bf16")
    parser.add_argument("--json", action="store_true", help="the last line alone")
    options = parser.parse_args()
    found = list(lines(options.hidden, Precision(options.precision)))
    if not options.json:
        sys.stdout.write(table(found) + "\n")
    return finish("meshes", [], figures={f"{x.num_tokens} on {x.size}": _figures(x) for x in found})


def _figures(line: Line) -> Mapping[str, float]:
    named = zip(FORMS, line.loads, strict=True)
    return {f"{form}: MiB {what}": value / _MIB for form, load in named for what, value in _parts(load)}


def _parts(load: DeviceLoad) -> tuple[tuple[str, int], ...]:
    return ("fixed", load.fixed_bytes), ("kept", load.slot_bytes), ("received", load.received_bytes)


if __name__ == "__main__":
    sys.exit(main())
