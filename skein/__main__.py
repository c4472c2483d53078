"""`skein`: sees to it that what it is about to run is Skein's own, and hands over to `client.cli`."""

import sys
from typing import NoReturn

from skein.own import package_faults


def main() -> NoReturn:
    """The `skein` command."""
    found = next(package_faults(), None)
    if found is not None:
        print(f"error: {found}", file=sys.stderr)
        sys.exit(1)
    from client.cli import main as command  # only now: importing runs what it finds

    command()


if __name__ == "__main__":
    main()
