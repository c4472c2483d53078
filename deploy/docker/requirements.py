"""Prints what the project needs with the extras named on the command line, for pip: `requirements.py worker`."""

import sys
import tomllib
from pathlib import Path


def requirements(extras: list[str], project_file: Path) -> list[str]:
    """Requirement lines of the project itself, then those of `extras`.

    Raises:
        KeyError: the project has no such extra.
    """
    project = tomllib.loads(project_file.read_text(encoding="utf-8"))["project"]
    wanted = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return [str(line) for lines in wanted for line in lines]


if __name__ == "__main__":
    print(*requirements(sys.argv[1:], Path("pyproject.toml")), sep="\n")
