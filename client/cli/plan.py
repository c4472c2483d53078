"""`skein plan`: plans for instance files and fleets, judged and explained."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from client.cli import DONE, INTERRUPTED
from client.given import read_text
from client.planning.hunt import Hunted, Order, began_s, hunt
from client.planning.members import PortfolioStanding
from client.planning.messages import SEARCH, NoPlan, Objective, PlanFound
from skein.errors import UserError

if TYPE_CHECKING:
    from client.planning.case import KnownProblem
    from client.planning.report import Report

_LINE_S = 10.0
"""Between two lines about progress where there is no terminal."""
_REDRAW_S = 0.25


@click.command
@click.argument("instance", type=click.Path(path_type=Path, allow_dash=True))
@click.option(
    "--budget-s",
    type=click.FloatRange(min=0, min_open=True, max=86_400),
    default=10.0,
    show_default=True,
    help="Seconds for the whole command, start to end.",
)
@click.option("--seed", type=click.IntRange(0, 2**31), default=0, show_default=True, help="Of all draws.")
@click.option(
    "--workers",
    "num_processes",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Processes that search at once, each with a seed of its own.",
)
@click.option(
    "--rounds",
    "num_rounds",
    type=click.IntRange(0, 1_000_000),
    help="Search so many rounds instead of until the time is up: repeats exactly.",
)
@click.option(
    "--objective",
    type=click.Choice([x.value for x in Objective]),
    help="Make the whole step short, or the time until its last backward. "
    "Default: makespan for an instance, step for a fleet.",
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the plan as JSON.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the step as SVG.")
@click.option("--paths", "all_paths", is_flag=True, help="List every microbatch's path.")
@click.option(
    "--json", "is_json", is_flag=True, help="Print JSON."
)  # not the shared one: its module imports the network
def plan(
    instance: Path,
    *,
    budget_s: float,
    seed: int,
    num_processes: int,
    num_rounds: int | None,
    objective: str | None,
    out: Path | None,
    plot: Path | None,
    all_paths: bool,
    is_json: bool,
) -> int:
    """Plan one training step for INSTANCE: a JSON instance, or YAML with a fleet and a job; `-` is standard input.

    Ctrl-C ends the search; the best plan so far is printed and written all the same.
    """
    order = Order(
        objective=None if objective is None else Objective(objective),
        seed=seed,
        num_processes=num_processes,
        budget_s=budget_s,
        num_rounds=num_rounds,
        began_s=began_s(),
    )
    _check_writable(out, "--out")
    _check_writable(plot, "--plot")
    progress = _Progress(order.began_s, is_quiet=is_json)
    saved: list[PlanFound] = []

    def on_news(case: "KnownProblem", standing: PortfolioStanding, has_changed: bool) -> None:
        progress.show(standing, has_changed=has_changed)
        if standing.best is None or [standing.best] == saved[-1:]:
            return
        if out is not None:
            _save(out, case, standing, standing.best)
        if not saved:
            # Loads what the report needs while there is nothing else to do.
            _reported(case, standing, order)
        saved.append(standing.best)

    text = read_text("instance", instance, hint="give an instance (JSON) or a fleet and a job (YAML)")
    hunted = hunt(text, str(instance), order, on_news=on_news)
    progress.clear()
    if hunted.is_interrupted and hunted.standing.best is None:
        raise click.Abort
    _tell(hunted, order, out=out, plot=plot, all_paths=all_paths, is_json=is_json)
    return INTERRUPTED if hunted.is_interrupted else DONE


def _tell(
    hunted: Hunted, order: Order, *, out: Path | None, plot: Path | None, all_paths: bool, is_json: bool
) -> None:
    """Prints the report and writes the files."""
    from client.cli.tables import print_json
    from client.planning.text import report_lines

    case, standing = hunted.case, hunted.standing
    told, best = _reported(case, standing, order), best_so_far(standing, order)
    if out is not None:
        _save(out, case, standing, best)
    if plot is not None:
        _write(plot, _drawn(case, best))
    if is_json:
        print_json(told)
    else:
        click.echo("\n".join(report_lines(told, all_paths=all_paths)))


def _reported(case: "KnownProblem", standing: PortfolioStanding, order: Order) -> "Report":
    from client.planning.report import SearchEffort, report

    spent_s = time.monotonic() - order.began_s
    effort = SearchEffort(
        seconds=spent_s,
        first_plan_s=standing.first_plan_s,
        num_moves=standing.num_moves,
        moves_per_s=standing.num_moves / max(1e-9, spent_s - (standing.first_plan_s or 0.0)),
        num_processes=order.num_processes,
    )
    return report(case, standing, best_so_far(standing, order), effort)


def best_so_far(standing: PortfolioStanding, order: Order) -> PlanFound:
    """The best plan.

    Raises:
        NoPlan: there is none; the text says why.
    """
    if standing.best is not None:
        return standing.best
    reasons = [*standing.refused, *standing.losses]
    if reasons:
        raise NoPlan(reasons[0])
    started = f"{standing.started_s:.1f} of {order.budget_s:g} s went by before the search began"
    raise NoPlan(f"no plan was found in time, {started}: raise --budget-s, or ask again when less runs here")


def _drawn(case: "KnownProblem", best: PlanFound) -> str:
    from client.planning.gantt import gantt_svg
    from skein.plan.route.evaluate import timeline

    times = timeline(case.problem, best.routing)
    return gantt_svg(case.problem, best.routing, times, case.names, case.shards)


def _save(out: Path, case: "KnownProblem", standing: PortfolioStanding, best: PlanFound) -> None:
    from client.planning.files.document import plan_document

    bound_s = None if standing.bound is None else min(standing.bound.seconds, best.step_s)
    document = plan_document(
        case.problem,
        best.routing,
        predicted_s=best.step_s,
        lower_bound_s=bound_s,
    )
    document |= {"objective": case.objective.value, "method": SEARCH, "seed": best.seed}
    _write(out, json.dumps(document) + "\n")


def _check_writable(path: Path | None, option: str) -> None:
    """Refuses at once what could not be written after the search.

    Raises:
        UserError: there is no such folder, or nothing may be written there.
    """
    if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise UserError(option, str(path), "give a file in a folder that exists and may be written to")


def _write(path: Path, text: str) -> None:
    """Whole or not at all: who reads it meanwhile, or ends us, finds the version before.

    Raises:
        OSError: it cannot be written; names `path`.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        beside.unlink(missing_ok=True)


class _Progress:
    """Standing of a search, on standard error: one line redrawn on a terminal, a line now and then elsewhere."""

    def __init__(self, began_s: float, *, is_quiet: bool, now: Callable[[], float] = time.monotonic) -> None:
        self._began_s = began_s
        self._now = now
        self._is_terminal = sys.stderr.isatty()
        self._is_quiet = is_quiet and not self._is_terminal
        self._told_at_s = -float("inf")
        self._has_plan = False
        self._has_explained = False
        self._width = 0

    def show(self, standing: PortfolioStanding, *, has_changed: bool) -> None:
        """Told now and then."""
        if standing.is_compiling and not self._has_explained:
            self._has_explained = True
            print(
                "compiling the search, once after an installation: about a minute",
                file=sys.stderr,
                flush=True,
            )
        if self._is_quiet or standing.best is None:
            return
        is_first, self._has_plan = not self._has_plan, True
        since_s = self._now() - self._told_at_s
        if self._is_terminal:
            if is_first or since_s >= _REDRAW_S:
                self._draw(self._words(standing))
        elif is_first or (has_changed and since_s >= _LINE_S):
            print(self._words(standing), file=sys.stderr, flush=True)
            self._told_at_s = self._now()

    def clear(self) -> None:
        """Leaves an empty line where progress was drawn."""
        if self._width:
            print("\r" + " " * self._width + "\r", end="", file=sys.stderr, flush=True)

    def _words(self, standing: PortfolioStanding) -> str:
        assert standing.best is not None
        spent_s = self._now() - self._began_s
        words = f"after {spent_s:.1f} s: best {standing.best.jittered_s:.4g} s"
        if standing.bound is not None and standing.bound.seconds > 0:
            words += f", at most {standing.best.step_s / standing.bound.seconds - 1:.1%} above any".replace(
                "%", " %"
            )
        return f"{words}, {standing.num_moves:,} routings, {standing.num_moves / max(spent_s, 1e-9):,.0f}/s"

    def _draw(self, words: str) -> None:
        print("\r" + words.ljust(self._width), end="", file=sys.stderr, flush=True)
        self._width = max(self._width, len(words))
        self._told_at_s = self._now()
