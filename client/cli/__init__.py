"""`skein`: what a user types. Exit codes: 0 done, 1 failed, 2 usage, 130 interrupted."""

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import click

import skein
from client.cli.verbs import Verb, VerbGroup, Verbs
from skein.errors import SkeinError, UserError

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes."""


def _of(module: str, help_by_name: Mapping[str, str]) -> dict[str, Verb]:
    """Commands of one module, each under the name of the function that it is."""
    return {name: Verb(help=help, module=module, attribute=name) for name, help in help_by_name.items()}


def _group(name: str, help: str, verbs: Verbs) -> dict[str, VerbGroup]:
    return {name: VerbGroup(name, help=help, verbs=verbs)}


_CHECKPOINTS: Verbs = {
    "list": Verb(
        help="List the checkpoints that are kept.", module="client.cli.job.checkpoints", attribute="listed"
    ),
    **_of(
        "client.cli.job.checkpoints",
        {"verify": "Read checkpoints and compare hashes.", "delete": "Delete those of a job that has ended."},
    ),
}
_JOB = _of(
    "client.cli.job.files",
    {"check": "Say what is wrong with a job file.", "schema": "Print the JSON Schema of job files."},
)
_LAB = _of(
    "client.cli.lab",
    {
        "up": "Bring a WAN with a coordinator and workers up, in the background.",
        "status": "Show what runs where, and links that were changed.",
        "cut": "Let nothing through between two sites or workers.",
        "slow": "Change latency, bandwidth, jitter or loss of links.",
        "heal": "Let links be as they were.",
        "measure": "Measure what TCP gets of a link.",
        "down": "End the lab, also one that was killed.",
    },
)
_TOKEN = _of("client.cli.access.identity", {"create": "Print a line that lets somebody join."})
_IDENTITY: Verbs = {
    "list": Verb(help="List identities.", module="client.cli.access.identity", attribute="listed"),
    **_of("client.cli.access.identity", {"revoke": "End an identity at once."}),
}
_AUDIT = _of(
    "client.cli.access.audit",
    {"show": "Show who did what.", "verify": "Find entries that were changed, taken out or cut off."},
)
_UP_COORDINATOR = Verb(help="Run a coordinator, hosted on Ray, until SIGTERM.", module="coordinator")
_UP_WORKER = Verb(help="Run a worker that joins a coordinator, until SIGTERM.", module="worker")
_VERBS: Verbs = {
    **_of("client.cli.demo", {"demo": "Train, export and sample a small model, all on this machine."}),
    **_group("coordinator", "The service that decides.", {"up": _UP_COORDINATOR}),
    **_group("worker", "The daemon that trains.", {"up": _UP_WORKER}),
    **_of("client.cli.job.jobs", {"submit": "Hand in a job.", "status": "Show one job."}),
    **_of("client.cli.job.listing", {"jobs": "List jobs."}),
    **_of("client.cli.job.queue", {"queue": "List jobs in the order of their turn, and what they wait for."}),
    **_of("client.cli.job.sweep", {"sweep": "List a job's trials, and which is the best."}),
    **_of("client.cli.job.logs", {"logs": "Tell the story of a job."}),
    **_of("client.cli.job.curve", {"curve": "Draw a job's losses, or write its curves to files."}),
    **_of("client.cli.job.incidents", {"incidents": "List a job's failures and what they cost."}),
    **_group(
        "checkpoints", "List a job's checkpoints, or read them to see whether they are whole.", _CHECKPOINTS
    ),
    **_of(
        "client.cli.job.wishes",
        {
            "cancel": "Save a job and end it.",
            "pause": "Save a job and free its workers.",
            "resume": "Have a job go on.",
        },
    ),
    **_of("client.cli.job.files", {"export": "Write a job's weights as a Hugging Face directory."}),
    **_of("client.cli.top", {"top": "Show jobs and workers, live."}),
    **_of("client.cli.access.page", {"page": "Print a link to the coordinator's page in a browser."}),
    **_of(
        "client.cli.fleet",
        {
            "workers": "List workers.",
            "links": "List measured links.",
            "measure": "Have workers measure their devices again.",
            "drain": "Take work away from a worker.",
        },
    ),
    "init": Verb(help="Make a cluster's authority and its admin's identity.", module="coordinator.identity"),
    **_of("client.cli.access.identity", {"join": "Get an identity by a pasted line."}),
    **_group("token", "Lines that let somebody join.", _TOKEN),
    **_group("identity", "Who joined, and whose identity ends.", _IDENTITY),
    **_group("audit", "The audit log of a coordinator, on its machine.", _AUDIT),
    **_group("job", "Job files.", _JOB),
    **_of(
        "client.cli.plan", {"plan": "Plan a step for an instance or a fleet, and say how good the plan is."}
    ),
    **_of("client.cli.doctor", {"doctor": "Look for what could go wrong."}),
    **_group("lab", "An emulated WAN on this machine.", _LAB),
    **_of("client.cli.completion", {"completion": "Complete commands in your shell."}),
    "sim": Verb(help="Simulate a job on a made-up fleet.", module="skein.sim"),
    "bench": Verb(help="Run a comparison (source checkout).", module="bench"),
}


def _show_version(ctx: click.Context, _parameter: click.Parameter, is_asked: object) -> None:
    if is_asked:
        click.echo(f"skein {skein.__version__} (protocol {skein.PROTOCOL_VERSION})")
        ctx.exit(DONE)


root = VerbGroup(
    "skein",
    help="Train large models on machines that come and go.",
    verbs=_VERBS,
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            expose_value=False,
            is_eager=True,
            callback=_show_version,
            help="Show release and protocol.",
        )
    ],
)


def main() -> NoReturn:
    """The `skein` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Carries out one command line; gives the exit code. Whatever goes wrong is one line on standard error."""
    try:
        code: object = root.main(args=list(arguments), prog_name="skein", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return USAGE
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else "skein"
        return _fail([f"{error.format_message().rstrip('.')} (see {where} --help)"], USAGE)
    except click.ClickException as error:
        return _fail([error.format_message()], FAILED)
    except click.Abort:
        return INTERRUPTED
    except SkeinError as error:
        from client.errors import Refused

        is_usage = isinstance(error, UserError) and not isinstance(error, Refused)
        return _fail(str(error).splitlines(), USAGE if is_usage else FAILED)
    except BrokenPipeError:
        # Whoever read our output has heard enough; Python must not complain about it while exiting.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail([f"{where}{error.strerror or error}"], FAILED)
    except Exception as error:  # noqa: BLE001 - the outermost: it records, and ends the run
        return _fail([_recorded(error)], FAILED)
    return code if isinstance(code, int) else DONE


def _fail(lines: Sequence[str], code: int) -> int:
    for line in lines:
        print(f"error: {line}", file=sys.stderr, flush=True)
    return code


def _recorded(error: Exception) -> str:
    """Line about an error of our own, whose trace goes to a file."""
    text = "".join(traceback.format_exception(error))
    name = f"skein-error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    try:
        path = Path(tempfile.gettempdir()) / name
        path.write_text(text, encoding="utf-8")
    except OSError:
        print(text, file=sys.stderr)
        return f"{type(error).__name__}: {error}; this is our fault: please report the lines above"
    return f"{type(error).__name__}: {error}; this is our fault: please report it with {path}"
