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
from client.cli.verbs import ProgramVerb, Verb, VerbGroup
from skein.errors import SkeinError, UserError

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes."""

_COORDINATOR = VerbGroup(
    "coordinator",
    help="The service that decides.",
    verbs={"up": ProgramVerb(help="Run a coordinator, hosted on Ray, until SIGTERM.", module="coordinator")},
)
_WORKER = VerbGroup(
    "worker",
    help="The daemon that trains.",
    verbs={"up": ProgramVerb(help="Run a worker that joins a coordinator, until SIGTERM.", module="worker")},
)
_CHECKPOINTS = VerbGroup(
    "checkpoints",
    help="List a job's checkpoints, or read them to see whether they are whole.",
    verbs={
        "list": Verb(
            help="List the checkpoints that are kept.",
            module="client.cli.job.checkpoints",
            attribute="listed",
        ),
        "verify": Verb(
            help="Read checkpoints and compare hashes.",
            module="client.cli.job.checkpoints",
            attribute="verify",
        ),
    },
)
_JOB = VerbGroup(
    "job",
    help="Job files.",
    verbs={
        "check": Verb(
            help="Say what is wrong with a job file.", module="client.cli.job.files", attribute="check"
        ),
        "schema": Verb(
            help="Print the JSON Schema of job files.", module="client.cli.job.files", attribute="schema"
        ),
    },
)
_LAB = VerbGroup(
    "lab",
    help="An emulated WAN on this machine.",
    verbs={
        name: Verb(help=text, module="client.cli.lab", attribute=name)
        for name, text in {
            "up": "Bring a WAN with a coordinator and workers up, in the background.",
            "status": "Show what runs where, and links that were changed.",
            "cut": "Let nothing through between two sites or workers.",
            "slow": "Change latency, bandwidth, jitter or loss of links.",
            "heal": "Let links be as they were.",
            "measure": "Measure what TCP gets of a link.",
            "down": "End the lab, also one that was killed.",
        }.items()
    },
)
_VERBS: Mapping[str, Verb | ProgramVerb | VerbGroup] = {
    "demo": Verb(
        help="Train, export and sample a small model, all on this machine.",
        module="client.cli.demo",
        attribute="demo",
    ),
    "coordinator": _COORDINATOR,
    "worker": _WORKER,
    "submit": Verb(help="Hand in a job.", module="client.cli.job.jobs", attribute="submit"),
    "jobs": Verb(help="List jobs.", module="client.cli.job.jobs", attribute="jobs"),
    "status": Verb(help="Show one job.", module="client.cli.job.jobs", attribute="status"),
    "logs": Verb(help="Tell the story of a job.", module="client.cli.job.logs", attribute="logs"),
    "curve": Verb(
        help="Draw a job's losses, or write its curves to files.",
        module="client.cli.job.curve",
        attribute="curve",
    ),
    "incidents": Verb(
        help="List a job's failures and what they cost.",
        module="client.cli.job.incidents",
        attribute="incidents",
    ),
    "checkpoints": _CHECKPOINTS,
    "cancel": Verb(help="Save a job and end it.", module="client.cli.job.wishes", attribute="cancel"),
    "pause": Verb(help="Save a job and free its workers.", module="client.cli.job.wishes", attribute="pause"),
    "resume": Verb(help="Have a job go on.", module="client.cli.job.wishes", attribute="resume"),
    "export": Verb(
        help="Write a job's weights as a Hugging Face directory.",
        module="client.cli.job.files",
        attribute="export",
    ),
    "workers": Verb(help="List workers.", module="client.cli.fleet", attribute="workers"),
    "links": Verb(help="List measured links.", module="client.cli.fleet", attribute="links"),
    "measure": Verb(
        help="Have workers measure their devices again.", module="client.cli.fleet", attribute="measure"
    ),
    "drain": Verb(help="Take work away from a worker.", module="client.cli.fleet", attribute="drain"),
    "job": _JOB,
    "plan": Verb(
        help="Plan a step for an instance or a fleet, and say how good the plan is.",
        module="client.cli.plan",
        attribute="plan",
    ),
    "doctor": Verb(help="Look for what could go wrong.", module="client.cli.doctor", attribute="doctor"),
    "lab": _LAB,
    "completion": Verb(
        help="Print what completes commands in a shell.",
        module="client.cli.completion",
        attribute="completion",
    ),
    "sim": ProgramVerb(help="Simulate a job on a made-up fleet.", module="skein.sim"),
    "bench": ProgramVerb(help="Run a comparison (source checkout).", module="bench"),
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
    except UserError as error:
        from client.errors import Refused

        return _fail(str(error).splitlines(), FAILED if isinstance(error, Refused) else USAGE)
    except SkeinError as error:
        return _fail([str(error)], FAILED)
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
    """One line about an error of our own, whose trace goes to a file."""
    text = "".join(traceback.format_exception(error))
    name = f"skein-error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    try:
        path = Path(tempfile.gettempdir()) / name
        path.write_text(text, encoding="utf-8")
    except OSError:
        print(text, file=sys.stderr)
        return f"{type(error).__name__}: {error}; this is our fault: please report the lines above"
    return f"{type(error).__name__}: {error}; this is our fault: please report it with {path}"
