"""What must stay cheap to import."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "ray", "transformers", "sglang", "pyarrow", "matplotlib", "wandb", "sympy")


def heavy_after(statement: str) -> list[str]:
    code = f"import sys; {statement}; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.split()


@pytest.mark.parametrize(
    "module", ["rlkit.config.load", "rlkit.cli.entry", "rlkit.cli.dry_run", "rlkit.orchestration.layout"]
)
def test_import_is_light(module):
    assert heavy_after(f"import {module}") == []


def test_rewards_need_neither_torch_nor_ray():
    loaded = heavy_after("from rlkit.rewards import grade; assert grade('math', r'so \\\\boxed{1/2}', '0.5') == 1.0")
    assert not {"torch", "ray", "transformers"} & set(loaded)


def test_help_answers_within_a_second():
    fastest = float("inf")
    for _ in range(3):  # the best of three: the machine may be busy
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "train.py", "--help"], capture_output=True, text=True, cwd=ROOT)
        fastest = min(fastest, time.perf_counter() - start)
        assert done.returncode == 0 and "--hf-checkpoint" in done.stdout
    assert fastest < 1.0
