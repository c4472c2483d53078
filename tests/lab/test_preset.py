"""Presets: those that come along, files with mistakes, and the endpoints that follow from them."""

import math
from pathlib import Path

import pytest

from bench.emulated.fleet import ten_cities
from client.lab.preset import (
    PRESETS,
    accesses,
    chosen,
    lay_out,
    link_specs,
    load_preset,
    pairs_between,
    parse_rate,
)
from skein.errors import UserError
from tests.contract.source import ROOT

GOOD = """
source: made up
coordinator: here
sites: {here: {up: 8 Mbit/s}, there: {nat: true}}
same_site: {latency: 1 ms, bandwidth: 1 GiB/s}
links:
  - {between: [here, there], latency: 10 ms, bandwidth: 1 MB/s}
  - {between: [there, here], latency: 30 ms, bandwidth: 2 MB/s, one_way: true}
"""


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_a_link_between_each_two_endpoints_and_a_source(name: str) -> None:
    preset = load_preset(name)
    endpoints = lay_out(preset, 2 * len(preset.sites))
    count = len(endpoints)
    assert len(link_specs(preset, endpoints)) == count * (count - 1)
    assert len({x.address for x in endpoints}) == len({x.name for x in endpoints}) == count
    assert preset.source


def test_ten_cities_have_the_figures_that_benchmarks_use() -> None:
    """Two tables written apart: latency and bandwidth of each pair agree."""
    preset = load_preset("ten-cities")
    endpoints = lay_out(preset, 10)[1:]
    scale, overhead_s, table_bytes = 1.0, 0.35, 4 * 1024 * 1024 * 8
    table = ten_cities(["x:1"] * 10, scale=scale, activation_bytes=table_bytes)
    for (i, j), spec in link_specs(preset, endpoints).items():
        assert spec.latency_s == pytest.approx(table.latency_s[i][j] - overhead_s)
        assert spec.bytes_per_s == pytest.approx(table.bytes_per_s[i][j], rel=1e-6)


def test_homes_share_their_uplink_and_hide() -> None:
    preset = load_preset("home-uplinks")
    endpoints = lay_out(preset, None)
    assert [x.is_behind_nat for x in endpoints] == [False, True, True, True, True]
    assert accesses(preset, endpoints)[1].up_bytes_per_s == 2.5e6
    assert accesses(preset, endpoints)[0].up_bytes_per_s == math.inf


def test_files_say_links_by_direction(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    preset = load_preset(str(path))
    assert (preset.spec("here", "there").latency_s, preset.spec("there", "here").latency_s) == (0.01, 0.03)
    assert preset.spec("here", "here").bytes_per_s == 2**30
    assert [x.name for x in lay_out(preset, 3)] == ["coordinator", "here-1", "there-1", "here-2"]


def test_the_example_of_a_preset_of_one_s_own_is_right() -> None:
    preset = load_preset(str(ROOT / "deploy/lab/three-offices.yaml"))
    assert preset.spec("lisbon", "berlin").bytes_per_s == 12.5e6
    assert preset.spec("cabin", "lisbon").loss == 0.002
    assert [x.is_behind_nat for x in lay_out(preset, 3)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("coordinator: here", "coordinator: nowhere", "no site is called 'nowhere'"),
        ("[here, there], latency", "[here, moon], latency", "no site is called 'moon'"),
        ("1 MB/s", "fast", "links.0.bandwidth: "),
        ("10 ms", "-3", "links.0.latency: "),
        ("source", "sauce", "source: Field required"),
        ("there: {nat: true}", "there: {}, moon: {}", "no link from here to moon"),
        ("there: {nat: true}", "Here: {}", "two sites share a name"),
        (GOOD, "a: [", "is not YAML"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, old: str, new: str, problem: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(UserError, match="--preset") as caught:
        load_preset(str(path))
    assert problem in caught.value.hint


def test_an_unknown_preset_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="ten-cities, two-sites, home-uplinks, or the path"):
        load_preset("eleven-cities")


def test_pairs_are_named_by_site_endpoint_or_all() -> None:
    endpoints = lay_out(load_preset("two-sites"), 4)
    names = [x.name for x in endpoints]
    assert names == ["coordinator", "north-1", "south-1", "north-2", "south-2"]
    assert chosen(endpoints, "A", "north") == (0, 1, 3)
    assert list(pairs_between(endpoints, "north-1", "south", is_one_way=True)) == [(1, 2), (1, 4)]
    assert list(pairs_between(endpoints, "south-1", "north-1", is_one_way=False)) == [(1, 2), (2, 1)]
    assert len(list(pairs_between(endpoints, "south", "all", is_one_way=False))) == 2 + 2 * 2 * 3
    with pytest.raises(UserError, match="B: 'west': give a site or an endpoint: north, south, coordinator"):
        pairs_between(endpoints, "north", "west", is_one_way=False)


@pytest.mark.parametrize("count", [0, -1, 201])
def test_too_few_or_many_workers_are_refused(count: int) -> None:
    with pytest.raises(UserError, match="--workers"):
        lay_out(load_preset("two-sites"), count)


@pytest.mark.parametrize("text", ["0", "fast", "-1 Mbit/s", "1 mile"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not"):
        parse_rate(text)
