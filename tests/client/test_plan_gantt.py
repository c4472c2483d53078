"""The chart shows every op where the timeline has it, and is sound SVG whatever workers are called."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest

from client.planning.files.instance import problem_of
from client.planning.gantt import gantt_svg
from skein.plan.route.evaluate import timeline
from skein.plan.route.problem import Problem, Routing, Timeline
from skein.plan.route.search import Search
from tests.support.instances import instance

SVG = "{http://www.w3.org/2000/svg}"
BOX = re.compile(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-([\d.]+)z")


def planned(
    sizes: tuple[int, ...] = (2, 2, 2), *, waves: int = 1, memory: int = 2, path_len: int = 2
) -> tuple[Problem, Routing, Timeline]:
    made = instance(sizes=sizes, path_len=path_len, memory=memory, waves=waves, has_reduction=True)
    problem = problem_of(made)
    search = Search(problem, seed=0)
    search.begin()
    assert search.best is not None
    return problem, search.best.routing, timeline(problem, search.best.routing)


def drawn(problem: Problem, routing: Routing, times: Timeline) -> ElementTree.Element:
    names = [f"worker {i}" for i in range(problem.num_workers)]
    return ElementTree.fromstring(gantt_svg(problem, routing, times, names))


def boxes(group: ElementTree.Element) -> list[tuple[float, float, float]]:
    """x, y and width of all ops in the group of a microbatch: forwards, loss, backwards."""
    ways = [path.get("d", "") for path in group.findall(f"{SVG}path")][1:]
    return [(float(x), float(y), float(w)) for way in ways for x, y, w, _, _ in BOX.findall(way)]


def test_every_op_of_every_microbatch_is_drawn_to_scale() -> None:
    problem, routing, times = planned()
    groups = drawn(problem, routing, times).findall(f"{SVG}g")
    assert len(groups) == problem.num_microbatches
    all_boxes = [box for group in groups for box in boxes(group)]
    widths = [w for _, _, w in all_boxes]
    assert len(all_boxes) == times.begin_s.size
    # Forward 1 s, loss 0.25 s, backward 1.5 s, to a tenth of a pixel.
    pixels_per_s = widths[0]
    assert sorted(set(widths)) == pytest.approx(
        [0.25 * pixels_per_s, pixels_per_s, 1.5 * pixels_per_s], abs=0.1
    )
    begins = sorted(x for x, _, _ in all_boxes)
    expected = np.sort(times.begin_s.ravel()) * pixels_per_s + begins[0]
    # The scale was read off a box that is rounded to a tenth of a pixel, so it is off by as much for each second.
    assert begins == pytest.approx(expected.tolist(), abs=0.1 + 0.05 * times.step_s)


def test_ops_lie_on_the_row_of_their_chunk_and_rows_do_not_overlap() -> None:
    problem, routing, times = planned()
    groups = drawn(problem, routing, times).findall(f"{SVG}g")
    rows = sorted({y for group in groups for _, y, _ in boxes(group)})
    assert len(rows) == problem.num_chunks
    for microbatch, group in enumerate(groups):
        visited = [rows.index(y) for _, y, _ in boxes(group)]
        chunks = routing.path[microbatch].tolist()
        assert visited == [chunks[0], chunks[1], chunks[0], chunks[1], chunks[0]]


def test_transfers_join_ops_of_different_workers() -> None:
    problem, routing, times = planned()
    for group in drawn(problem, routing, times).findall(f"{SVG}g"):
        ways = group.findall(f"{SVG}path")[0].get("d", "")
        assert len(re.findall("M", ways)) == 4


def test_aggregation_is_a_bar_on_each_holder_and_named() -> None:
    problem, routing, times = planned()
    bars = [x for x in drawn(problem, routing, times).iter(f"{SVG}path") if x.get("class") == "r"]
    assert [len(BOX.findall(bar.get("d", ""))) for bar in bars] == list(problem.stage_sizes)
    assert [bar.findtext(f"{SVG}title", "").split(":")[0] for bar in bars] == [
        f"aggregation of stage {stage}" for stage in range(3)
    ]


def test_without_aggregation_no_bar_is_drawn() -> None:
    problem, routing, _ = planned()
    bare = replace(problem, reduction=None)
    bars = [
        x for x in drawn(bare, routing, timeline(bare, routing)).iter(f"{SVG}path") if x.get("class") == "r"
    ]
    assert bars == []


def test_the_picture_says_in_words_what_it_shows() -> None:
    problem, routing, times = planned()
    root = drawn(problem, routing, times)
    assert root.get("role") == "img"
    labels = (root.get("aria-labelledby") or "").split()
    texts = {element.get("id"): element.text or "" for element in root.iter() if element.get("id") in labels}
    assert texts["title"] == f"small: one step in {times.step_s:.4g} s"
    assert "4 microbatches on 6 workers in 3 stages" in texts["desc"]
    shown = {element.text for element in root.iter(f"{SVG}text")}
    assert {"forward", "backward", "loss", "aggregation", "stage 0", "worker 5"} <= shown


@pytest.mark.parametrize("name", ['<script>alert("&")</script>', "a" * 500, "tab\tand\x00null", "日本", ""])
def test_any_name_is_text_and_never_markup(name: str) -> None:
    problem, routing, times = planned()
    problem = replace(problem, name=name)
    text = gantt_svg(problem, routing, times, [name] * problem.num_workers)
    root = ElementTree.fromstring(text)
    assert not list(root.iter(f"{SVG}script"))
    shown = [element.text or "" for element in root.iter(f"{SVG}text") if element.get("class") == "e"]
    assert len(shown) == problem.num_workers
    assert all(len(word) <= 24 for word in shown)
    assert shown[0][:8] == "".join(sign if sign.isprintable() else "?" for sign in name)[:8]


def test_twenty_workers_and_thirty_microbatches_stay_small() -> None:
    problem, routing, times = planned((5, 3, 3, 3, 3, 3), waves=2, memory=3, path_len=4)
    assert problem.num_microbatches == 30
    names = [f"{i} some-city" for i in range(20)]
    assert len(gantt_svg(problem, routing, times, names).encode()) < 60_000


def test_a_hundred_workers_stay_below_the_limit_of_the_documentation() -> None:
    problem, routing, times = planned((25, 15, 15, 15, 15, 15), waves=2, memory=3, path_len=4)
    names = [f"{i} some-city" for i in range(100)]
    text = gantt_svg(problem, routing, times, names)
    assert len(text.encode()) <= 150_000
    assert len(ElementTree.fromstring(text).findall(f"{SVG}g")) == 150


def test_input_and_weight_gradients_and_what_shards_do_are_told_apart() -> None:
    problem = replace(planned()[0], is_split=True)
    search = Search(problem, seed=0)
    search.begin()
    assert search.best is not None
    routing = search.best.routing
    times, names = timeline(problem, routing), [str(i) for i in range(problem.num_workers)]
    plain, sharded = (gantt_svg(problem, routing, times, names, shards) for shards in ((), (1,)))
    words = ("input gradient", "weight gradient", "loss")
    assert all(f">{x}</text>" in text for x in words for text in (plain, sharded))
    assert "shard of the vocabulary" not in plain
    assert "of a shard of the vocabulary" in sharded
    # Forward, loss, input gradient and weight gradient of a microbatch: by tone, and by their frames.
    first = ElementTree.fromstring(plain).findall(f"{SVG}g")[0].findall(f"{SVG}path")[1:]
    looks = {(path.get("class"), path.get("fill")) for path in first}
    assert len(looks) == len(first) == 4
    of_shards = [x for x in ElementTree.fromstring(sharded).iter(f"{SVG}path") if x.get("class") == "v"]
    visits = sum(int(problem.stage_of[chunk] == 1) for chunk in routing.path[:, : problem.num_hops].ravel())
    # A forward, an input op and a weight op at each.
    assert sum(len(BOX.findall(x.get("d", ""))) for x in of_shards) == 3 * visits
