"""Commands that are imported when they are called, and commands that are programs of their own.

Rules: `skein --help` imports none of them, so it answers at once and works where torch or Ray are not installed. The
services are never imported by a client; they are started in this process's place, as `python -m coordinator`.
"""

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import click
from click.shell_completion import CompletionItem

from skein.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """A command of ours: `attribute` of `module`; without one, a module that is run instead of this program, with the
    same options.
    """

    help: str
    module: str
    attribute: str | None = None


Verbs = Mapping[str, "Verb | VerbGroup"]
"""Commands by the names that users type."""


class VerbGroup(click.Group):
    """Commands by name, loaded when called; an unknown one is answered with the nearest."""

    def __init__(
        self,
        name: str,
        *,
        help: str,
        verbs: Verbs,
        params: Sequence[click.Parameter] = (),
    ) -> None:
        settings = {"help_option_names": ["-h", "--help"]}  # of all commands below too
        super().__init__(name=name, help=help, params=list(params), context_settings=settings)
        self.help: str = help
        self._verbs = verbs

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = self._verbs.get(cmd_name)
        if not isinstance(verb, Verb):
            return verb
        if verb.attribute is None:
            return _Launch(cmd_name, verb.module)
        found: object = getattr(importlib.import_module(verb.module), verb.attribute)
        assert isinstance(found, click.Command)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self._verbs and not name.startswith("-"):
            close = difflib.get_close_matches(name, self._verbs, n=1)
            meant = f"did you mean {close[0]}?" if close else f"give one of {', '.join(self._verbs)}"
            raise click.UsageError(f"no such command: {name}; {meant}", ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands that begin so; none is imported for it."""
        found = [
            CompletionItem(name, help=verb.help)
            for name, verb in self._verbs.items()
            if name.startswith(incomplete)
        ]
        return found or click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.help) for name, verb in self._verbs.items()])


class _Launch(click.Command):
    """Becomes another program. All arguments are that program's, `--help` included."""

    def __init__(self, name: str, module: str) -> None:
        super().__init__(
            name,
            params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
            add_help_option=False,
            context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
        )
        self._module = module

    def invoke(self, ctx: click.Context) -> NoReturn:
        launch(self._module, ctx.params["arguments"])


def launch(module: str, arguments: tuple[str, ...]) -> NoReturn:
    """Replaces this process by `python -m module`.

    Raises:
        UserError: the module is not installed.
    """
    if importlib.util.find_spec(module) is None:
        raise UserError("command", module, "is not part of this installation: run it from a source checkout")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, program_arguments(module, arguments))


def program_arguments(module: str, arguments: tuple[str, ...]) -> list[str]:
    """Arguments that run `module`: `-P` keeps a folder of the same name here from being taken for it."""
    return [sys.executable, "-P", "-m", module, *arguments]
