"""`skein plan`: what it prints, writes and answers with."""

import importlib.util
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import yaml

from client.cli import run
from client.planning.case import case_of
from client.planning.files.fleetfile import parse_fleet_file
from client.planning.member import member_messages
from client.planning.members import PortfolioStanding
from client.planning.messages import Errand, PlanFound, line_of, message_of
from client.planning.report import Report, SearchEffort, report
from client.planning.text import report_lines
from skein.config.job import JobSpec
from skein.errors import UserError
from skein.plan.balanced import make_balanced_plan
from skein.plan.plan import Plan
from skein.plan.route.evaluate import timeline
from skein.plan.route.portfolio import Portfolio, Role
from skein.plan.searched import make_searched_plan
from skein.units import format_bytes
from tests.support.instances import instance, matrix
from tests.support.plan_files import routing_in
from tests.support.routing_rules import violations

Captured = pytest.CaptureFixture[str]
ROUNDS = ["--rounds", "2", "--budget-s", "60"]

FLEET = """
fleet:
  sites:
    - {name: ayr, latency: 1 ms, bandwidth: 1 GB/s}
    - {name: bonn, latency: 2 ms, bandwidth: 8 Gbit/s}
  workers:
    - {name: a1, site: ayr, flops_per_s: 1.0e+12, memory: 8 GB}
    - {name: a2, site: ayr, flops_per_s: 1.0e+12, memory: 8 GB}
    - {name: b1, site: bonn, flops_per_s: 2.0e+12, memory: 8 GB}
    - {name: b2, site: bonn, flops_per_s: 2.0e+12, memory: 8 GB}
  links:
    - {ends: [ayr, bonn], latency: 50 ms, bandwidth: 20 MB/s}
    - {ends: [a1, b1], latency: 90 ms, bandwidth: 10 MB/s, one_way: true}
job:
  name: small
  model: {family: llama, preset: llama-1m}
  data: {sources: [{format: text, path: books}], sequence_tokens: 64}
  batch: {samples: 8, microbatch_samples: 1}
  parallel: {stages: 2, replicas: 2, layout: loop}
  budget: {steps: 10}
"""


@pytest.fixture
def instance_file(tmp_path: Path) -> Path:
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(instance(sizes=(3, 2, 2), memory=2, waves=2, has_reduction=True)))
    return path


@cache
def reported(text: str, *, seed: int = 0) -> Report:
    """The report on the plan of two rounds, without any process."""
    case = case_of(text, origin="x")
    errand = Errand(role=Role.PLAN, objective=None, seed=seed, num_rounds=2)
    best = [message for message in member_messages(text, errand) if isinstance(message, PlanFound)][-1]
    effort = SearchEffort(seconds=1.0, first_plan_s=0.5, num_moves=10, moves_per_s=20.0, num_processes=1)
    return report(case, PortfolioStanding(portfolio=Portfolio(seeds=(0,))), best, effort)


def test_what_a_job_leaves_open_is_settled_as_a_coordinator_would_and_the_order_is_named() -> None:
    deep = FLEET.replace("preset: llama-1m", "shape: {num_hidden_layers: 8}")
    text = deep.replace("stages: 2, replicas: 2, layout: loop", "stages: 4, chunks: auto").replace(
        "budget:", "plan: {backward: auto, budget_s: 1.0}\n  budget:"
    )
    case = case_of(text, origin="x")
    document = yaml.safe_load(text)
    searched = make_searched_plan(
        JobSpec.model_validate(document["job"]), parse_fleet_file(text, origin="x").fleet, None, 0
    )
    assert isinstance(searched, Plan)
    assert (case.problem.num_stages, case.problem.is_split) == (
        len(searched.stages),
        any(path.split for path in searched.paths),
    )
    assert "chunk" in case.settled
    assert case.settled in str(searched.reason)
    standing = PortfolioStanding(portfolio=Portfolio(seeds=(0,)))
    errand = Errand(role=Role.PLAN, objective=None, num_rounds=1)
    for message in member_messages(text, errand):
        assert message_of(line_of(message)) == message
        standing.take(0, message)
    assert standing.best is not None
    effort = SearchEffort(seconds=1.0, first_plan_s=0.5, num_moves=10, moves_per_s=20.0, num_processes=1)
    found = report(case, standing, standing.best, effort)
    assert [x.seconds for x in found.started] == sorted(x.seconds for x in found.started)
    assert {"gpipe", "zb_h2", "first come, first served"} & {x.name.split(", ")[0] for x in found.started}
    assert found.parts.jittered_mean_s <= found.started[0].seconds
    told = list(report_lines(found, all_paths=False))
    assert f"  {case.settled}" in told
    assert any(x.startswith(f"  began with {found.started[0].name} ") for x in told)


# --- the command ---


def test_a_plan_is_printed_written_and_drawn(instance_file: Path, tmp_path: Path, capsys: Captured) -> None:
    out, plot = tmp_path / "plan.json", tmp_path / "plan.svg"
    command = ["plan", str(instance_file), *ROUNDS, "--out", str(out), "--plot", str(plot)]
    assert run(command) == 0
    text = capsys.readouterr().out
    for part in ("placement", "stage 2", "paths", "lower bound", "critical way", "workers", "links"):
        assert part in text
    problem = case_of(instance_file.read_text(), origin="x").searched
    document = json.loads(out.read_text())
    routing = routing_in(problem, document)
    assert violations(problem, routing) == ()
    assert timeline(problem, routing).makespan_s == document["predicted_s"]
    assert 0 < document["lower_bound_s"] <= document["predicted_s"]
    assert plot.read_text().startswith("<svg ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["instance.json", "plan.json", "plan.svg"]


def test_json_is_one_object_of_what_the_best_of_several_processes_finds(
    instance_file: Path, capsys: Captured
) -> None:
    assert run(["plan", str(instance_file), *ROUNDS, "--json", "--workers", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    [line] = out.splitlines()
    found = json.loads(line)
    alone = [reported(instance_file.read_text(), seed=seed).parts.jittered_mean_s for seed in (0, 1)]
    parts = found["parts"]
    assert parts["jittered_mean_s"] == min(alone)
    assert parts["step_s"] == pytest.approx(parts["makespan_s"] + parts["exposed_s"])


def test_the_ends_of_a_tied_model_cost_the_same_in_every_line_and_that_of_the_plan_shown() -> None:
    four = FLEET.replace("stages: 2, replicas: 2, layout: loop", "stages: 4, replicas: 1, layout: line")
    case, found = case_of(four, origin="x"), reported(four)
    assert case.cost_among is not None
    # Nothing else is summed, and nothing overlaps with it: it begins with the last backward of the first stage.
    assert found.aggregation is not None
    assert found.aggregation.step_s == pytest.approx(found.parts.exposed_s)
    assert found.aggregation == case.cost_among(
        [[case.names.index(name) for name in stage] for stage in found.placement]
    )
    apart_s, together_s = (
        case.cost_among(held).step_s for held in ([[0], [1], [2], [3]], [[0], [2], [3], [1]])
    )
    assert apart_s is not None
    assert together_s is not None
    assert apart_s > 10 * together_s


def test_a_fleet_and_a_job_are_planned_for_the_whole_step() -> None:
    found = reported(FLEET.replace("{name: b1,", "{devices: 2, name: b1,"))
    assert (found.objective, found.num_microbatches) == ("step", 8)
    assert sorted(name for stage in found.placement for name in stage) == ["a1", "a2", "b1", "b2"]
    assert all(0 < (row.held_bytes or 0) <= (row.memory_bytes or 0) for row in found.workers)
    assert [row.num_devices for row in found.workers] == [1, 1, 2, 1]
    mesh = found.workers[2]
    assert 0 < (mesh.device_bytes or 0) < (mesh.held_bytes or 0)
    assert mesh.device_room_bytes == 4 * 10**9
    (told,) = [line for line in report_lines(found, all_paths=False) if "fullest" in line]
    assert "b1: the fullest of its 2 devices holds " in told
    assert told.endswith(f" of {format_bytes(4 * 10**9)}")
    three = reported(FLEET.replace("{name: b1,", "{devices: 3, name: b1,"))
    (told,) = [line for line in report_lines(three, all_paths=False) if "fullest" in line]
    assert told.endswith("; a stage is on 2 of them at most"), "two key-value heads"


def test_what_aggregation_costs_is_told_of_a_fleet_and_of_no_instance() -> None:
    untied = FLEET.replace("preset: llama-1m", "shape: {tie_word_embeddings: false}")
    text = untied.replace("budget:", "aggregation: {rule: all_reduce, wire: int8}\n  budget:")
    cost = reported(text).aggregation
    assert cost is not None
    assert (cost.rule, cost.num_workers) == ("all_reduce", 4)
    # Two replicas, each sends everything once; scales cost 4 of 256 + 4 bytes.
    assert cost.ratio == pytest.approx(4 / (1 + 4 / 256), rel=1e-2)
    assert cost.step_s is not None
    told = list(report_lines(reported(text), all_paths=False))
    assert f"  {cost.words}" == told[told.index("aggregation") + 1]
    bare = reported(json.dumps(instance(sizes=(3, 2, 2), memory=2, waves=2, has_reduction=True)))
    assert bare.aggregation is None
    assert "aggregation" not in list(report_lines(bare, all_paths=False))


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["nowhere.json"], 2, "error: instance: 'nowhere.json': No such file or directory; give an instance (JSON)"),
        (["nowhere.json", "--budget-s", "0"], 2, "error: Invalid value for '--budget-s'"),
        (["nowhere.json", "--out", "no/x.json"], 2, "error: --out: 'no/x.json': give a file in a folder that exists"),
        (["nowhere.json", "--plot", "no/x.svg"], 2, "error: --plot: 'no/x.svg': give a file in a folder that exists"),
    ],
)  # fmt: skip
def test_usage_is_answered_in_one_line(arguments: list[str], code: int, error: str, capsys: Captured) -> None:
    assert run(["plan", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(error)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"n_nodes": 3', "error: x.json line 1 column 14: not JSON: Expecting ',' delimiter: give one JSON object"),
        ('{"n_nodes": 3}', "error: stage_sizes: missing: an instance needs stage_sizes"),
        ("just: words", "error: just: no such key: a fleet file has fleet and job"),
    ],
)  # fmt: skip
def test_a_bad_file_is_a_mistake_of_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, text: str, error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.json").write_text(text)
    assert run(["plan", "x.json"]) == 2
    assert capsys.readouterr() == ("", error + "\n")


def test_what_fits_nowhere_is_one_line_and_exit_code_1(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET.replace("memory: 8 GB", "memory: 1 MB"))
    assert run(["plan", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: stage ")
    assert "of memory and a1 has 976.6 KiB" in err
    assert err.count("\n") == 1


def test_without_the_planners_libraries_it_says_what_to_install(
    instance_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "numba" else object())
    assert run(["plan", str(instance_file)]) == 2
    assert capsys.readouterr().err == (
        "error: plan: 'numba': is not installed: pip install '.[planner]' in Skein's source folder\n"
    )


# --- the report ---


def test_parts_of_the_critical_way_sum_to_what_was_planned_for() -> None:
    parts = reported(json.dumps(instance(sizes=(3, 2, 2), waves=2, has_reduction=True))).parts
    total_s = parts.compute_s + parts.transfer_s + parts.queued_s + parts.reduction_s
    assert total_s == pytest.approx(parts.makespan_s, abs=1e-9)
    assert sum(parts.compute_s_by_worker.values()) == pytest.approx(parts.compute_s, abs=1e-9)


def test_a_questioned_link_keeps_its_cost_and_is_told_with_its_use() -> None:
    comm_s = matrix(7, 0.25, 2.0)
    comm_s[0][3] = comm_s[3][0] = 200.0
    text = json.dumps(instance(sizes=(3, 2, 2), waves=2) | {"comm_s": comm_s})
    assert case_of(text, origin="x").problem.transfer_s[0, 3] == 200.0
    [warning] = [x for x in reported(text).warnings if "link" in x]
    assert warning.startswith("link 0 Ayr - 3 Bonn takes 200 s, 100 times the usual 2 s of links between")
    assert warning.endswith("measure it again; this plan avoids it")


def test_the_step_of_many_walkers_has_no_sum_of_gradients_in_it() -> None:
    text = FLEET.replace("preset: llama-1m", "shape: {tie_word_embeddings: false}")
    walkers = text.replace("budget:", "aggregation: {rule: diloco, local_steps: 5}\n  budget:")
    summed, walked = reported(text), reported(walkers)
    assert summed.parts.exposed_s > 0
    assert walked.parts.exposed_s == 0
    assert any("diloco" in warning for warning in walked.warnings)
    assert walked.aggregation is not None
    assert walked.aggregation.step_s


def test_aggregation_that_was_not_planned_for_is_pointed_out() -> None:
    slow = instance(sizes=(3, 2, 2), waves=2, has_reduction=True) | {"grad_bytes_per_stage": 2**30}
    [warning] = [x for x in reported(json.dumps(slow)).warnings if "aggregation" in x]
    assert "--objective step plans for it" in warning


def test_paths_are_grouped_by_stages_or_listed_one_by_one() -> None:
    told_ = reported(json.dumps(instance(sizes=(3, 2, 2), waves=2)))
    assert sum(row.num_microbatches for row in told_.subsets) == told_.num_microbatches == 12
    short, long = (list(report_lines(told_, all_paths=flag)) for flag in (False, True))
    assert not any("microbatch  11" in line for line in short)
    assert any("microbatch  11" in line for line in long)


def test_text_without_a_bound_says_so() -> None:
    told_ = replace(reported(json.dumps(instance())), bound=None)
    assert any("none yet: raise --budget-s" in line for line in report_lines(told_, all_paths=False))


def test_each_link_carries_what_its_paths_send() -> None:
    told_ = reported(json.dumps(instance(sizes=(3, 2, 2), waves=2) | {"activation_bytes": 10}))
    # LOOP: each of 12 microbatches walks its 2 hops there and back, for the activation and for the gradient.
    assert sum(row.num_tensors for row in told_.links) == 12 * 4
    assert sum(row.tensor_bytes or 0 for row in told_.links) == 12 * 4 * 10


# --- fleet files ---


def test_units_become_si_and_the_nearest_link_counts() -> None:
    given = parse_fleet_file(FLEET, origin="x")
    links = {(str(x.sender), str(x.receiver)): (x.latency_s, x.bytes_per_s) for x in given.fleet.links}
    assert links["a1", "a2"] == (0.001, 1e9)
    assert links["b2", "b1"] == (0.002, 1e9)
    assert links["a2", "b1"] == (0.05, 2e7)
    assert (links["a1", "b1"], links["b1", "a1"]) == ((0.09, 1e7), (0.05, 2e7))
    assert given.num_unknown_links == 0
    assert [worker.profile.memory_bytes for worker in given.fleet.workers] == [8 * 10**9] * 4


def test_links_that_nobody_gives_are_counted_and_told() -> None:
    text = "\n".join(line for line in FLEET.splitlines() if "ends:" not in line).replace(
        "links:", "links: []"
    )
    assert parse_fleet_file(text, origin="x").num_unknown_links == 8
    assert case_of(text, origin="x").remarks == (
        "8 links between workers are not given: each counts as the median of its kind",
    )


def with_times(first: int, stop: int) -> str:
    times = f"stage_times: [{{first: {first}, stop: {stop}, forward: 3 s, backward: 6 s}}]"
    return FLEET.replace("memory: 8 GB}", f"memory: 8 GB, {times}}}", 1)


def test_measured_times_of_a_stage_count_where_the_plan_cuts_there() -> None:
    given = parse_fleet_file(FLEET, origin="x")
    plan = make_balanced_plan(given.job, given.fleet, None, given.job.seed)
    assert isinstance(plan, Plan)
    second = plan.stages[1]
    case = case_of(with_times(second.first, second.stop), origin="x")
    assert case.names[0] == "a1"
    assert (case.problem.forward_s[0, 1], case.problem.backward_s[0, 1]) == (3.0, 6.0)
    assert case.remarks == ()


def test_measured_times_of_other_layers_are_told() -> None:
    [remark] = case_of(with_times(1, 2), origin="x").remarks
    assert remark.startswith("stage times of layers 1 to 2 are not used: stages are layers 0 to ")


def test_a_fleet_may_be_json_too() -> None:
    given = parse_fleet_file(FLEET, origin="x")
    workers = [{"name": name, "site": "s", "flops_per_s": 1.0, "memory": "1 GB"} for name in ("w0", "w1")]
    fleet = {"sites": [{"name": "s", "latency": "1 ms", "bandwidth": "1 GB/s"}], "workers": workers}
    job = {
        "name": "small",
        "model": {"family": "llama", "preset": "llama-1m"},
        "data": {"sources": [{"format": "text", "path": "/b"}], "sequence_tokens": 64},
        "budget": {"steps": 1},
    }
    again = parse_fleet_file(json.dumps({"fleet": fleet, "job": job}), origin="x")
    assert [str(worker.worker) for worker in again.fleet.workers] == ["w0", "w1"]
    assert again.job.model == given.job.model


def test_the_example_of_the_documentation_can_be_planned() -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    case = case_of(example, origin="docs")
    assert case.names == ("l1", "l2", "o1", "o2")
    assert case.problem.path_len == 2
    assert case.remarks == ()


@pytest.mark.parametrize(
    ("before", "after", "error"),
    [
        ("latency: 50 ms", "latency: 50", "fleet.links[0].latency: 50: give text: a duration with its unit"),
        ("20 MB/s", "fast", "fleet.links[0].bandwidth: 'fast': give text: a bandwidth with its unit"),
        ("20 MB/s", "0.0 MB/s", "fleet.links[0].bandwidth: '0.0 MB/s': give text: a bandwidth with its unit, above 0"),
        ("memory: 8 GB", "memory: 0 GB", "fleet.workers[0].memory: '0 GB': give text: a size with its unit, above 0"),
        ("[ayr, bonn]", "[ayr, bern]", "fleet.links[0].ends[1]: 'bern': give one of ayr, bonn, a1, a2, b1, b2"),
        ("name: b1, site: bonn", "name: b1, site: bern", "fleet.workers[2].site: 'bern': give one of ayr, bonn"),
        ("name: a2", "name: a1", "fleet.workers[1].name: 'a1': give each site and worker a name of its own"),
        ("flops_per_s: 1.0e+12", "flops_per_s: 0", "fleet.workers[0].flops_per_s: 0: give a number above 0"),
        ("one_way: true", "oneway: true", "fleet.links[1].oneway: true: no such key: did you mean"),
        ("steps: 10", "steps: 0", "job.budget.steps: 0: give a whole number from 1 "),
        ("job:", "jobs:", "jobs: no such key: a fleet file has fleet and job"),
    ],
)  # fmt: skip
def test_mistakes_in_a_fleet_file_name_the_field(before: str, after: str, error: str) -> None:
    assert before in FLEET
    with pytest.raises(UserError) as caught:
        parse_fleet_file(FLEET.replace(before, after, 1), origin="x")
    assert str(caught.value).startswith(error)
