"""Runs on a Ray cluster that is there already: `ray job submit`, twice, and the Slurm script with a stand-in for Slurm.

Neither needs anything cleaned up by hand, and nothing is ended by name: the cluster of a test is a process of the test.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlkit.observability.metrics import read_metrics
from rlkit.sync.group import free_port

pytestmark = [pytest.mark.loop, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
SRUN = """\
#!/usr/bin/env bash
while [[ "$1" == --* ]]; do shift; done
exec "$@"
"""
"""srun on a cluster of one node: no options, just the command."""


def flags(tiny_model: Path, task: Path, run_dir: Path) -> list[str]:
    parts = [
        "--hf-checkpoint", tiny_model, "--prompt-data", task / "train.jsonl", "--label-key", "label",
        "--custom-rm-path", f"{task / 'reward.py'}:share_of_digits", "--rollout-batch-size", 8,
        "--n-samples-per-prompt", 4, "--rollout-max-response-len", 12, "--num-rollout", 2, "--device", "cpu",
        "--actor-num-gpus-per-node", 1, "--num-gpus-per-node", 2, "--colocate", "--output-dir", run_dir,
    ]  # fmt: skip
    return [str(part) for part in parts]


def steps(run_dir: Path) -> list[int]:
    return [row["step"] for row in read_metrics(run_dir / "metrics.jsonl")]


def outer_port() -> int:
    """A free port outside of the range that Ray gives to its workers."""
    while 10_000 <= (port := free_port("127.0.0.1")) < 20_000:
        pass
    return port


@pytest.fixture
def environment() -> dict[str, str]:
    """Without the address of another cluster, and with a token of its own, as docs/operation.md says."""
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return kept | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RAY_worker_niceness": "0"}


@pytest.fixture
def cluster(environment) -> Iterator[str]:
    """Address of the dashboard of a cluster with two rank slots; afterwards nothing of it is left."""
    port = outer_port()
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # below /tmp: sockets have short names
        with (Path(folder) / "head.log").open("w") as log:
            head = subprocess.Popen(
                [
                    *(*RAY, "start", "--head", "--block", "--disable-usage-stats", "--num-cpus", "2"),
                    *("--resources", '{"rank_slot": 2}', "--node-ip-address", "127.0.0.1", "--port", "0"),
                    *("--dashboard-host", "127.0.0.1", "--dashboard-port", str(port), "--temp-dir", f"{folder}/ray"),
                    *("--dashboard-agent-listen-port", "0", "--ray-client-server-port", str(outer_port())),
                ],
                env=environment, stdout=log, stderr=log,
            )  # fmt: skip
        family: list[psutil.Process] = []
        try:
            wait_for_dashboard(port, head, Path(folder) / "head.log")
            yield f"http://127.0.0.1:{port}"
            family = psutil.Process(head.pid).children(recursive=True)
        finally:
            head.send_signal(signal.SIGTERM)
            head.wait(60.0)
        _, alive = psutil.wait_procs(family, timeout=30.0)
        assert not alive, f"left behind: {alive}"


def wait_for_dashboard(port: int, head: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline and head.poll() is None:
        if answers(f"http://127.0.0.1:{port}/api/version"):
            return
        time.sleep(0.5)
    raise AssertionError(log.read_text()[-4000:])


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5.0).close()
    except urllib.error.HTTPError:
        return True  # it asks for the token
    except OSError:
        return False
    return True


def test_two_jobs_one_after_the_other(cluster, environment, tiny_model, task, tmp_path):
    for name in ("first", "second"):
        run_dir = tmp_path / name
        done = subprocess.run(
            [
                *(*RAY, "job", "submit", "--address", cluster, "--working-dir", str(ROOT), "--"),
                *(sys.executable, "train.py", *flags(tiny_model, task, run_dir)),
            ],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
        assert steps(run_dir) == [0, 1]


def test_slurm_script_on_one_node(environment, tiny_model, task, tmp_path):
    programs, run_dir = tmp_path / "bin", tmp_path / "run"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", "#!/usr/bin/env bash\necho localhost\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    recipe = tmp_path / "recipe.sh"
    recipe.write_text(f'exec "{sys.executable}" train.py "$@"\n')
    del environment["RAY_AUTH_TOKEN"]  # the script makes its own
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        settings = {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "SLURM_JOB_NODELIST": "localhost",
            "RAY_PORT": str(outer_port()),
            "RAY_DASHBOARD_PORT": str(outer_port()),
            "RAY_START_ARGS": f'--num-cpus 2 --resources={{"rank_slot":2}} --temp-dir {folder}/ray '
            f"--dashboard-agent-listen-port 0 --ray-client-server-port {outer_port()}",
        }
        done = subprocess.run(
            ["bash", str(ROOT / "scripts" / "slurm" / "run.sbatch"), str(recipe), *flags(tiny_model, task, run_dir)],
            cwd=ROOT, env=environment | settings, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
        assert steps(run_dir) == [0, 1]
        left = [p for p in psutil.process_iter(["cmdline"]) if f"{folder}/ray" in " ".join(p.info["cmdline"] or [])]
        assert not left, f"left behind: {left}"
