"""`python -m tests.e2e.lone_coordinator STATE HOST PORT [PROTOCOL]`: the coordinator's services, without Ray.

It starts in a second, for tests of the way to a coordinator and not of jobs. Metrics are at the next port.
"""

import asyncio
import sys
from pathlib import Path

import skein
from coordinator.serving import Serving, ServingOptions
from tests.coordinator.builders import plan_at_once


async def main(state: str, host: str, port: str, protocol: str = str(skein.PROTOCOL_VERSION)) -> None:
    """Serves, and says so."""
    skein.PROTOCOL_VERSION = int(protocol)
    options = ServingOptions(
        state_dir=Path(state),
        host=host,
        port=int(port),
        metrics_host=host,
        metrics_port=int(port) + 1,
    )
    _ = await Serving.start(options, plan_at_once)
    print("serves", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
