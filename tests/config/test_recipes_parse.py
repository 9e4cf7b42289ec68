"""Every recipe hands its arguments on and plans on a machine without GPUs, models and data."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "scripts").glob("run-*.sh"))


def run(recipe: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The recipe with this interpreter first in the path, so that `python train.py` finds rlkit."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "100",
    }
    return subprocess.run(
        ["bash", str(recipe), *arguments], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=60
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_recipe_plans_without_anything_installed(recipe: Path):
    done = run(recipe, "--dry-run", "--rollout-seed", "4711")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The configuration is consistent." in done.stdout
    assert any(line.split()[:2] == ["rollout_seed", "4711"] for line in done.stdout.splitlines()), "arguments are lost"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_recipe_refuses_what_it_does_not_know(recipe: Path):
    done = run(recipe, "--dry-run", "--rollout-sead", "1")
    assert done.returncode == 2 and "did you mean --rollout-seed?" in done.stderr
