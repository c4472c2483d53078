"""Every command line of README and docs is one that the program takes: its verb, its options, what it is about."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from client.cli import root
from coordinator.__main__ import main as coordinator_up
from coordinator.identity.__main__ import main as init
from tests.contract.source import ROOT
from worker.__main__ import up as worker_up

PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {ROOT / "CHANGELOG.md"})
PROGRAMS: dict[str, click.Command] = {
    "skein coordinator up": coordinator_up,
    "skein worker up": worker_up,
    "skein init": init,
}
"""Commands that are programs of their own."""
OTHERS = {"skein sim", "skein bench"}
"""Programs that read their arguments in another way."""
SHELLS = {"", "sh", "bash", "console"}
"""Languages of blocks that a shell reads; "" is none."""


def shell_texts(page: str) -> Iterator[str]:
    """What a shell reads of a page: lines of blocks, and what stands in a sentence."""
    prose = []
    for number, part in enumerate(re.split(r"^```", page, flags=re.M)):
        language, _, body = part.partition("\n")
        if number % 2 == 0:
            yield from re.findall(r"^ {4,}\S.*(?:\\\n.*)*", part, re.M)
            prose.append(part)
        elif language in SHELLS:
            yield from body.replace("\\\n", " ").splitlines()
    yield from re.findall(r"`(skein [^`]+)`", " ".join(prose))


def command_lines(text: str) -> Iterator[list[str]]:
    """The arguments that `skein` has in a text for a shell.

    >>> list(command_lines("(umask 077; X=1 skein token create --role worker > line)  # LINE"))
    [['token', 'create', '--role', 'worker']]
    >>> list(command_lines("kubectl -n skein exec HEAD -- skein top --once"))
    [['top', '--once']]
    """
    reader = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    try:
        words = list(reader)
    except ValueError:  # a sentence with an apostrophe
        return
    for at, word in enumerate(words):
        if word in ("skein", ".venv/bin/skein") and words[at - 1 : at] != ["-n"]:
            end = next((i for i in range(at, len(words)) if set(words[i]) <= set("();<>|&")), len(words))
            yield [argument for argument in words[at + 1 : end] if argument != "..."]


def fault_in(arguments: list[str]) -> str | None:
    """Fault that the program finds with a command line; what names a verb alone, or an option of it, has none."""
    command: click.Command = root
    context = click.Context(root, info_name="skein")
    try:
        while isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
            name, found, arguments = command.resolve_command(context, arguments)
            assert found is not None
            context = click.Context(found, info_name=name, parent=context)
            command = PROGRAMS.get(context.command_path, found)
        if context.command_path in OTHERS:
            return None
        given, left, _ = command.make_parser(context).parse_args(list(arguments))
    except click.BadOptionUsage as error:
        return None if error.option_name == arguments[-1] else error.format_message()
    except click.UsageError as error:
        return error.format_message()
    if left:
        return None if isinstance(command, click.Group) else f"too many arguments: {left}"
    wanted = [x for x in command.params if isinstance(x, click.Argument) and x.required]
    missing = [str(x.name) for x in wanted if x.value_is_missing(given.get(str(x.name)))]
    return f"lacks {missing}" if 0 < len(missing) < len(wanted) else None


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("skein identity revoke worker w3", None),
        ("skein identity revoke", None),
        ("skein token create --namespace", None),
        ("skein identity revoke w3", "lacks ['name']"),
        ("skein identity rename a b", "no such command: rename"),
        ("skein drain w1 --now", "No such option '--now'"),
        ("skein queue lab", "too many arguments: ['lab']"),
        ("skein worker up --joins LINE", "No such option '--joins'"),
    ],
)
def test_what_the_program_does_not_take_is_a_fault(line: str, fault: str | None) -> None:
    [arguments] = command_lines(line)
    found = fault_in(arguments)
    assert (found is None) == (fault is None)
    assert fault is None or str(found).startswith(fault)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_command_lines_of_a_page_are_taken_as_they_stand(page: Path) -> None:
    lines = [x for text in shell_texts(page.read_text(encoding="utf-8")) for x in command_lines(text)]
    assert {" ".join(line): fault for line in lines if (fault := fault_in(line)) is not None} == {}


def test_command_lines_are_found() -> None:
    [readme] = [page.read_text(encoding="utf-8") for page in PAGES if page.name == "README.md"]
    found = [x for text in shell_texts(readme) for x in command_lines(text)]
    assert ["token", "create", "--role", "worker", "--uses", "8"] in found
