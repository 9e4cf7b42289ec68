"""What a run leaves on disk, tells, and replays."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """What is kept on disk, and where a run continues."""

    save: str | None = None
    """Folder for checkpoints; unset means `<output-dir>/checkpoints`."""
    save_interval: int | None = None
    """Save after every so many steps and after the last; unset saves after the last step only."""
    keep_checkpoints: int | None = None
    """Keep this many of the newest complete checkpoints; unset keeps all."""
    load: str | None = None
    """Checkpoint folder to continue from; unset looks into the folder of `--save`."""
    ckpt_step: int | None = None
    """Continue from this step's checkpoint instead of the newest complete one."""
    no_load_optim: bool = False
    """Take only weights from the checkpoint; optimizer and schedule start anew."""
    save_hf: str | None = None
    """Also export a Hugging Face checkpoint here at every save; `{rollout_id}` becomes the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig:
    """What the run tells, and where."""

    output_dir: str | None = None
    """Run folder; unset means `runs/<model>-<time>`. Starting again with the same folder resumes it."""
    use_wandb: bool = False
    """Also log to Weights & Biases."""
    wandb_mode: Literal["online", "offline", "disabled"] = "online"
    """`offline` writes under the run folder and needs no account."""
    wandb_project: str = "rlkit"
    """Project name there."""
    wandb_group: str | None = None
    """Group name there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DebugConfig:
    """Half runs and replays."""

    dry_run: bool = False
    """Print the resolved configuration, the layout and the batch arithmetic, then exit; needs neither GPU nor Ray."""
    save_debug_rollout_data: str | None = None
    """Write each rollout to this path; `{rollout_id}` becomes the step."""
    load_debug_rollout_data: str | None = None
    """Train on rollouts read from this path instead of generating; starts no engine."""
    debug_rollout_only: bool = False
    """Generate and grade, do not train."""
    debug_train_only: bool = False
    """Train without engines; needs `--load-debug-rollout-data`."""
