"""What a relay gives of access links: two workers that nobody can dial, in a lab in namespaces (root on Linux).

    python -m bench.relay [--runs 3]

One is behind a router that forwards nothing, the other behind a firewall that drops all that comes in. They meet at the
coordinator's host, and probe each other as workers do when they join; what that finds is held against the slower of
the sender's uplink and the receiver's downlink.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from bench.report import Row, finish, spread
from client.lab.network import namespaces
from client.lab.start import LabOptions, RunningLab, start_lab, stop_lab, wait_for_workers
from client.lab.state import LabFolder
from skein.protocol.messages.ways import COORDINATOR_RELAY
from skein.topology.fleet import Link
from skein.types import WorkerId

PRESET = Path(__file__).parents[1] / "deploy/lab/closed-homes.yaml"
WALLED = "office"
"""Site whose workers have a firewall of their own."""
RELAYED_S = 120.0
_POLL_S = 0.2
_DROPS = (
    "iptables",
    "-w",
    "-A",
    "INPUT",
    "!",
    "-i",
    "lo",
    "-m",
    "conntrack",
    "--ctstate",
    "NEW",
    "-j",
    "DROP",
)


@contextmanager
def closed_homes(
    path: Path, *, preset: Path = PRESET, data_roots: tuple[Path, ...] = ()
) -> Iterator[RunningLab]:
    """A lab whose workers have joined; nobody can dial those behind NAT, nor those at `WALLED`."""
    folder = LabFolder(path)
    options = LabOptions(preset=str(preset), mode="namespaces", data_roots=data_roots, has_closed_homes=True)
    try:
        lab = start_lab(folder, options)
        for endpoint in lab.status.endpoints:
            if endpoint.name.startswith(WALLED):
                inside = ("ip", "netns", "exec", str(endpoint.namespace))
                subprocess.run([*inside, *_DROPS], check=True, capture_output=True)
        wait_for_workers(lab, lambda _joined, _of: None)
        yield lab
    finally:
        stop_lab(folder)


def relayed_links(lab: RunningLab, relay: WorkerId = COORDINATOR_RELAY) -> list[Link]:
    """Both directions of a pair, once probes have gone by this relay.

    Raises:
        TimeoutError: they have not within `RELAYED_S`.
    """
    until_s = time.monotonic() + RELAYED_S
    with lab.client() as client:
        while len(found := [link for link in client.links() if _is_carried(link, relay)]) < 2:
            if time.monotonic() > until_s:
                raise TimeoutError(f"no links by that relay within {RELAYED_S} s: {client.links()}")
            time.sleep(_POLL_S)
    return found


def _is_carried(link: Link, relay: WorkerId) -> bool:
    return link.via == relay and relay not in (link.sender, link.receiver)


def access_bytes_per_s(lab: RunningLab, link: Link) -> float:
    """The slower of a link's two access links, as set."""
    ends = {endpoint.name: endpoint for endpoint in lab.status.endpoints}
    up, down = ends[link.sender].up_bytes_per_s, ends[link.receiver].down_bytes_per_s
    assert up is not None
    assert down is not None
    return min(up, down)


def measure(num_runs: int) -> list[Row]:
    """Rows of both directions."""
    found: dict[tuple[str, str], list[float]] = {}
    access: dict[tuple[str, str], float] = {}
    for _ in range(num_runs):
        with tempfile.TemporaryDirectory() as path, closed_homes(Path(path) / "lab") as lab:
            for link in relayed_links(lab):
                pair = (link.sender, link.receiver)
                found.setdefault(pair, []).append(link.bytes_per_s / 1e6)
                access[pair] = access_bytes_per_s(lab, link) / 1e6
    return [
        Row(
            what=f"{sender} to {receiver} by way of the coordinator's host",
            value=median(rates),
            unit="MB/s",
            against=f"{access[sender, receiver]:.2f} MB/s, the slower access link",
            ratio=median(rates) / access[sender, receiver],
            goal=">= 0.8",
            holds=median(rates) >= 0.8 * access[sender, receiver],
            spread=spread(rates),
        )
        for (sender, receiver), rates in sorted(found.items())
    ]


def main() -> int:
    """Measure, print, and say whether the goal holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="labs that are brought up, one after the other")
    arguments = parser.parse_args()
    if (problem := namespaces.why_not()) is not None:
        print(f"error: namespaces: {problem}: run as root on Linux", file=sys.stderr)
        return 2
    return finish("relay", measure(arguments.runs))


if __name__ == "__main__":
    sys.exit(main())
