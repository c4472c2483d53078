"""`skein sweep`: the trials of a job, and which of them is the best."""

import json

import click

from client.cli.options import connect_client, remote_command
from client.cli.tables import number, print_listed, steps_text
from skein.config.job import ArrayJob, read_spec
from skein.errors import UserError
from skein.protocol.messages.array_rounds import PassKind
from skein.wire.views import ChoiceStatus, TrialStatus

COLUMNS = ("TRIAL", "STATE", "STEP", "LOSS", "VALIDATION", "WORKER", "ARRAY", "PASS", "SETTINGS", "REASON")
_CHOSEN_AT = COLUMNS.index("SETTINGS")
_NONE = "-"


@remote_command
@click.argument("job")
def sweep(job: str, *, is_json: bool) -> None:
    """List the trials of JOB with their settings, state, losses, worker and array. The best one is marked by a star."""
    with connect_client() as client:
        found = client.job(job).status()
    if not found.trials:
        is_array = isinstance(read_spec(found.spec), ArrayJob)
        hint = (
            "is an array: give its sweep" if is_array else "is no sweep: its file has none; see skein status"
        )
        raise UserError("job", job, hint)
    if any(trial.choice for trial in found.trials):
        columns = (*COLUMNS[:_CHOSEN_AT], "CHOSEN", *COLUMNS[_CHOSEN_AT:])
        print_listed(found.trials, columns, _chosen_row, nothing="", is_json=is_json)
    else:
        print_listed(found.trials, COLUMNS, _row, nothing="", is_json=is_json)


def _chosen_row(status: TrialStatus) -> tuple[str, ...]:
    row = _row(status)
    return (*row[:_CHOSEN_AT], chosen_text(status.choice), *row[_CHOSEN_AT:])


def _row(status: TrialStatus) -> tuple[str, ...]:
    return (
        f"{status.trial}{'*' if status.is_best else ''}",
        status.state,
        f"{status.num_steps}/{steps_text(status.num_steps_wanted)}",
        number(status.loss),
        number(status.evaluation_loss),
        ",".join(status.workers) or _NONE,
        status.array or _NONE,
        pass_text(status),
        settings_text(status.settings),
        status.reason or _NONE,
    )


def pass_text(status: TrialStatus) -> str:
    """Way of a trial through its model, and how much faster than one after the other that is.

    >>> from skein.types import JobState
    >>> from skein.protocol.messages.array_rounds import PassKind
    >>> alone = dict(trial=0, settings="{}", state=JobState.RUNNING, reason="", num_steps=1, num_steps_wanted=2)
    >>> pass_text(TrialStatus(**alone, loss=0.5, evaluation_loss=None))
    'alone'
    >>> rows = dict(alone, loss=0.5, evaluation_loss=None)
    >>> pass_text(TrialStatus(**rows, pass_kind=PassKind.FUSED, speedup=2.371))
    'fused, 2.37 times'
    >>> pass_text(TrialStatus(**rows, pass_kind=PassKind.LOOPED, speedup=0.265))
    'looped (together 0.265 times)'
    """
    if status.pass_kind is None:
        return _NONE if status.loss is None else "alone"
    # Exactly 1: there is no other way to compare with.
    if status.speedup is None or status.speedup == 1:
        return status.pass_kind
    times = f"{status.speedup:.3g} times"
    is_in_turn = status.pass_kind is PassKind.LOOPED
    return f"{status.pass_kind} (together {times})" if is_in_turn else f"{status.pass_kind}, {times}"


def chosen_text(choice: ChoiceStatus | None) -> str:
    """Rows that a trial draws by, since which of its steps and up to which.

    >>> from skein.types import Step
    >>> counts = dict(num_picks=58, num_rows=144, num_set_aside=0, num_by_chance=3, largest_weight=2.0, seconds=0.1)
    >>> chosen_text(ChoiceStatus(version=Step(8), **counts, overhead=None, next_version=Step(16)))
    '58 of 144 from step 8 to 16, 3 by chance'
    """
    if choice is None:
        return _NONE
    until = "" if choice.next_version is None else f" to {choice.next_version}"
    chance = f", {choice.num_by_chance} by chance" if choice.num_by_chance else ""
    return f"{choice.num_picks} of {choice.num_rows} from step {choice.version}{until}{chance}"


def settings_text(settings: str) -> str:
    """Settings of a trial, short.

    >>> settings_text('{"optimizer.learning_rate": 0.1, "seed": 3}')
    'optimizer.learning_rate=0.1 seed=3'
    """
    return " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={json.dumps(value)}"
        for key, value in json.loads(settings).items()
    )
