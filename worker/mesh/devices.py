"""Devices of a worker, as its operator names them."""

import re

from skein.errors import UserError

_FORM = re.compile(r"(cpu)(?::([1-9]\d?))?|(cuda):(\d{1,3})")
_HINT = "give cuda:0,cuda:1 or so, or cpu:2 for two processes on the processors"


def parse_devices(text: str) -> tuple[str, ...]:
    """Device of each process.

    Raises:
        UserError: the devices are unlike, or no devices.

    >>> parse_devices("cpu:2"), parse_devices("cuda:0,cuda:2"), parse_devices("cpu")
    (('cpu', 'cpu'), ('cuda:0', 'cuda:2'), ('cpu',))
    """
    found: list[str] = []
    for part in text.split(","):
        form = _FORM.fullmatch(part.strip())
        if form is None:
            raise UserError("devices", text, f"{part.strip()!r} is no device: {_HINT}")
        found += [f"cuda:{int(form[4])}"] if form[3] else ["cpu"] * int(form[2] or 1)
    if len({device.partition(":")[0] for device in found}) > 1:
        raise UserError("devices", text, f"devices that share each layer must be alike: {_HINT}")
    if len(set(found)) < len(found) and found[0] != "cpu":
        raise UserError("devices", text, f"a device is named twice: {_HINT}")
    return tuple(found)
