"""`skein completion`: what a shell runs to complete commands and options, printed or put where the shell finds it."""

import os
import shutil
import subprocess
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from client.cli import root
from skein.errors import UserError

_SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_SKEIN_COMPLETE"
"""In which click looks for a shell's question, for a program named skein."""


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS), required=False)
@click.option(
    "--install", "installs", is_flag=True, help="Put it where the shell finds it in every new session."
)
def completion(*, shell: str | None, installs: bool) -> None:
    """Print what completes `skein` in SHELL, by default the one that $SHELL names, or install it for this user."""
    chosen = shell or usual_shell()
    if not installs:
        return click.echo(_source(chosen))
    path = place(chosen)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_source(chosen) + "\n", encoding="utf-8")
    click.echo(f"wrote {path}")
    if (step := _step_left(chosen, path)) is not None:
        click.echo(step)
    click.echo(f"open a new {chosen} to use it")


def usual_shell() -> str:
    """Shell of this user.

    Raises:
        UserError: it is none that can be completed in.
    """
    name = Path(os.environ.get("SHELL", "")).name
    if name not in _SHELLS:
        raise UserError("SHELL", name, f"name the shell: skein completion {'|'.join(_SHELLS)}")
    return name


def _source(shell: str) -> str:
    kind = get_completion_class(shell)
    assert kind is not None, "click knows all of these"
    return kind(root, {}, "skein", _VARIABLE).source()


def place(shell: str) -> Path:
    """File from which a shell loads what completes `skein`, for this user alone."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    settings = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return {
        "bash": data / "bash-completion" / "completions" / "skein",
        "zsh": data / "zsh" / "site-functions" / "_skein",
        "fish": settings / "fish" / "completions" / "skein.fish",
    }[shell]


def _step_left(shell: str, path: Path) -> str | None:
    """Step that only the user can take so that the shell looks there; None: there is none."""
    match shell:
        case "bash" if not Path("/usr/share/bash-completion/bash_completion").exists():
            return f"bash-completion is not installed: install it, or add to ~/.bashrc: . {path}"
        case "zsh" if not _is_searched(path.parent):
            return f"add to ~/.zshrc: fpath=({path.parent} $fpath); autoload -U compinit; compinit"
    return None


def _is_searched(folder: Path) -> bool:
    """Whether zsh looks for functions there."""
    zsh = shutil.which("zsh")
    if zsh is None:
        return False
    done = subprocess.run(
        [zsh, "-ic", "print -l $fpath"], capture_output=True, text=True, check=False, timeout=10
    )
    return str(folder) in done.stdout.splitlines()
