"""When bytes arrive over emulated links, in seconds of the caller's clock. No I/O.

Rules of this file
- What one worker sends another takes bytes / bandwidth, during which it holds the sender's uplink and the receiver's
  downlink, and the link's latency after that. Who comes first goes first. That is what planners reckon with:
  `skein.plan.route.kernels.cost.run_sequence`.
- What is small (credit, acknowledgements, pings) holds nothing and waits for nothing: on a real line it goes between
  the packets of a transfer.
"""

from collections.abc import Sequence

Matrix = Sequence[Sequence[float]]

SMALL_BYTES = 2048


class Lines:
    """The uplinks and downlinks of some workers.

    Args:
        latency_s: (num_workers, num_workers), one way; row sends to column.
        bytes_per_s: same shape.
    """

    def __init__(self, latency_s: Matrix, bytes_per_s: Matrix) -> None:
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._up_s = [0.0] * len(latency_s)
        self._down_s = [0.0] * len(latency_s)

    def arrival_s(self, sender: int, receiver: int, num_bytes: int, *, now: float) -> float:
        """When the last of `num_bytes` is there, if all of them are to be sent at `now`.

        >>> lines = Lines([[0, 0.5], [0.5, 0]], [[1, 4096], [4096, 1]])
        >>> lines.arrival_s(0, 1, 8192, now=10.0), lines.arrival_s(0, 1, 8192, now=10.0)
        (12.5, 14.5)
        """
        takes_s = num_bytes / self._bytes_per_s[sender][receiver]
        begin_s = now
        if num_bytes > SMALL_BYTES:
            begin_s = max(now, self._up_s[sender], self._down_s[receiver])
            self._up_s[sender] = self._down_s[receiver] = begin_s + takes_s
        return begin_s + takes_s + self._latency_s[sender][receiver]
