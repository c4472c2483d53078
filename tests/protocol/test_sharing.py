"""The rule by which jobs share workers."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from skein.protocol.coordinator.scheduling.sharing import (
    KEEP_S,
    JobAsk,
    NamespaceLimits,
    WorkerStand,
    share,
)
from skein.types import JobId, WorkerId

EIGHT = tuple(WorkerId(f"w{i}") for i in range(8))


def ask(
    job: str,
    number: int = 0,
    *,
    least: int = 2,
    useful: int = 4,
    most: float = inf,
    priority: int = 0,
    namespace: str = "default",
    used_s: float = 0.0,
    waited_s: float = 0.0,
    is_active: bool = False,
    may_use: Iterable[WorkerId] = EIGHT,
    needs: int = 0,
    limits: NamespaceLimits | None = None,
) -> JobAsk:
    return JobAsk(
        job=JobId(job),
        number=number,
        namespace=namespace,
        limits=limits or NamespaceLimits(),
        priority=priority,
        used_s=used_s,
        waited_s=waited_s,
        is_active=is_active,
        num_least=least,
        num_useful=useful,
        num_most=most,
        may_use=frozenset(may_use),
        fits=lambda workers: len(workers) >= needs,
    )


def stands(owners: Mapping[str, str], workers: Iterable[WorkerId] = EIGHT) -> list[WorkerStand]:
    """All workers, those of an owner in its plan."""
    return [
        WorkerStand(
            worker=w, owner=JobId(owners[w]) if w in owners else None, place=0 if w in owners else inf
        )
        for w in workers
    ]


def held(job: str, *numbers: int) -> dict[str, str]:
    return {f"w{number}": job for number in numbers}


def counts(asks: list[JobAsk], of: list[WorkerStand]) -> dict[str, int]:
    shares = share(asks, of)
    return {one.job: len(shares.of(one.job)) for one in asks}


def test_one_job_has_all_workers() -> None:
    assert counts([ask("a")], stands({})) == {"a": 8}


def test_a_second_job_starts_on_workers_that_no_plan_uses() -> None:
    alone = [*stands(held("a", 0, 1, 2, 3), EIGHT[:4]), *stands({}, EIGHT[4:])]
    shares = share([ask("a", is_active=True), ask("b", 1)], alone)
    assert shares.of(JobId("a")) == set(EIGHT[:4])
    assert shares.of(JobId("b")) == set(EIGHT[4:])


def test_equals_share_what_is_there_and_nobody_is_shrunk_below_its_gang() -> None:
    whole = stands(held("a", *range(8)))
    assert counts([ask("a", useful=8, is_active=True), ask("b", 1, useful=8)], whole) == {"a": 4, "b": 4}
    a = ask("a", least=7, useful=8, is_active=True)
    shares = share([a, ask("b", 1)], whole)
    assert len(shares.of(JobId("a"))) == 8
    assert shares.without == {"b"}


def test_a_gang_that_does_not_fit_waits_and_who_comes_after_does_not() -> None:
    asks = [ask("a", is_active=True), ask("big", 1, needs=9), ask("c", 2)]
    shares = share(asks, stands(held("a", *range(8))))
    assert shares.without == {"big"}
    assert len(shares.of(JobId("c"))) == 4


def test_a_gang_grows_until_a_plan_exists() -> None:
    assert counts([ask("a", useful=2, needs=5), ask("b", 1, useful=2)], stands({}))["a"] >= 5


def test_a_gang_is_made_of_workers_with_memory_where_those_that_cost_less_have_too_little() -> None:
    workers = [WorkerStand(worker=w, owner=None, memory_bytes=int(w in EIGHT[5:])) for w in EIGHT]
    large = replace(ask("a", useful=2, most=2), fits=lambda gang: len(gang & set(EIGHT[5:])) >= 2)
    shares = share([large, ask("b", 1)], workers)
    assert shares.of(large.job) == set(EIGHT[5:7])
    again = [replace(x, owner=large.job if x.worker in EIGHT[5:7] else None) for x in workers]
    assert share([replace(large, is_active=True), ask("b", 1)], again).of(large.job) == set(EIGHT[5:7])


def test_a_higher_priority_takes_what_its_plan_uses_and_leaves_a_gang() -> None:
    low = ask("low", useful=8, is_active=True)
    high = ask("high", 1, useful=8, priority=1)
    assert counts([low, high], stands(held("low", *range(8)))) == {"low": 2, "high": 6}


def test_a_job_of_a_lower_priority_gives_way_entirely_where_there_is_no_room_for_both() -> None:
    low = ask("low", least=4, useful=8, is_active=True)
    high = ask("high", 1, least=6, useful=6, priority=1)
    shares = share([low, high], stands(held("low", *range(8))))
    assert shares.without == {"low"}
    assert shares.of(JobId("low")) == set()
    assert len(shares.of(JobId("high"))) == 8


def test_a_job_of_a_lower_priority_shrinks_nobody_above_it() -> None:
    high = ask("high", useful=8, priority=1, is_active=True)
    shares = share([high, ask("low", 1)], stands(held("high", *range(8))))
    assert shares.without == {"low"}


def test_namespaces_share_evenly_however_many_jobs_they_have() -> None:
    asks = [
        ask("a1", 0, namespace="a", useful=8, least=1),
        ask("a2", 1, namespace="a", useful=8, least=1),
        ask("b1", 2, namespace="b", useful=8, least=1),
    ]
    assert counts(asks, stands({})) == {"a1": 2, "a2": 2, "b1": 4}


def test_of_those_that_wait_the_namespace_that_has_used_less_comes_first() -> None:
    asks = [ask("a", 0, least=5, used_s=9.0, namespace="a"), ask("b", 1, least=5, namespace="b")]
    assert share(asks, stands({})).without == {"a"}


def test_a_gang_is_made_of_workers_that_are_free_rather_than_of_those_that_were_called_for_it() -> None:
    a, b = JobId("a"), JobId("b")
    called = [WorkerStand(worker=worker, owner=a, bound_for=b) for worker in EIGHT[:2]]
    others = stands(held("a", 2, 3), EIGHT[2:])
    shares = share([ask("a", useful=2, is_active=True), ask("b", 1, useful=2)], [*called, *others])
    assert shares.of(b).isdisjoint(EIGHT[:4])


def test_of_workers_that_are_taken_those_that_were_called_already_go() -> None:
    a, b = JobId("a"), JobId("b")
    called = [WorkerStand(worker=worker, owner=a, place=0, bound_for=b) for worker in EIGHT[6:]]
    others = stands(held("a", *range(6)), EIGHT[:6])
    shares = share([ask("a", useful=8, is_active=True), ask("b", 1, useful=2)], [*called, *others])
    assert shares.of(b) == set(EIGHT[6:])


def rounds_until_start(*, wait_s: float, namespace: str = "default") -> int | None:
    """Rounds for which a large job waits, where each ends one of four small ones and brings another; None: over 50.

    It has waited for `wait_s` before.
    """
    owners = {f"w{i}": f"s{i // 2}" for i in range(8)}
    for end in range(50):
        owners = {worker: job for worker, job in owners.items() if job != f"s{end}"}
        active = [ask(job, int(job[1:]), useful=2, is_active=True) for job in sorted(set(owners.values()))]
        small = [ask(f"s{end + 4}", end + 100, useful=2, namespace=namespace)]
        large = ask("large", 50, least=6, useful=8, waited_s=wait_s, used_s=9.0)
        shares = share([*active, *small, large], stands(owners))
        if shares.of(large.job):
            return end
        owners = {worker: job for worker, job in shares.by_worker.items() if job is not None}
    return None


def test_a_large_job_starts_once_it_has_waited_for_long_however_many_small_ones_keep_coming() -> None:
    assert rounds_until_start(wait_s=KEEP_S / 2) is None
    assert rounds_until_start(wait_s=KEEP_S) == 2
    # Nor do namespaces that have used less come before it for ever.
    assert rounds_until_start(wait_s=KEEP_S, namespace="new") == 2


def test_what_is_kept_for_a_job_is_used_by_those_that_work_and_nobody_is_shrunk_below_its_gang() -> None:
    a, large = ask("a", useful=4, is_active=True), ask("large", 1, least=7, waited_s=KEEP_S)
    shares = share([a, large, ask("b", 2)], stands(held("a", 0, 1)))
    assert shares.without == {"large", "b"}
    assert len(shares.of(JobId("a"))) >= 4
    assert shares.kept_for == dict.fromkeys(EIGHT[2:], "large")


def test_nothing_is_kept_for_a_job_that_waits_for_more_than_the_end_of_its_equals() -> None:
    above = ask("above", least=4, useful=4, priority=1, is_active=True)
    for large in (ask("large", 1, needs=9, waited_s=KEEP_S), ask("large", 1, least=6, waited_s=KEEP_S)):
        shares = share([above, large, ask("b", 2)], stands(held("above", 0, 1, 2, 3)))
        assert shares.without == {"large"}
        assert shares.kept_for == {}


def test_the_job_that_has_waited_longest_has_the_next_workers_and_a_higher_priority_comes_before() -> None:
    working = ask("a", least=4, useful=4, is_active=True)
    first, second = ask("first", 2, least=6, waited_s=2 * KEEP_S), ask("second", 1, waited_s=KEEP_S)
    shares = share([working, second, first], stands(held("a", 0, 1, 2, 3)))
    assert shares.without == {"first", "second"}
    above = ask("above", 3, useful=2, priority=1)
    assert share([working, second, first, above], stands(held("a", 0, 1, 2, 3))).of(above.job)


def test_sites_and_most_workers_are_kept_to() -> None:
    asks = [ask("a", may_use=EIGHT[:3]), ask("b", 1, most=2)]
    shares = share(asks, stands({}))
    assert shares.of(JobId("a")) <= set(EIGHT[:3])
    assert len(shares.of(JobId("b"))) == 2
    assert sum(owner is None for owner in shares.by_worker.values()) == 3


def test_jobs_of_a_namespace_have_no_more_workers_than_its_limit() -> None:
    five = NamespaceLimits(num_workers=5)
    asks = [
        ask("a", useful=8, limits=five),
        ask("b", 1, useful=8, limits=five),
        ask("c", 2, namespace="mill"),
    ]
    shares = share(asks, stands({}))
    assert {job: len(shares.of(JobId(job))) for job in "abc"} == {"a": 2, "b": 2, "c": 4}
    assert counts(asks[:2], stands({})) == {"a": 3, "b": 2}


def test_a_job_above_its_namespaces_limits_waits_and_others_do_not() -> None:
    for limits in (NamespaceLimits(num_jobs=1), NamespaceLimits(num_workers=3)):
        asks = [
            ask("a", limits=limits, is_active=True),
            ask("b", 1, limits=limits),
            ask("c", 2, namespace="mill"),
        ]
        shares = share(asks, stands(held("a", 0, 1)))
        assert shares.limited == shares.without == {"b"}
        assert len(shares.of(JobId("c"))) >= 2


def test_a_job_that_fits_on_no_workers_is_not_said_to_be_limited() -> None:
    four = NamespaceLimits(num_workers=4)
    assert share([ask("a", limits=four, needs=9)], stands({})).limited == frozenset()
    assert share([ask("a", limits=four, needs=5)], stands({})).limited == {"a"}


def test_whoever_has_more_than_a_limit_that_came_down_is_called_away() -> None:
    limits = NamespaceLimits(num_workers=2, num_jobs=1)
    asks = [ask("a", limits=limits, is_active=True), ask("b", 1, limits=limits, is_active=True)]
    shares = share(asks, stands(held("a", 0, 1, 2) | held("b", 3, 4, 5)))
    assert (len(shares.of(JobId("a"))), len(shares.of(JobId("b")))) == (2, 0)
    assert shares.limited == {"b"}


def test_a_higher_priority_takes_the_place_of_another_in_their_namespaces_limit() -> None:
    one = NamespaceLimits(num_jobs=1)
    asks = [ask("low", limits=one, is_active=True), ask("high", 1, limits=one, priority=1)]
    shares = share(asks, stands(held("low", 0, 1)))
    assert shares.limited == {"low"}
    assert not shares.of(JobId("low"))


ASKS = st.lists(
    st.builds(
        lambda least, extra, most, priority, space, needs, waited_s: (
            least,
            least + extra,
            most,
            priority,
            space,
            needs,
            waited_s,
        ),
        st.integers(1, 4),
        st.integers(0, 4),
        st.integers(4, 8),
        st.integers(0, 1),
        st.sampled_from("xy"),
        st.integers(0, 5),
        st.sampled_from((0.0, KEEP_S, 2 * KEEP_S)),
    ),
    min_size=1,
    max_size=4,
)


LIMITS = st.builds(
    lambda workers, jobs: NamespaceLimits(num_workers=workers, num_jobs=jobs),
    st.sampled_from([2, 4, 7, inf]),
    st.sampled_from([1, 2, inf]),
)


@given(ASKS, st.lists(st.integers(0, 4), min_size=8, max_size=8), LIMITS)
def test_what_was_shared_out_is_shared_out_so_again(
    drawn: list[tuple[int, int, int, int, str, int, float]], owners: list[int], limits: NamespaceLimits
) -> None:
    """Nobody has less than its gang or more than its most, and once everybody is there nobody is moved any more."""
    by_worker = {f"w{i}": f"j{owner}" for i, owner in enumerate(owners) if owner < len(drawn)}
    for _ in range(3):
        active = set(by_worker.values())
        asks = [
            ask(
                f"j{i}",
                i,
                least=a,
                useful=b,
                most=c,
                priority=p,
                namespace=s,
                needs=n,
                waited_s=t,
                limits=limits,
                is_active=f"j{i}" in active,
            )
            for i, (a, b, c, p, s, n, t) in enumerate(drawn)
        ]
        shares = share(asks, stands(by_worker))
        for one in asks:
            given_ = shares.of(one.job)
            assert len(given_) <= one.num_most
            assert one.job in shares.without or (len(given_) >= one.num_least and one.fits(given_))
        for space in "xy":
            crews = [len(shares.of(one.job)) for one in asks if one.namespace == space]
            assert sum(crews) <= limits.num_workers
            assert (
                sum(one.job not in shares.without for one in asks if one.namespace == space)
                <= limits.num_jobs
            )
        before, by_worker = by_worker, {w: j for w, j in shares.by_worker.items() if j is not None}
    assert by_worker == before
