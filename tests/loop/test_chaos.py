"""Three of the hundred kills that `tools/chaos.py` is run with before a release."""

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

pytestmark = [pytest.mark.loop, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_three_kills(tmp_path):
    model, out = tmp_path / "model", tmp_path / "chaos"
    made = subprocess.run(
        [sys.executable, "tools/make_tiny_model.py", "--untrained", "--output", str(model)], cwd=ROOT, check=False
    )
    assert made.returncode == 0
    command = [
        *(sys.executable, "tools/chaos.py", "--kills", "3", "--steps", "8", "--pace", "1", "--model", str(model)),
        *("--output", str(out), "--without-reference"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kills = [orjson.loads(line) for line in (out / "chaos.jsonl").read_bytes().splitlines()]
    assert len(kills) == 3 and all(kill["wrong"] == [] for kill in kills)
    assert done.stdout.splitlines()[-1].startswith("PASS: 3 kills")
