"""The quick start's task by asynchronous training: both modes get as far as taking turns does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from quickstart_check import MAX_BEFORE, MIN_AFTER

pytestmark = [pytest.mark.loop, pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mode", ["one-step", "full"])
def test_the_tiny_model_learns_to_add(tmp_path, mode):
    command = ["bash", "scripts/run-tiny-async.sh", "--async-mode", mode, "--output-dir", str(tmp_path / "run")]
    environment = os.environ | {"PYTHON": sys.executable, "SEED": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    # PASS also needs a quiet machine: the accuracy is what counts here
    found = re.search(r"greedy accuracy (\d\.\d+) -> (\d\.\d+) on 512", done.stdout)
    assert found is not None, done.stdout[-2000:] + done.stderr[-2000:]
    before, after = map(float, found.groups())
    assert before <= MAX_BEFORE and after >= MIN_AFTER
