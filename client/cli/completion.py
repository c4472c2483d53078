"""`skein completion`: what a shell runs to complete commands and options."""

import click
from click.shell_completion import get_completion_class

from client.cli import root

_SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_SKEIN_COMPLETE"
"""In which click looks for a shell's question, for a program named skein."""


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(shell: str) -> None:
    """Print what completes `skein` in SHELL. To have it in every session:

    \b
      bash   skein completion bash > ~/.local/share/bash-completion/completions/skein
      zsh    skein completion zsh > a file named _skein in a folder of $fpath
      fish   skein completion fish > ~/.config/fish/completions/skein.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click knows all of these"
    click.echo(kind(root, {}, "skein", _VARIABLE).source())
