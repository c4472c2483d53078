"""Writes the table of costs in docs/aggregation.md from the estimates; `make docs` runs it, a test compares."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from client.planning.estimates import Estimate, estimate
from skein.config.job import JobSpec
from skein.config.load import parse_job
from skein.plan.agreeing.costs import Circle

PAGE = Path(__file__).with_name("aggregation.md")
BEGIN, END = "<!-- costs: generated, see docs/generate_aggregation.py -->", "<!-- end of costs -->"
NUM_PARAMETERS, NUM_TENSORS, NUM_MEMBERS, NUM_STEPS = 10**9, 300, 8, 10_000

_JOB = f"""
name: costs
model: {{family: digits_cnn}}
data: {{sources: [{{format: digits}}]}}
batch: {{samples: {NUM_MEMBERS}, microbatch_samples: 1}}
parallel: {{stages: 1, replicas: {NUM_MEMBERS}}}
budget: {{steps: {NUM_STEPS}}}
"""
_SGD, _LAMB = "optimizer={name: sgd}", "optimizer={name: lamb}"
ROWS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("`all_reduce`", ("aggregation={rule: all_reduce}",)),
    ("`all_reduce`, `wire: bf16`", ("aggregation={rule: all_reduce, wire: bf16}",)),
    ("`all_reduce`, `wire: int8`", ("aggregation={rule: all_reduce, wire: int8}",)),
    ("`one_bit_lamb`, warm-up of 15 %", ("aggregation={rule: one_bit_lamb, warmup_steps: 1500}", _LAMB)),
    ("`one_bit_adam`, warm-up of 15 %", ("aggregation={rule: one_bit_adam, warmup_steps: 1500}",)),
    ("`gossip`, ring, SGD", ("aggregation={rule: gossip, graph: ring}", _SGD)),
    ("`gossip`, ring, AdamW", ("aggregation={rule: gossip, graph: ring}",)),
    (
        "`gossip`, `qg_dmsgd`, one-peer exponential, SGD",
        ("aggregation={rule: gossip, method: qg_dmsgd, graph: one_peer_exponential}", _SGD),
    ),
    ("`lsgd`, 4 and 16 steps", ("aggregation={rule: lsgd}",)),
    ("`diloco`, 50 steps, int8", ("aggregation={rule: diloco}",)),
    ("`diloco`, 50 steps, int4", ("aggregation={rule: diloco, wire: int4}",)),
    (
        "`diloco`, 100 steps, int4, 10 fragments",
        ("aggregation={rule: diloco, local_steps: 100, wire: int4, fragments: 10}",),
    ),
    ("`diloco`, 500 steps, int2", ("aggregation={rule: diloco, local_steps: 500, wire: int2}",)),
)


def costs() -> Iterator[tuple[str, JobSpec, Estimate]]:
    """Each row of the table: what it is called, a job of that kind, and what its aggregation costs."""
    circle = Circle(num_parameters=NUM_PARAMETERS, num_tensors=NUM_TENSORS, num_workers=NUM_MEMBERS)
    for title, overrides in ROWS:
        job = parse_job(_JOB, origin="job", overrides=overrides)
        yield title, job, estimate(job, [circle], num_workers=NUM_MEMBERS)


def table() -> str:
    """The table in Markdown."""
    heads = ("rule", "sent per step", "in one exchange", "how often", "less than fp32 all-reduce")
    lines = [f"| {' | '.join(heads)} |", "|---|--:|--:|---|--:|"]
    for title, _, cost in costs():
        often = (
            "every step" if cost.exchanges_per_step == 1 else f"every {1 / cost.exchanges_per_step:.3g} steps"
        )
        if "one_bit" in cost.rule:
            often = "every step after the warm-up"
        lines.append(
            f"| {title} | {_bytes(cost.step_bytes)} | {_bytes(cost.exchange_bytes)} | {often} | {_times(cost.ratio)} |"
        )
    return "\n".join(lines)


def page() -> str:
    """The page with the table as it should be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _bytes(num_bytes: float) -> str:
    """Decimal, as links are sold.

    >>> _bytes(7e9), _bytes(8.93e6)
    ('7 GB', '8.93 MB')
    """
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"


def _times(ratio: float) -> str:
    """
    >>> _times(7529.4), _times(0.4375)
    ('7,530 x', '0.438 x')
    """
    return f"{float(f'{ratio:.3g}'):,g} x"


def main(arguments: Sequence[str]) -> int:
    """Writes the page, or with --check says whether that would change it."""
    text = page()
    if "--check" in arguments:
        return 0 if PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
