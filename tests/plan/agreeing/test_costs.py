"""What aggregation costs: bytes against formulas and against what compressors make, seconds against simple links."""

import math

import numpy as np
import pytest

from client.planning.estimates import Estimate, estimate, estimate_of_job, estimate_of_plan
from skein.config.job import JobSpec
from skein.config.load import parse_job
from skein.plan.agreeing.costs import Circle
from skein.plan.balanced import make_balanced_plan
from skein.plan.plan import Plan
from skein.topology.fleet import Fleet, FleetWorker, Link, Profile
from skein.topology.links import LinkMatrices
from skein.types import SiteId, WorkerId

BILLION = 10**9
GOOD = """
name: costed
model: {family: llama, shape: {num_hidden_layers: 4, tie_word_embeddings: false}}
data: {sources: [{format: text, path: /books}]}
batch: {samples: 32, microbatch_samples: 2}
parallel: {stages: 1, replicas: 8}
budget: {steps: 1000}
"""


def job(*overrides: str) -> JobSpec:
    return parse_job(GOOD, origin="job", overrides=overrides)


def cost_of(
    *overrides: str, size: int = BILLION, workers: int = 8, links: LinkMatrices | None = None
) -> Estimate:
    circle = Circle(num_parameters=size, num_tensors=100, num_workers=workers, links=links)
    return estimate(job(*overrides), [circle], num_workers=workers)


def even_links(num_workers: int, *, latency_s: float, bytes_per_s: float) -> LinkMatrices:
    latency = np.full((num_workers, num_workers), latency_s)
    rate = np.full((num_workers, num_workers), bytes_per_s)
    np.fill_diagonal(latency, 0.0)
    np.fill_diagonal(rate, np.inf)
    return LinkMatrices(
        latency_s=latency, bytes_per_s=rate, crosses_sites=np.zeros_like(rate, dtype=np.bool_)
    )


# --- bytes ---


def test_plain_all_reduce_sends_twice_all_but_its_own_shard() -> None:
    found = cost_of()
    assert found.step_bytes == 2 * 7 / 8 * 4 * BILLION
    assert found.exchanges_per_step == 1
    assert found.ratio == 1


@pytest.mark.parametrize(("wire", "bits"), [("bf16", 16), ("int8", 8 + 32 / 256)])
def test_all_reduce_in_fewer_bits_sends_so_much_less(wire: str, bits: float) -> None:
    # A few elements short of a block in each of 8 shards.
    assert cost_of(f"aggregation.wire={wire}").ratio == pytest.approx(32 / bits, rel=1e-6)


@pytest.mark.parametrize(("wire", "words"), [("bf16", 0.5), ("fp32", 1.0)])
def test_one_bit_rules_send_a_bit_after_the_warm_up(wire: str, words: float) -> None:
    changes = f"aggregation={{rule: one_bit_lamb, warmup_steps: 200, warmup_wire: {wire}}}"
    lamb = cost_of(changes, "optimizer.name=lamb")
    assert lamb.exchange_bytes == 2 * 7 / 8 * (BILLION / 8 + 8 * 4)
    assert lamb.exchanges_per_step == pytest.approx(0.8)
    # Mostly the warm-up: a fifth of the steps in whole or half words, the others in 1 / 32.
    assert lamb.ratio == pytest.approx(1 / (0.2 * words + 0.8 / 32), rel=1e-6)


def test_one_bit_adam_has_a_scale_for_each_tensor_in_each_part() -> None:
    adam = cost_of("aggregation={rule: one_bit_adam, warmup_steps: 200}")
    assert adam.exchange_bytes == 2 * 7 / 8 * (BILLION / 8 + 8 * 4 * 100)


def test_the_schedule_of_the_paper_saves_as_much_as_it_says() -> None:
    changes = (
        "aggregation={rule: one_bit_lamb, warmup_steps: 1000}",
        "optimizer.name=lamb",
        "budget.steps=5993",
    )
    fp16_ratio = cost_of(*changes).ratio / 2
    assert fp16_ratio == pytest.approx(4.57, abs=0.005)


@pytest.mark.parametrize(("local", "every_all"), [(4, 16), (1, 4)])
def test_leaders_are_heard_by_all_others_on_both_periods(local: int, every_all: int) -> None:
    changes = f"{{rule: lsgd, local_every_steps: {local}, global_every_steps: {every_all}}}"
    found = cost_of(f"aggregation={changes}")
    assert found.step_bytes == pytest.approx((1 / local + 1 / every_all) * 7 / 8 * 4 * BILLION)


def test_leaders_of_sites_are_heard_in_their_site_alone() -> None:
    sites = tuple(SiteId(name) for name in "aaabbbcc")
    circle = Circle(num_parameters=1000, num_tensors=1, num_workers=8, sites=sites)
    found = estimate(job("aggregation.rule=lsgd"), [circle], num_workers=8)
    assert found.step_bytes == pytest.approx((5 / 8 / 4 + 7 / 8 / 16) * 4000)


@pytest.mark.parametrize(
    ("graph", "edges_per_worker"),
    [
        ("ring", 2),
        ("measured", 2),
        ("mesh", 20 / 8),
        ("symmetric_exponential", 5),
        ("static_exponential", 3),
        ("one_peer_exponential", 1),
        ("random_matching", 1),
    ],
)
def test_gossip_sends_a_vector_to_each_neighbour(graph: str, edges_per_worker: float) -> None:
    changes = ("optimizer.name=sgd", "aggregation.rule=gossip", f"aggregation.graph={graph}")
    found = cost_of(*changes)
    assert found.step_bytes == pytest.approx(edges_per_worker * 4 * BILLION)


@pytest.mark.parametrize(
    ("changes", "num_numbers"),
    [
        (("optimizer.name=sgd", "aggregation.method=da_dmsgd"), 2 * BILLION),
        (("optimizer.name=adamw",), 2 * BILLION),
        (("optimizer.name=lamb",), 2 * BILLION + 100),
        (("optimizer.name=sgd", "aggregation.every_steps=4"), BILLION / 4),
    ],
)
def test_gossip_sends_what_its_method_and_optimizer_share(
    changes: tuple[str, ...], num_numbers: float
) -> None:
    ring = ("aggregation.rule=gossip", "aggregation.graph=ring")
    assert cost_of(*ring, *changes).step_bytes == pytest.approx(2 * 4 * num_numbers)


@pytest.mark.parametrize(
    ("wire", "bits"), [("fp32", 32), ("bf16", 16), ("int8", 8.125), ("int4", 4.125), ("int2", 2.125)]
)
def test_diloco_sends_once_in_so_many_steps_and_in_so_many_bits(wire: str, bits: float) -> None:
    found = cost_of("aggregation={rule: diloco, local_steps: 100}", f"aggregation.wire={wire}")
    assert found.ratio == pytest.approx(100 * 32 / bits, rel=1e-5)


def test_fragments_send_the_same_bytes_in_smaller_exchanges() -> None:
    whole = cost_of("aggregation={rule: diloco, wire: fp32}")
    cut = cost_of("aggregation={rule: diloco, wire: fp32, fragments: 10}")
    assert cut.step_bytes == pytest.approx(whole.step_bytes)
    assert cut.exchange_bytes == pytest.approx(whole.exchange_bytes / 10)
    assert cut.exchanges_per_step == pytest.approx(10 * whole.exchanges_per_step)


def test_a_stage_with_one_holder_sends_nothing() -> None:
    found = cost_of(workers=1)
    assert (found.step_bytes, found.step_s, found.ratio) == (0, 0, math.inf)
    assert found.words == "all_reduce: nothing to send, every stage has one holder"


# --- seconds ---


def test_seconds_are_those_of_the_pattern_over_even_links() -> None:
    links = even_links(4, latency_s=0.1, bytes_per_s=1e6)
    vector_s = 4 * 10**7 / 1e6
    direct = cost_of("aggregation.pattern=direct", size=10**7, workers=4, links=links)
    ring = cost_of("aggregation.pattern=ring", size=10**7, workers=4, links=links)
    assert direct.step_s == pytest.approx(2 * (0.1 + 3 / 4 * vector_s))
    assert ring.step_s == pytest.approx(2 * 3 * (0.1 + vector_s / 4))


def test_gossip_over_a_ring_takes_two_vectors_and_a_latency() -> None:
    links = even_links(4, latency_s=0.1, bytes_per_s=1e6)
    changes = ("optimizer.name=sgd", "aggregation={rule: gossip, graph: ring, every_steps: 2}")
    found = cost_of(*changes, size=10**6, workers=4, links=links)
    assert found.step_s == pytest.approx((2 * 4 + 0.1) / 2)


def test_rare_exchanges_cost_their_share_of_a_step() -> None:
    links = even_links(4, latency_s=0.0, bytes_per_s=1e6)
    every = cost_of("aggregation.pattern=direct", size=10**7, workers=4, links=links)
    rare = cost_of(
        "aggregation={rule: diloco, wire: fp32, local_steps: 40}", size=10**7, workers=4, links=links
    )
    assert every.step_s is not None
    assert rare.step_s == pytest.approx(every.step_s / 40)


def test_a_combiner_that_compares_whole_vectors_makes_one_worker_wait_for_all() -> None:
    links = even_links(5, latency_s=0.0, bytes_per_s=1e6)
    mean = cost_of("aggregation.pattern=direct", size=10**7, workers=5, links=links)
    krum = cost_of("aggregation.robust.kind=krum", size=10**7, workers=5, links=links)
    assert mean.step_s is not None
    assert krum.step_bytes == mean.step_bytes
    assert krum.step_s == pytest.approx(5 * mean.step_s)


# --- jobs and plans ---


def fleet_of(num_workers: int, *, bytes_per_s: float) -> Fleet:
    names = [WorkerId(f"w{i}") for i in range(num_workers)]
    profile = Profile(device="cpu", device_name="", flops_per_s=1e10, memory_bytes=1 << 32)
    links = [
        Link(sender=a, receiver=b, latency_s=0.0, bytes_per_s=bytes_per_s)
        for a in names
        for b in names
        if a != b
    ]
    workers = tuple(FleetWorker(worker=name, site=SiteId("here"), profile=profile) for name in names)
    return Fleet(workers=workers, links=tuple(links))


@pytest.mark.parametrize("layout", ["line", "loop"])
@pytest.mark.parametrize("is_tied", ["true", "false"])
def test_a_plan_costs_what_its_job_was_expected_to(layout: str, is_tied: str) -> None:
    asked = job(
        f"parallel={{stages: 2, replicas: 3, layout: {layout}}}", f"model.shape.tie_word_embeddings={is_tied}"
    )
    fleet = fleet_of(6, bytes_per_s=1e6)
    plan = make_balanced_plan(asked, fleet, None, seed=0)
    assert isinstance(plan, Plan)
    expected, found = estimate_of_job(asked), estimate_of_plan(asked, fleet, plan)
    assert found.step_bytes == pytest.approx(expected.step_bytes)
    assert found.plain_bytes == pytest.approx(expected.plain_bytes)
    assert found.ratio == expected.ratio == 1
    assert expected.step_s is None
    assert found.step_s is not None
    assert found.step_s > 0
    assert found.words.startswith("all_reduce: each worker sends ")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ((), "all_reduce: each worker sends 6.5 GiB a step, as much as all-reduce in fp32"),
        (
            ("aggregation={rule: diloco, local_steps: 50, wire: int4}",),
            "diloco: each worker sends 17.2 MiB a step (860.5 MiB every 50 steps), "
            "388 times less than all-reduce in fp32",
        ),
        (
            ("aggregation={rule: one_bit_lamb, warmup_steps: 200}", "optimizer.name=lamb"),
            "one_bit_lamb: each worker sends 834.5 MiB a step on average, 208.6 MiB after the warm-up, "
            "8 times less than all-reduce in fp32",
        ),
        (
            ("aggregation={rule: gossip, graph: ring, every_steps: 3}", "optimizer.name=sgd"),
            "gossip (decentlam, ring): each worker sends 2.5 GiB a step (7.5 GiB every 3 steps), "
            "2.62 times less than all-reduce in fp32",
        ),
    ],
)
def test_words_say_what_it_costs_and_against_what(changes: tuple[str, ...], words: str) -> None:
    assert cost_of(*changes).words == words
