"""Writes docs/protocol.md from the machines themselves; `make docs` runs it, a test compares."""

import dataclasses
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import get_args, get_origin, get_type_hints

from skein.plan import plan
from skein.plan.changing.clauses import Clauses
from skein.plan.ops import Direction
from skein.protocol.coordinator import coordinator, coordinator_io
from skein.protocol.coordinator.runs import gathering, run
from skein.protocol.coordinator.runs.checkpoints import savings
from skein.protocol.coordinator.runs.improving import improving, replanning
from skein.protocol.coordinator.runs.phase import RunPhase
from skein.protocol.coordinator.runs.placing import placement
from skein.protocol.coordinator.runs.steps import evaluation, selecting, stepping
from skein.protocol.coordinator.runs.watching import measuring, vigil
from skein.protocol.coordinator.runs.workers import blame, members
from skein.protocol.coordinator.sweeping import deciding, sweeps
from skein.protocol.log import history, records
from skein.protocol.membership import membership
from skein.protocol.messages import directives, reports, tensors
from skein.protocol.rounds import round
from skein.protocol.worker import ops, pipeline, reduction, steps, timing, worker, worker_io
from skein.types import GroupId

PAGE = Path(__file__).with_name("protocol.md")

HEAD = """# The protocol

This page is generated from the code: `make docs` writes it, and a test fails when the two differ. Words are those of
the [glossary](glossary.md); [architecture](architecture.md) tells how the parts fit together.

A machine is a plain object. `handle(event, *, now)` takes one event at a time and gives commands; `deadline()` says
when it wants to be called again. It has no thread, no clock and no socket, so the services and the simulator drive
the very same ones.

One step, in messages:

```mermaid
sequenceDiagram
    participant W as worker
    participant C as coordinator
    participant P as its peers
    W->>C: Hello
    C->>W: Welcome
    C->>W: NewGeneration (recorded first)
    W->>C: Ack: what is held
    Note over C: the fence: all have acknowledged, a plan is made
    C->>W: Assign
    W->>C: ChunksReady
    C->>W: Start
    W->>P: HopTensor forward
    P->>W: HopTensor backward
    W->>C: StageDone: the ledger is complete
    C->>W: Prepare
    W->>P: ShardTensor part
    P->>W: ShardTensor result
    W->>C: Vote
    C->>W: Commit (recorded first)
```
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A union of dataclasses, or an enum."""

    title: str
    members: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One module: its rules, and what it exchanges."""

    title: str
    module: ModuleType
    tables: tuple[Table, ...] = ()


MACHINES = (
    Section(
        title="Membership",
        module=membership,
        tables=(
            Table(title="Events", members=membership.MembershipEvent),
            Table(title="Changes", members=membership.MembershipChange),
        ),
    ),
    Section(
        title="Coordinator",
        module=coordinator,
        tables=(
            Table(title="Events", members=coordinator_io.CoordinatorEvent),
            Table(title="Commands", members=coordinator_io.CoordinatorCommand),
        ),
    ),
    Section(title="Run", module=run, tables=(Table(title="Phases", members=RunPhase),)),
    Section(
        title="Round",
        module=round,
        tables=(
            Table(title="Events", members=round.RoundEvent),
            Table(title="Commands", members=round.RoundCommand),
        ),
    ),
    Section(
        title="Worker",
        module=worker,
        tables=(
            Table(title="Events", members=worker_io.WorkerEvent),
            Table(title="Commands", members=worker_io.WorkerCommand),
        ),
    ),
)
PARTS = (
    Section(title="Hard state", module=history),
    Section(title="Sweeps", module=sweeps),
    Section(title="Course of a sweep", module=deciding),
    Section(title="Members", module=members),
    Section(title="Gathering", module=gathering),
    Section(title="Blame", module=blame),
    Section(title="Vigil", module=vigil),
    Section(title="Placement", module=placement),
    Section(title="Stepping", module=stepping),
    Section(title="Choosing rows", module=selecting),
    Section(title="Measuring", module=measuring),
    Section(title="Replanning", module=replanning),
    Section(title="Improving", module=improving),
    Section(title="Evaluation", module=evaluation),
    Section(title="Savings", module=savings),
    Section(title="Steps of a worker", module=steps),
    Section(title="Pipeline", module=pipeline),
    Section(title="Reduction", module=reduction),
    Section(title="Timing", module=timing),
)
MESSAGES = (
    Table(title="Reports: worker to coordinator", members=reports.Report),
    Table(title="Directives: coordinator to worker", members=directives.Directive),
    Table(title="Tensors: worker to worker", members=tensors.Envelope | tensors.TensorHeader),
    Table(
        title="Values in them",
        members=directives.Member
        | directives.ChunkVersion
        | directives.ChunkAssignment
        | directives.StateSource
        | directives.Origin
        | directives.Ledger
        | directives.StepRecord
        | directives.GroupResult
        | plan.ChunkTime
        | plan.TransferTime
        | directives.CheckpointFile
        | reports.Count,
    ),
    Table(title="Phase", members=tensors.Phase),
    Table(title="Decision", members=directives.Decision),
    Table(title="SourceKind", members=directives.SourceKind),
    Table(title="Direction", members=Direction),
    Table(title="ShardKind", members=tensors.ShardKind),
)
RECORDS = (Table(title="The run log", members=records.Record),)
OPS = (
    Table(title="Ops", members=ops.Op),
    Table(title="Outcomes", members=ops.Loss | ops.Joined | ops.OpFailed),
)


_ALIASES: dict[object, str] = {
    GroupId: "GroupId",
    Clauses: "Clauses",
    reports.Report: "Report",
    directives.Directive: "Directive",
    tensors.TensorHeader: "TensorHeader",
    records.Record: "Record",
    ops.Op: "Op",
    ops.OpOutcome: "OpOutcome",
}


def page() -> str:
    """The whole page."""
    lines = [HEAD, "## Machines", ""]
    for section in MACHINES:
        lines += _section(section)
    lines += [
        "## Parts of machines",
        "",
        "Not machines of their own: a machine hands them what concerns them.",
        "",
    ]
    for section in PARTS:
        lines += _section(section)
    for title, module, tables in (
        ("Messages", directives, MESSAGES),
        ("Records", records, RECORDS),
        ("Ops", ops, OPS),
    ):
        lines += [f"## {title}", "", *_about(module)]
        for table in tables:
            lines += _table(table)
    return "\n".join(lines).rstrip() + "\n"


def _section(section: Section) -> Iterator[str]:
    yield from (f"### {section.title}", "", f"`{section.module.__name__.replace('.', '/')}.py`", "")
    yield from _about(section.module)
    for table in section.tables:
        yield from _table(table)


def _about(module: ModuleType) -> Iterator[str]:
    """A module's docstring; its rules are a list there already."""
    text = inspect.cleandoc(module.__doc__ or "")
    yield from (text.replace("\nRules of this file\n", "\nRules:\n\n"), "")


def _table(table: Table) -> Iterator[str]:
    yield from (f"**{table.title}**", "")
    if isinstance(table.members, type) and issubclass(table.members, Enum):
        yield f"{_meaning(table.members)} Values: {', '.join(f'`{value.value}`' for value in table.members)}."
    else:
        yield from ("| name | meaning | fields |", "|---|---|---|")
        for member in get_args(table.members):
            yield f"| `{member.__name__}` | {_meaning(member)} | {_fields(member)} |"
    yield ""


def _meaning(described: type) -> str:
    """The docstring's first paragraph in one line."""
    text = inspect.cleandoc(described.__doc__ or "")
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


def _fields(described: type) -> str:
    hints = get_type_hints(described)
    names = [field.name for field in dataclasses.fields(described)]
    return "<br>".join(f"`{name}: {_spelt(hints[name])}`" for name in names).replace("|", "\\|") or "none"


def _spelt(hint: object) -> str:
    """A type as it stands in the code."""
    if hint in _ALIASES:
        return _ALIASES[hint]
    if hint is type(None):
        return "None"
    if hint is Ellipsis:
        return "..."
    arguments = [_spelt(argument) for argument in get_args(hint)]
    origin = get_origin(hint)
    if origin is None:
        return str(getattr(hint, "__name__", hint))
    if isinstance(origin, type) and issubclass(origin, tuple | dict):
        return f"{origin.__name__}[{', '.join(arguments)}]"
    return " | ".join(arguments)


def main(arguments: Sequence[str]) -> int:
    """Write the page; with `--check`, only say whether it is as it should be."""
    if "--check" in arguments:
        return 0 if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page() else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
