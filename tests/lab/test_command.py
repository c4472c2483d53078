"""`skein lab` as users type it: mistakes in one line, and what is started where."""

import json
from pathlib import Path

import pytest

from client.cli import DONE, FAILED, USAGE, run
from client.lab.preset import Endpoint, lay_out, load_preset
from client.lab.services import programs
from client.lab.state import LabFile, LabFolder, Mode


def make_lab(preset: str, *, mode: Mode, endpoints: tuple[Endpoint, ...]) -> LabFile:
    return LabFile(
        preset_name=preset,
        preset=load_preset(preset),
        mode=mode,
        reason="a test",
        seed=0,
        endpoints=endpoints,
        has_services=True,
        has_closed_homes=False,
        door="127.0.0.1:7411",
        metrics_door="127.0.0.1:7500",
        enrol_port=7413,
    )


def options_of(arguments: tuple[str, ...]) -> dict[str, str]:
    given = [argument for argument in arguments if argument != "--certificates"]
    return dict(zip(given[::2], given[1::2], strict=True))


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["status"], FAILED, "no lab runs in"),
        (["down"], FAILED, "none left anything behind"),
        (["heal"], FAILED, "no lab runs in"),
        (["cut", "a", "b"], FAILED, "no lab runs in"),
        (["cut", "a"], USAGE, "Missing argument 'B'"),
        (["slow", "a", "b"], USAGE, "give --latency, --bandwidth, --jitter or --loss"),
        (["slow", "a", "b", "--latency", "long"], USAGE, "--latency: 'long': give something like '80 ms'"),
        (["slow", "a", "b", "--bandwidth", "0"], USAGE, "--bandwidth: '0': give something like '20 Mbit/s'"),
        (["slow", "a", "b", "--loss", "1"], USAGE, "--loss"),
        (["up", "--preset", "mars"], USAGE, "ten-cities, two-sites, home-uplinks, or the path"),
        (["up", "--workers", "0"], USAGE, "--workers: 0: give 1 to 200"),
        (
            ["up", "--preset", "home-uplinks", "--mode", "proxy", "--closed-homes"],
            USAGE,
            "proxies have no NAT",
        ),
        (["upp"], USAGE, "did you mean up?"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, problem: str
) -> None:
    where = [] if arguments == ["upp"] else ["--dir", str(tmp_path / "lab")]
    assert run(["lab", *arguments, *where]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert problem in err
    assert not (tmp_path / "lab").exists()


def test_a_network_alone_comes_up_changes_and_goes_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--dir", str(tmp_path / "lab")]
    asked = ["--preset", "two-sites", "--workers", "1", "--mode", "proxy", "--no-services", "--json"]
    try:
        assert run(["lab", "up", *asked, *where]) == DONE
        up = json.loads(capsys.readouterr().out)
        assert [x["name"] for x in up["endpoints"]] == ["coordinator", "north-1"]
        assert run(["lab", "slow", "all", "all", "--bandwidth", "8 Mbit/s", *where]) == DONE
        assert run(["lab", "cut", "coordinator", "north-1", "--one-way", *where]) == DONE
        capsys.readouterr()
        assert run(["lab", "status", "--json", *where]) == DONE
        links = json.loads(capsys.readouterr().out)["links"]
        assert [(x["sender"], x["is_cut"], x["bytes_per_s"]) for x in links] == [
            ("coordinator", True, 1e6),
            ("north-1", False, 1e6),
        ]
        assert run(["lab", "status", *where]) == DONE
        assert "cut      0.2 ms" in capsys.readouterr().out
        assert run(["lab", "heal", *where]) == DONE
        assert run(["lab", "status", *where]) == DONE
        assert "all links are as the preset says" in capsys.readouterr().out
    finally:
        assert run(["lab", "down", *where]) == DONE
    assert run(["lab", "down", *where]) == FAILED


def test_homes_behind_proxies_are_said_to_be_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--dir", str(tmp_path / "lab")]
    try:
        up = ["lab", "up", "--preset", "home-uplinks", "--workers", "1", "--mode", "proxy", "--no-services"]
        assert run([*up, *where]) == DONE
        assert "proxies have no NAT, so homes can be dialled" in capsys.readouterr().out
    finally:
        assert run(["lab", "down", *where]) == DONE


def test_workers_behind_nat_listen_there_and_advertise_their_home(tmp_path: Path) -> None:
    endpoints = lay_out(load_preset("home-uplinks"), 1)
    folder = LabFolder(tmp_path)
    coordinator, worker = programs(folder, make_lab("home-uplinks", mode="namespaces", endpoints=endpoints))
    assert coordinator.arguments[:2] == (folder.namespace(endpoints[0]), "coordinator")
    assert worker.arguments[:2] == (folder.namespace(endpoints[1]), "worker")
    options = options_of(worker.arguments[2:])
    assert options["--join"] == f"@{folder.line}"
    assert (options["--listen"], options["--advertise"]) == ("192.168.1.2", "10.77.0.2:7411")
    options = options_of(coordinator.arguments[2:])
    assert (options["--host"], options["--advertise"]) == ("10.77.0.1", "10.77.0.1:7411")


def test_workers_behind_proxies_advertise_them(tmp_path: Path) -> None:
    endpoints = (
        Endpoint(name="coordinator", site="north", address="127.0.0.2", listen="127.0.0.1", port=7411),
        Endpoint(name="south-1", site="south", address="127.0.0.2", listen="127.0.0.3", port=9000),
    )
    coordinator, worker = programs(
        LabFolder(tmp_path), make_lab("two-sites", mode="proxy", endpoints=endpoints)
    )
    assert (coordinator.module, worker.module) == ("coordinator", "worker")
    assert "--certificates" in coordinator.arguments
    options = options_of(coordinator.arguments)
    assert (options["--metrics-port"], options["--advertise"]) == ("7500", "127.0.0.2:7411")
    assert options_of(worker.arguments) == {
        "--join": f"@{tmp_path / 'line'}",
        "--state-dir": str(tmp_path / "workers"),
        "--name": "south-1",
        "--site": "south",
        "--listen": "127.0.0.3",
        "--port": "9000",
        "--advertise": "127.0.0.2:9000",
        "--checkpoint-root": str(tmp_path / "checkpoints"),
    }


def test_folders_have_namespaces_of_their_own(tmp_path: Path) -> None:
    assert LabFolder(tmp_path / "a").prefix != LabFolder(tmp_path / "b").prefix
    assert LabFolder(tmp_path / "a").prefix == LabFolder(tmp_path / "a").prefix


def test_a_number_that_another_process_got_since_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "processes").write_text("[1, 12.5]\n")
    assert LabFolder(tmp_path).noted_processes() == []
