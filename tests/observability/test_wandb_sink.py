import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import MagicMock

import psutil
import pytest

from rlkit.observability.metrics import MetricLog, WandbSink


def test_without_wandb_the_error_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install 'rlkit\[wandb\]'"):
        WandbSink(tmp_path, mode="offline", project="rlkit")


def test_team_and_name_reach_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By a stand-in for the package, which records what it is asked for."""
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    WandbSink(tmp_path, mode="offline", project="p", team="us", name="third try")
    WandbSink(tmp_path, mode="offline", project="p")
    first, second = (call.kwargs for call in wandb.init.call_args_list)
    assert (first["entity"], first["name"]) == ("us", "third try")
    assert (second["entity"], second["name"]) == (None, tmp_path.name)


def test_offline_run_is_written_under_the_run_folder_and_resumes_its_id(tmp_path: Path):
    pytest.importorskip("wandb")
    ids = []
    for steps in (range(0, 3), range(1, 4)):
        with MetricLog([WandbSink(tmp_path, mode="offline", project="rlkit", config={"lr": 1e-6})]) as log:
            for step in steps:
                log.write(step, {"train/loss": 1.0 / (step + 1)})
        ids.append((tmp_path / "wandb_id").read_text())
    assert ids[0] == ids[1]
    assert list(tmp_path.glob(f"wandb/offline-run-*-{ids[0]}/run-{ids[0]}.wandb"))


def test_the_service_process_ends_with_a_killed_run(tmp_path: Path):
    pytest.importorskip("wandb")
    code = (
        "import sys, time; from pathlib import Path; from rlkit.observability.metrics import WandbSink\n"
        "sink = WandbSink(Path(sys.argv[1]), mode='offline', project='rlkit'); sink.write(0, {'x': 1.0})\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    run = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None and run.stdout.readline() == "ready\n"
    children = psutil.Process(run.pid).children(recursive=True)
    assert children, "wandb runs no service process any more: this test has lost its object"
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    deadline = time.monotonic() + 10
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
        assert time.monotonic() < deadline, f"still running: {children}"
        time.sleep(0.1)
