"""Engines and router answer only to those who know the run's secret, and the secret stands on no command line."""

import asyncio
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from rlkit.config.schema import ClusterConfig, EngineConfig, ModelConfig, RunConfig
from rlkit.engines.access import (
    TOKEN_VARIABLE,
    call_headers,
    current_token,
    forget_token,
    is_allowed,
    make_token,
    module_command,
)
from rlkit.engines.base import EngineSlot, build_launch, free_port
from rlkit.engines.client import EngineClient, RouterClient
from rlkit.orchestration.engine_process import wait_until_ready
from rlkit.orchestration.processes import ServerProcess
from rlkit.orchestration.router import register_engines, start_router
from rlkit.types.errors import EngineError
from rlkit.types.generation import GenerateRequest, SamplingParams

REQUEST = GenerateRequest(
    rid="a", input_ids=[1, 2, 3], sampling=SamplingParams(max_new_tokens=4, ignore_eos=True), seed=1
)
CONTROL_CALLS = (
    ("POST", "/pause_generation"),
    ("POST", "/update_weights_from_disk"),
    ("POST", "/update_weights_from_tensor"),
    ("POST", "/abort_request"),
    ("POST", "/flush_cache"),
    ("POST", "/generate"),
    ("GET", "/model_info"),
    ("GET", "/server_info"),
)


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    make_token()
    token = os.environ[TOKEN_VARIABLE]
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    return token


def test_every_run_has_another_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    seen: set[str | None] = set()
    for _ in range(3):
        make_token()
        seen.add(current_token())
        forget_token()
    assert len(seen) == 3 and all(token is not None and len(token) >= 24 for token in seen)
    assert current_token() is None and call_headers() == {}


def test_a_secret_that_begins_with_a_dash_is_one_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A user's own API key may be anything; a module that prints its arguments stands for the server."""
    monkeypatch.setenv(TOKEN_VARIABLE, "-dashed")
    (tmp_path / "show_arguments.py").write_text("import sys; print(sys.argv[1:])")
    command = [*module_command("show_arguments"), "--port", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.strip() == "['--port', '1', '--api-key=-dashed']"


def test_a_secret_that_is_there_is_kept(secret: str):
    make_token()
    assert current_token() == secret


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", "Basic {}", "{}", "Bearer {}x"])
def test_wrong_headers_are_turned_away(secret: str, header: str):
    assert not is_allowed("/pause_generation", {"authorization": header.format(secret)})


def test_right_headers_and_health_are_let_in(secret: str):
    assert is_allowed("/pause_generation", {"authorization": f"Bearer {secret}"})
    assert is_allowed("/health", {})


def test_without_a_secret_everybody_is_let_in(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert is_allowed("/pause_generation", {})
    assert module_command("x.y")[1:] == ["-m", "x.y"]


@pytest.fixture(
    params=[
        "embedded",
        pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.timeout(600)]),
    ]
)
def fleet(
    request: pytest.FixtureRequest, secret: str, base_folder: Path, tmp_path: Path
) -> Iterator[tuple[str, str, int]]:
    """(engine's URL, router's URL, id of the process that started both) of a run with a secret."""
    del secret
    if request.param == "sglang" and not os.environ.get("RLKIT_SGLANG_PYTHON"):
        pytest.skip("RLKIT_SGLANG_PYTHON is unset")
    cfg = RunConfig(
        model=ModelConfig(hf_checkpoint=str(base_folder), dtype="float32"),
        cluster=ClusterConfig(colocate=True),
        engine=EngineConfig(rollout_engine=request.param),
    )
    slot = EngineSlot(
        index=0,
        host="127.0.0.1",
        port=free_port("127.0.0.1"),
        num_gpus=1,
        base_gpu_id=0,
        device="cpu",
        num_threads=1,
        weight_version=1,
        seed=1,
    )
    spec = build_launch(cfg, slot)
    engine = ServerProcess(spec.argv, env=spec.env, log_path=tmp_path / "engine.log")
    router, router_url = start_router(cfg, "127.0.0.1", tmp_path)
    url = f"http://127.0.0.1:{slot.port}"
    try:
        asyncio.run(wait_until_ready(url, engine, 0, timeout_s=480.0))
        register_engines(router_url, [url], router)
        yield url, router_url, os.getpid()
    finally:
        router.stop()
        engine.stop()


async def status_of(method: str, url: str, headers: dict[str, str]) -> int:
    async with aiohttp.ClientSession() as session, session.request(method, url, headers=headers, json={}) as answer:
        return answer.status


def test_strangers_are_turned_away_and_the_run_is_not(fleet: tuple[str, str, int], secret: str, tmp_path: Path):
    url, router_url, parent = fleet

    async def ours() -> None:
        async with RouterClient(router_url, timeout_s=60.0) as router, EngineClient(url, timeout_s=60.0) as engine:
            assert len((await router.generate(REQUEST)).output_ids) == 4
            await engine.pause("abort")
            await engine.resume()
            assert (await engine.model_info()).weight_version == 1
            assert await router.workers() == [url]

    asyncio.run(ours())
    for method, endpoint in CONTROL_CALLS:
        for headers in ({}, {"Authorization": "Bearer guessed"}):
            assert asyncio.run(status_of(method, url + endpoint, headers)) == 401, endpoint
    for method, endpoint in (("POST", "/generate"), ("POST", "/workers"), ("GET", "/workers")):
        assert asyncio.run(status_of(method, router_url + endpoint, {})) == 401, f"router {endpoint}"

    words = [word for child in psutil.Process(parent).children(recursive=True) for word in child.cmdline()]
    assert any("sglang_router" in word for word in words), "the processes of the run are looked at"
    assert not any(secret in word for word in words)
    for log in tmp_path.glob("*.log"):
        assert secret not in log.read_text(errors="replace"), log


def test_a_client_without_the_secret_says_so(fleet: tuple[str, str, int], monkeypatch: pytest.MonkeyPatch):
    url, _, _ = fleet
    monkeypatch.delenv(TOKEN_VARIABLE)

    async def call() -> None:
        async with EngineClient(url, timeout_s=10.0) as client:
            await client.model_info()

    with pytest.raises(EngineError, match="status 401"):
        asyncio.run(call())


def test_servers_of_a_private_run_cannot_be_reached_from_outside(fleet: tuple[str, str, int]):
    """They listen on the loopback interface alone. SGLang's own process group also listens elsewhere, at another port
    that speaks no HTTP: torch's store cannot be bound.
    """
    url, router_url, parent = fleet
    ports = {int(address.rsplit(":", 1)[1]) for address in (url, router_url)}
    listening = [
        connection
        for child in psutil.Process(parent).children(recursive=True)
        for connection in child.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert ports <= {connection.laddr.port for connection in listening}
    for connection in listening:
        if connection.laddr.port in ports:
            assert connection.family == socket.AF_INET and connection.laddr.ip == "127.0.0.1", connection.laddr
