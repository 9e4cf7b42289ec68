"""Two runs never share a folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlkit.orchestration.run_lock import exclusive
from rlkit.types.errors import CheckpointError

HOLD = """
import sys, time
from pathlib import Path
from rlkit.orchestration.run_lock import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_run_is_refused_until_the_first_is_gone_however_it_ends(tmp_path: Path) -> None:
    first = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, cwd=os.getcwd())
    assert first.stdout is not None and first.stdout.readline() == b"held\n"
    with pytest.raises(CheckpointError, match=f"in use by another run .process {first.pid} on "), exclusive(tmp_path):
        pass
    first.kill()
    first.wait()
    with exclusive(tmp_path):
        pass
    with exclusive(tmp_path):
        pass


def test_one_folder_under_two_names_is_locked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with exclusive(Path("run"), tmp_path / "run", tmp_path / "link", tmp_path / "run" / "checkpoints"):
        assert (tmp_path / "run" / "checkpoints").is_dir()
