"""`python -m client.cli` is `skein`."""

from client.cli import main

main()
