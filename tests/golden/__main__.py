"""`python -m tests.golden`: whether plans, simulated stories and old run logs are what they were, to the byte.

`--record` takes what is found for right. Digests hold on one kind of processor: elsewhere the last bit of a float is
another, and a search goes another way from there. This is for whoever moves code: before and after, on one machine.
"""

import hashlib
import sys
from pathlib import Path

from tests.golden.plans import payload, plans
from tests.golden.stories import digest, stories

RECORDED = Path(__file__).with_name("digests.txt")


def found() -> dict[str, str]:
    """A digest of everything, by name."""
    of_plans = {f"plan: {name}": hashlib.sha256(payload(plan)).hexdigest()[:32] for name, plan in plans()}
    return of_plans | {f"story: {name}": digest(story()) for name, story in stories()}


def main() -> int:
    """Compare, and exit 1 if anything differs; or record."""
    now = found()
    if "--record" in sys.argv[1:]:
        RECORDED.write_text("".join(f"{value} {name}\n" for name, value in now.items()))
        return 0
    then = {
        name: value for value, _, name in (line.partition(" ") for line in RECORDED.read_text().splitlines())
    }
    others = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    print(
        *(f"differs: {name}" for name in others),
        f"{len(now) - len(others)} of {len(now)} as before",
        sep="\n",
    )
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main())
