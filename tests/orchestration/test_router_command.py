"""What the router is started with."""

from pathlib import Path

import pytest

from rlkit.config.schema import EngineConfig, RunConfig
from rlkit.orchestration import router


class Started:
    """Stands for the process; keeps its command."""

    argv: tuple[str, ...] = ()

    def __init__(self, argv: list[str], **_: object) -> None:
        Started.argv = tuple(argv)


@pytest.mark.parametrize("policy", ["round_robin", "cache_aware"])
def test_policy_and_timeout_are_the_runs(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(router, "ServerProcess", Started)
    cfg = RunConfig(engine=EngineConfig(router_policy=policy, engine_timeout_s=77.0))  # pyright: ignore[reportArgumentType]
    _, url = router.start_router(cfg, "127.0.0.1", tmp_path)
    words = dict(zip(Started.argv, Started.argv[1:], strict=False))
    assert words["--policy"] == policy and words["--request-timeout-secs"] == "77"
    assert words["--host"] == words["--prometheus-host"] == "127.0.0.1" and url.startswith("http://127.0.0.1:")
