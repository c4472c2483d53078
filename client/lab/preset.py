"""Presets: which sites there are and what lies between them, from YAML, and the endpoints that follow from one."""

import re
from collections.abc import Iterator, Mapping
from importlib import resources
from math import inf
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from client.lab.network.links import Access, DirectionSpec
from skein.errors import UserError
from skein.types import WORKER_NAME_PATTERN
from skein.units import parse_bytes, parse_seconds

PRESETS = ("ten-cities", "two-sites", "home-uplinks")
COORDINATOR = "coordinator"
"""The coordinator's name among endpoints."""
ALL = "all"
"""Stands for every endpoint where one is asked for."""
MAX_WORKERS = 200
_BIT_RATE = re.compile(r"\s*([0-9.]+)\s*([kMG]?)(?:bit|b)(?:/s|ps)\s*")
_BITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def parse_rate(text: str | float) -> float:
    """Bytes per second in `text`, which counts bits or bytes.

    Raises:
        ValueError: it is no rate above 0.

    >>> parse_rate("80 Mbit/s"), parse_rate("10 MB/s"), parse_rate("2 GiB/s"), parse_rate(5)
    (10000000.0, 10000000.0, 2147483648.0, 5.0)
    """
    if isinstance(text, int | float):
        rate = float(text)
    elif (match := _BIT_RATE.fullmatch(text)) is not None:
        rate = float(match[1]) * _BITS[match[2]] / 8
    else:
        rate = float(parse_bytes(text.strip().removesuffix("/s")))
    if not rate > 0:
        raise ValueError(f"{text!r} is not above 0")
    return rate


Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(ge=0)]
Rate = Annotated[float, BeforeValidator(parse_rate), Field(gt=0)]


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LinkValues(_File):
    """A link as a preset describes it: latency and jitter in seconds one way, bandwidth in bytes per second."""

    latency: Seconds
    bandwidth: Rate
    jitter: Seconds = 0.0
    loss: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def spec(self) -> DirectionSpec:
        """The same as a value of ours."""
        return DirectionSpec(
            latency_s=self.latency, bytes_per_s=self.bandwidth, jitter_s=self.jitter, loss=self.loss
        )


class SitePair(LinkValues):
    """The links between two sites; with `one_way` only those from the first to the second."""

    between: tuple[str, str]
    one_way: bool = False


class Site(_File):
    """A place; `up` and `down` are shared by all that an endpoint there sends, or receives.

    Args:
        nat: each endpoint is behind a router of its own that hides its address.
        workers: whether workers are put there.
        relay: whether those offer to carry what others send each other.
    """

    up: Rate | None = None
    down: Rate | None = None
    nat: bool = False
    workers: bool = True
    relay: bool = False


class Preset(_File):
    """Network that a lab emulates.

    Args:
        source: where the figures are from.
        coordinator: the site where the coordinator is.
        same_site: links between endpoints of one site.
        links: between endpoints of two sites.
        otherwise: links between sites that `links` leaves out.
    """

    source: str
    coordinator: str
    sites: Annotated[
        dict[Annotated[str, Field(pattern=f"^{WORKER_NAME_PATTERN}$")], Site], Field(min_length=1)
    ]
    same_site: LinkValues
    links: tuple[SitePair, ...] = ()
    otherwise: LinkValues | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> "Preset":
        names = [name.lower() for name in (*self.sites, COORDINATOR, ALL)]
        if len(set(names)) < len(names):
            raise ValueError(f"two sites share a name, or one is called {COORDINATOR} or {ALL}")
        pairs = self.pairs()
        for name in (self.coordinator, *(name for pair in pairs for name in pair)):
            if name not in self.sites:
                raise ValueError(f"no site is called {name!r}; there are {', '.join(self.sites)}")
        if not any(site.workers for site in self.sites.values()):
            raise ValueError("no site has workers")
        for a in self.sites:
            for b in self.sites:
                if a != b and (a, b) not in pairs and self.otherwise is None:
                    raise ValueError(f"no link from {a} to {b}: list it, or say what holds otherwise")
        return self

    def pairs(self) -> Mapping[tuple[str, str], LinkValues]:
        """Listed links by (sending site, receiving site)."""
        there = {x.between: x for x in self.links}
        back = {(x.between[1], x.between[0]): x for x in self.links if not x.one_way}
        return back | there

    def spec(self, sender: str, receiver: str) -> DirectionSpec:
        """The link from an endpoint of one site to another endpoint, of the same or another site."""
        if sender == receiver:
            return self.same_site.spec()
        found = self.pairs().get((sender, receiver), self.otherwise)
        assert found is not None
        return found.spec()


def load_preset(name: str) -> Preset:
    """The preset of that name, or in the file at that path.

    Raises:
        UserError: there is none, or something is wrong with it.
    """
    try:
        if name in PRESETS:
            text = resources.files("client.lab.presets").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
        else:
            text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        hint = f"{error.strerror}; give one of {', '.join(PRESETS)}, or the path of a preset file"
        raise UserError("--preset", name, hint) from error
    try:
        return Preset.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise UserError("--preset", name, f"is not YAML: {str(error).splitlines()[0]}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UserError("--preset", name, f"{where}: {first['msg'].removeprefix('Value error, ')}") from error


class Endpoint(_File):
    """The coordinator or a worker: where it is, and how it is reached.

    Args:
        site: of the preset.
        address: that others send to, on the emulated network.
        listen: the address that it has itself; differs from `address` behind NAT.
        port: where it listens, at both.
    """

    name: str
    site: str
    address: str
    listen: str
    port: int
    is_behind_nat: bool = False


_HOME_HOST = "192.168.1.2"
_PORT = 7411


def lay_out(preset: Preset, num_workers: int | None) -> tuple[Endpoint, ...]:
    """The coordinator and so many workers, which go to the sites in turn; by default one to each site.

    Raises:
        UserError: that many workers have no room.
    """
    sites = [name for name, site in preset.sites.items() if site.workers]
    count = len(sites) if num_workers is None else num_workers
    if not 1 <= count <= MAX_WORKERS:
        raise UserError("--workers", count, f"give 1 to {MAX_WORKERS}")
    found = [(COORDINATOR, preset.coordinator, False)]
    for number in range(count):
        site = sites[number % len(sites)]
        found.append((f"{site.lower()}-{number // len(sites) + 1}", site, preset.sites[site].nat))
    return tuple(
        Endpoint(
            name=name,
            site=site,
            address=(address := f"10.77.0.{number + 1}"),
            listen=_HOME_HOST if is_behind_nat else address,
            port=_PORT,
            is_behind_nat=is_behind_nat,
        )
        for number, (name, site, is_behind_nat) in enumerate(found)
    )


def link_specs(preset: Preset, endpoints: tuple[Endpoint, ...]) -> dict[tuple[int, int], DirectionSpec]:
    """Each link by (sender, receiver), as places among `endpoints`."""
    return {
        (i, j): preset.spec(a.site, b.site)
        for i, a in enumerate(endpoints)
        for j, b in enumerate(endpoints)
        if i != j
    }


def accesses(preset: Preset, endpoints: tuple[Endpoint, ...]) -> tuple[Access, ...]:
    """The uplink and downlink of each endpoint."""
    sites = (preset.sites[endpoint.site] for endpoint in endpoints)
    return tuple(Access(up_bytes_per_s=s.up or inf, down_bytes_per_s=s.down or inf) for s in sites)


def chosen(endpoints: tuple[Endpoint, ...], field: str, name: str) -> tuple[int, ...]:
    """The places of the endpoint called `name`, of all at the site called so, or of `ALL`.

    Raises:
        UserError: nothing is called so; the error names `field`.
    """
    found = tuple(i for i, x in enumerate(endpoints) if name in (x.name, x.site, ALL))
    if name == ALL:
        found = tuple(range(len(endpoints)))
    if not found:
        known = dict.fromkeys([*(x.site for x in endpoints), *(x.name for x in endpoints)])
        raise UserError(field, name, f"give a site or an endpoint: {', '.join(known)}, or {ALL}")
    return found


def pairs_between(
    endpoints: tuple[Endpoint, ...], a: str, b: str, *, is_one_way: bool
) -> Iterator[tuple[int, int]]:
    """Pairs (sender, receiver) from `a` to `b`, and back unless one way; each is a site, an endpoint or `ALL`.

    Raises:
        UserError: nothing is called so.
    """
    firsts, seconds = chosen(endpoints, "A", a), chosen(endpoints, "B", b)
    there = {(i, j) for i in firsts for j in seconds if i != j}
    return iter(sorted(there if is_one_way else there | {(j, i) for i, j in there}))
