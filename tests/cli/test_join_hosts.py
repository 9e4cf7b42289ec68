"""scripts/join_hosts.sh with a stand-in for ssh and Python: what is started where, and what is refused."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def machines(tmp_path: Path) -> Path:
    """A folder whose `ssh` and `python` write down how they were called, and with which token."""
    for name in ("ssh", "python"):
        program = tmp_path / name
        program.write_text(
            f"#!/bin/bash\n{'read -r token' if name == 'ssh' else 'token=$RAY_AUTH_TOKEN'}\n"
            f'printf "%s\\n" "{name} [$token] $*" >>{tmp_path}/calls\n'
        )
        program.chmod(0o755)
    return tmp_path


def join(machines: Path, hosts: str | None, **more: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{machines}:{os.environ['PATH']}", "PYTHON": str(machines / "python")} | more
    environment.pop("HOSTS", None)
    if hosts is not None:
        (machines / "hosts.txt").write_text(hosts)
        environment["HOSTS"] = str(machines / "hosts.txt")
    script = "set -euo pipefail; here=python; source scripts/join_hosts.sh; echo went on"
    return subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=20, check=False
    )


def test_every_node_joins_the_first(machines):
    done = join(
        machines, "# two racks\nnode-a\n\n  node-b # slow disk\nnode-c\n", RAY_AUTH_TOKEN="secret", RAY_PORT="7000"
    )
    assert done.returncode == 0 and "went on" in done.stdout, done.stderr
    head, *joined, waiting = (machines / "calls").read_text().replace("\n             exec", " exec").splitlines()
    assert head == (
        "python [secret] -m ray.scripts.scripts start --head --disable-usage-stats --node-ip-address node-a --port 7000"
    )
    assert [line.split()[:5] for line in joined] == [
        ["ssh", "[secret]", "-o", "BatchMode=yes", host] for host in ("node-b", "node-c")
    ]
    for line in joined:
        assert f"cd {ROOT} " in line and line.endswith("start --disable-usage-stats --address node-a:7000")
        assert "secret" not in line.removeprefix("ssh [secret]"), "the token must not be an argument"
    assert waiting == "python [secret] scripts/slurm/wait_for_nodes.py node-a:7000 3 300"


def test_without_a_file_nothing_is_started(machines):
    done = join(machines, None)
    assert done.returncode == 0 and not (machines / "calls").exists()


@pytest.mark.parametrize(
    "hosts, message", [("# nobody\n", "names no node"), ("a\nb\na\n", "names a twice; a node runs Ray once")]
)
def test_what_is_refused(machines, hosts, message):
    done = join(machines, hosts)
    assert done.returncode == 2 and message in done.stderr and not (machines / "calls").exists()


def test_a_file_that_is_not_there(machines):
    done = join(machines, None, **{})
    assert done.returncode == 0
    environment = os.environ | {"HOSTS": "/nowhere/hosts"}
    script = "here=python; source scripts/join_hosts.sh"
    missing = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert missing.returncode == 2 and "HOSTS=/nowhere/hosts does not exist" in missing.stderr
