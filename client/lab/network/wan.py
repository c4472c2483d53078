"""The emulated WAN: one TUN device per endpoint, and the router between them, in an event loop.

The loop should wait with `select`, for `epoll` rounds what it waits for up to whole milliseconds.
"""

import asyncio
import logging
import os
from collections.abc import Mapping
from ipaddress import IPv4Address

from client.lab.network import namespaces
from client.lab.network.links import LabNetwork
from client.lab.network.router import Router

_log = logging.getLogger(__name__)

_FRAME_BYTES = 1 << 17
"""More than the biggest batch."""
_FRAMES_AT_ONCE = 32
"""Frames read of one device, before others have their turn."""


class Wan:
    """Carries frames between namespaces, from `open` to `close`.

    Args:
        network: may change at any time; call `refresh` afterwards.
        names: the namespaces with the WAN devices, one for each endpoint.
        addresses: of the endpoints.
    """

    def __init__(self, network: LabNetwork, names: tuple[str, ...], addresses: tuple[str, ...]) -> None:
        self.router = Router(network, {IPv4Address(x).packed: i for i, x in enumerate(addresses)})
        self._network = network
        self._names = names
        self._addresses = addresses
        self._devices: list[int] = []
        self._loop = asyncio.get_running_loop()
        self._alarm: asyncio.TimerHandle | None = None
        self._num_refused = 0

    def open(self) -> None:
        """Put a device into each namespace and begin.

        Raises:
            NotPermitted: the system refuses.
        """
        for i, (name, address) in enumerate(zip(self._names, self._addresses, strict=True)):
            device = namespaces.open_tun(name)
            self._devices.append(device)
            namespaces.address(name, address)
            self._loop.add_reader(device, self._read, i)
        self.refresh()

    def refresh(self) -> None:
        """Take note that links have changed."""
        for i, device in enumerate(self._devices):
            namespaces.set_batching(device, is_on=self._network.may_batch(i))

    async def close(self) -> None:
        """Give all devices up; what is under way is lost."""
        if self._alarm is not None:
            self._alarm.cancel()
        for device in self._devices:
            self._loop.remove_reader(device)
            os.close(device)
        self._devices = []

    def traffic(self) -> Mapping[tuple[int, int], Mapping[str, int]]:
        """Traffic carried and dropped so far, by (sender, receiver), where there was any."""
        return {
            pair: {
                "packets": traffic.num_frames,
                "bytes": traffic.num_bytes,
                **{f"dropped_{reason}": count for reason, count in sorted(traffic.num_dropped.items())},
            }
            for pair, traffic in self.router.traffic.items()
            if traffic.num_frames or traffic.num_dropped
        }

    def _read(self, sender: int) -> None:
        device, router = self._devices[sender], self.router
        for _ in range(_FRAMES_AT_ONCE):
            try:
                frame = os.read(device, _FRAME_BYTES)
            except BlockingIOError:
                break
            except OSError as error:  # somebody removed the namespace, and the device with it
                self._loop.remove_reader(device)
                _log.error("lost=%s: %s", self._names[sender], error)
                break
            router.push(sender, frame, now=self._loop.time())
        self._deliver()

    def _deliver(self) -> None:
        for receiver, frame in self.router.pop(now=self._loop.time()):
            try:
                os.write(self._devices[receiver], frame)
            except OSError as error:  # the device is down, or the kernel finds fault with a packet
                self._refused(receiver, error)
        self._set_alarm()

    def _set_alarm(self) -> None:
        due_s = self.router.deadline()
        if self._alarm is not None:
            if not self._alarm.cancelled() and self._alarm.when() == due_s:
                return
            self._alarm.cancel()
        self._alarm = None if due_s is None else self._loop.call_at(due_s, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._deliver()

    def _refused(self, receiver: int, error: OSError) -> None:
        self._num_refused += 1
        if self._num_refused.bit_count() == 1:  # the first, and then ever more seldom
            _log.warning("refused=%d to=%s: %s", self._num_refused, self._names[receiver], error)
