"""`python -m client.lab.enter NAMESPACE MODULE ...`: becomes `python -m MODULE ...` in a network namespace."""

import os
import sys

from client.lab.network.namespaces import enter


def main() -> None:
    """Enters the namespace and becomes the program."""
    name, program = sys.argv[1], sys.argv[2:]
    enter(name)
    os.execv(sys.executable, [sys.executable, "-P", "-m", *program])


if __name__ == "__main__":
    main()
