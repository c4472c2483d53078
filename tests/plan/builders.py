"""Jobs and fleets in a line, and how Hypothesis draws them."""

from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from skein.config.data.sources import TextSource
from skein.config.data.spec import DataSpec
from skein.config.job import BatchSpec, BudgetSpec, JobSpec, ParallelSpec, PlanSpec, SkipSpec
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.plan.balanced import make_balanced_plan
from skein.plan.load import stage_loads
from skein.plan.plan import Plan
from skein.topology.fleet import Fleet, FleetWorker, Link, Profile
from skein.types import Layout, SiteId, StageIndex, StageSpec, WorkerId

AMPLE_BYTES = 2**40


def job(
    *,
    stages: int = 2,
    replicas: int = 2,
    layout: Layout = Layout.LINE,
    num_layers: int = 4,
    num_microbatches: int = 8,
    is_tied: bool = True,
    vocab_size: int = 256,
    skip_ratio: float = 0.0,
) -> JobSpec:
    """A small language model, cut and held as asked."""
    shape = LlamaShape(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        tie_word_embeddings=is_tied,
    )
    return JobSpec(
        name="small",
        model=LlamaModel(shape=shape),
        data=DataSpec(sources=(TextSource(path="corpus"),), sequence_tokens=32),
        batch=BatchSpec(samples=2 * num_microbatches, microbatch_samples=2),
        parallel=ParallelSpec(stages=stages, replicas=replicas, layout=layout),
        skip=SkipSpec(ratio=skip_ratio),
        budget=BudgetSpec(steps=1),
    )


def fleet(
    speeds: Sequence[float],
    *,
    memory_bytes: int | Sequence[int] = AMPLE_BYTES,
    sites: Sequence[str] | None = None,
    links: Iterable[Link] = (),
) -> Fleet:
    """Workers w0, w1, … of these speeds."""
    sizes = [memory_bytes] * len(speeds) if isinstance(memory_bytes, int) else memory_bytes
    places = sites or ["here"] * len(speeds)
    workers = (
        FleetWorker(
            worker=WorkerId(f"w{i}"),
            site=SiteId(site),
            profile=Profile(device="cpu", device_name="test", flops_per_s=speed, memory_bytes=size),
        )
        for i, (speed, size, site) in enumerate(zip(speeds, sizes, places, strict=True))
    )
    return Fleet(workers=tuple(workers), links=tuple(links))


def link(sender: str, receiver: str, latency_s: float, bytes_per_s: float = 1e9) -> Link:
    return Link(
        sender=WorkerId(sender), receiver=WorkerId(receiver), latency_s=latency_s, bytes_per_s=bytes_per_s
    )


def without(whole: Fleet, *lost: WorkerId) -> Fleet:
    """The fleet after some left; links to them may still be listed."""
    return Fleet(workers=tuple(x for x in whole.workers if x.worker not in lost), links=whole.links)


def planned(spec: JobSpec, on: Fleet, previous: Plan | None = None) -> Plan:
    """A plan that must exist."""
    plan = make_balanced_plan(spec, on, previous, 0)
    assert isinstance(plan, Plan), plan
    return plan


def whole_model_bytes(spec: JobSpec) -> int:
    """Memory in which every stage of any cut of `spec` fits at once with one slot."""
    num_layers = len(spec.layers)
    stages = [StageSpec(index=StageIndex(i), first=i, stop=i + 1) for i in range(num_layers)]
    return sum(load.memory_bytes(1) for load in stage_loads(spec, stages))


@st.composite
def jobs(draw: st.DrawFn) -> JobSpec:
    num_layers = draw(st.integers(1, 6))
    num_microbatches = draw(st.integers(1, 12))
    return job(
        stages=draw(st.integers(1, num_layers + 1)),
        replicas=draw(st.integers(1, min(4, num_microbatches))),
        layout=draw(st.sampled_from(Layout)),
        num_layers=num_layers,
        num_microbatches=num_microbatches,
        is_tied=draw(st.booleans()),
    )


def split(spec: JobSpec) -> JobSpec:
    """The same job with split backwards."""
    return spec.model_copy(update={"plan": PlanSpec(method="balanced", backward="split")})


def split_jobs() -> st.SearchStrategy[JobSpec]:
    """Jobs with split backwards."""
    return st.one_of(jobs(), skipping_jobs()).map(split)


@st.composite
def skipping_jobs(draw: st.DrawFn) -> JobSpec:
    """Jobs whose microbatches leave out at least one stage."""
    layout = draw(st.sampled_from(Layout))
    num_fixed = 1 if layout is Layout.LOOP else 2
    stages = draw(st.integers(num_fixed + 2, 7))
    num_visited = draw(st.integers(num_fixed + 1, stages - 1))
    fewest = -(-(stages - num_fixed) // (num_visited - num_fixed))
    num_microbatches = draw(st.integers(fewest, 12))
    return job(
        stages=stages,
        replicas=draw(st.integers(1, min(3, num_microbatches))),
        layout=layout,
        num_layers=7,
        num_microbatches=num_microbatches,
        is_tied=draw(st.booleans()),
        skip_ratio=1 - num_visited / stages,
    )


@st.composite
def fleets(
    draw: st.DrawFn, *, speed_ratio: float = 50.0, memory_bytes: st.SearchStrategy[int] | None = None
) -> Fleet:
    """Up to 12 workers in up to three sites, some of their links measured."""
    size = draw(st.integers(1, 12))
    speeds = draw(st.lists(st.floats(1e9, 1e9 * speed_ratio), min_size=size, max_size=size))
    sizes = draw(
        st.lists(st.just(AMPLE_BYTES) if memory_bytes is None else memory_bytes, min_size=size, max_size=size)
    )
    sites = draw(st.lists(st.sampled_from("abc"), min_size=size, max_size=size))
    name = st.integers(0, size - 1).map(lambda i: f"w{i}")
    links = st.builds(link, name, name, st.floats(1e-4, 0.3), st.floats(1e5, 1e10))
    return fleet(speeds, memory_bytes=sizes, sites=sites, links=draw(st.lists(links, max_size=20)))
