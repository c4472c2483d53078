"""The environment, the folder and the token that Ray gets, and what stays of its log when it fails."""

import os
from pathlib import Path

import pytest

from coordinator.launch.environment import (
    RAY_TOKEN_FILE,
    current_folder,
    joining_environment,
    ray_environment,
    set_environment,
)
from coordinator.launch.raylog import KEPT_FOLDER, MOST_FILE_BYTES, RayFailedError, with_ray_log


def test_ray_keeps_other_users_out_and_reports_to_no_server(tmp_path: Path) -> None:
    environment = ray_environment(tmp_path)
    token_file = Path(environment["RAY_AUTH_TOKEN_PATH"])
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
    assert environment["RAY_worker_niceness"] == "0"
    assert token_file.stat().st_mode & 0o777 == 0o600
    assert len(token_file.read_text()) == 64
    assert os.environ.get("RAY_AUTH_TOKEN_PATH") != str(token_file)


@pytest.mark.parametrize("left", [b"", b"ab", b"\xff\x00" * 40, b"0" * 64])
def test_a_token_file_of_an_earlier_start_never_matters(left: bytes, tmp_path: Path) -> None:
    (tmp_path / RAY_TOKEN_FILE).write_bytes(left)
    token = Path(ray_environment(tmp_path)["RAY_AUTH_TOKEN_PATH"]).read_text()
    assert len(bytes.fromhex(token)) == 32
    assert token.encode() != left


def test_of_the_variables_that_ray_reads_only_known_ones_stay() -> None:
    shell = {
        "PATH": "/bin",
        "AWS_SECRET_ACCESS_KEY": "s",
        "RAY_RUNTIME_ENV_HOOK": "no.such.hook",
        "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}",
        "RAY_ADDRESS": "10.0.0.1:6379",
        "RAY_AUTH_TOKEN": "t",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "1",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1",
    }
    removed = set_environment(shell, {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}, is_own=True)
    assert removed == ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_RUNTIME_ENV_HOOK")
    assert shell == {
        "PATH": "/bin",
        "AWS_SECRET_ACCESS_KEY": "s",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1",
    }


@pytest.mark.parametrize("mode", [None, "token"])
def test_a_cluster_of_the_operator_keeps_the_operators_way_of_access(mode: str | None) -> None:
    shell = {"RAY_AUTH_TOKEN_PATH": "/t", "RAY_USE_TLS": "1", "RAY_RUNTIME_ENV_HOOK": "no.such.hook"}
    if mode is not None:
        shell["RAY_AUTH_MODE"] = mode
    assert set_environment(shell, joining_environment(shell), is_own=False) == ("RAY_RUNTIME_ENV_HOOK",)
    assert shell == {
        "RAY_AUTH_TOKEN_PATH": "/t",
        "RAY_USE_TLS": "1",
        "RAY_AUTH_MODE": mode or "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }


def test_the_current_folder_is_another_one_for_a_while_even_if_the_users_is_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, private = tmp_path / "user", tmp_path / "private"
    before.mkdir()
    private.mkdir()
    monkeypatch.chdir(before)
    with current_folder(private):
        assert Path.cwd() == private
    assert Path.cwd() == before
    before.rmdir()
    with current_folder(private):
        assert Path.cwd() == private


def ray_logs(folder: Path, **texts: str) -> None:
    logs = folder / "session_2026" / "logs"
    logs.mkdir(parents=True)
    for number, (name, text) in enumerate(texts.items()):
        path = logs / f"{name}.out"
        path.write_text(text)
        os.utime(path, (number, number))


def test_a_failure_of_ray_quotes_rays_log_and_keeps_it(tmp_path: Path) -> None:
    folder, state = tmp_path / "ray", tmp_path / "state"
    state.mkdir()
    gcs = "[2026-01-01 00:00:00,1 I 1 1] gcs.cc:1: fine\n[2026-01-01 00:00:01,1 E 1 1] gcs.cc:2: No space left\n"
    raylet = "[state-dump] - num failed / plasma error: 0\nthe last one\n"
    ray_logs(folder, gcs_server=gcs, raylet=raylet, empty="")
    failure = with_ray_log(RayFailedError("Ray does not start: timed out"), folder, state)
    assert str(failure).startswith("Ray does not start: timed out; Ray's log is kept in ")
    assert str(failure).endswith(
        "it ends: | gcs_server.out: [2026-01-01 00:00:01,1 E 1 1] gcs.cc:2: No space left"
    )
    assert {path.name: path.read_text() for path in (state / KEPT_FOLDER).iterdir()} == {
        "gcs_server.out": gcs,
        "raylet.out": raylet,
    }


def test_a_log_without_errors_is_quoted_by_its_last_line_and_replaces_the_log_before(tmp_path: Path) -> None:
    folder, state = tmp_path / "ray", tmp_path / "state"
    (state / KEPT_FOLDER).mkdir(parents=True)
    (state / KEPT_FOLDER / "older.out").write_text("older")
    ray_logs(folder, raylet="x" * MOST_FILE_BYTES + "\nthe last one\n")
    failure = with_ray_log(RayFailedError("it ended"), folder, state)
    assert str(failure).endswith("; it ends: | raylet.out: the last one")
    (kept,) = (state / KEPT_FOLDER).iterdir()
    assert kept.stat().st_size == MOST_FILE_BYTES


def test_a_log_that_cannot_be_kept_is_quoted_still(tmp_path: Path) -> None:
    folder, state = tmp_path / "ray", tmp_path / "state"
    ray_logs(folder, raylet="the last one\n")
    said = str(with_ray_log(RayFailedError("it ended"), folder, state))
    assert "Ray's log cannot be kept (No such file or directory); it ends: | raylet.out: the last one" in said
    assert str(with_ray_log(RayFailedError("it ended"), state, state)) == "it ended; Ray has written no log"
