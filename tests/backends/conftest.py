"""Fixtures of the backend tests; the functions behind them are in `fsdp_setup.py`."""

from pathlib import Path

import pytest
from fsdp_setup import save_checkpoint_dir, spread_out, tiny_llama, tiny_qwen3

from rlkit.dist.groups import destroy_process_group


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny Hugging Face checkpoints, by name."""
    root = tmp_path_factory.mktemp("checkpoints")
    models = {
        "qwen3": spread_out(tiny_qwen3()),
        "qwen3-other": spread_out(tiny_qwen3(), seed=8),
        "qwen3-untied": spread_out(tiny_qwen3(tied=False)),
        "llama": spread_out(tiny_llama()),
    }
    return {name: save_checkpoint_dir(model, root / name) for name, model in models.items()}


@pytest.fixture(autouse=True)
def leave_process_group():
    """Every test starts outside of any process group."""
    yield
    destroy_process_group()
