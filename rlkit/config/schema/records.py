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
    """Checkpoint folder to start from; unset looks into the folder of `--save`. A run that has checkpoints of its own
    there continues from those."""
    ckpt_step: int | None = None
    """Continue from this step's checkpoint instead of the newest complete one."""
    no_load_optim: bool = False
    """Take only weights from the checkpoint; optimizer and schedule start anew."""
    finetune: bool = False
    """Take only the weights from the checkpoint of `--load`, for a new run: steps, optimizer, schedule and the place in
    the prompt file begin anew. Started again, the run continues from checkpoints of its own."""
    async_save: bool = False
    """Write a checkpoint while the next step runs: training waits only for a copy in host memory, which takes as much
    of it as the checkpoint is large. It counts from when it is complete."""
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
    wandb_team: str | None = None
    """Team (entity) there; unset means the account's own."""
    wandb_run_name: str | None = None
    """Name of the run there; unset means that of the run folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig:
    """Where a training rank spends its time and memory. Files go to `<run folder>/profile`."""

    use_pytorch_profiler: bool = False
    """Record the training calls of some steps with torch's profiler: one Chrome trace for each step and rank."""
    profile_step_start: int = 10
    """First recorded step."""
    profile_step_end: int = 12
    """The step before this one is the last recorded."""
    profile_ranks: tuple[int, ...] = ()
    """Training ranks that record, also with `--record-memory-history`; unset means rank 0."""
    record_memory_history: bool = False
    """Remember every CUDA allocation with its stack and write a snapshot for https://pytorch.org/memory_viz, also when
    memory runs out."""
    memory_snapshot_dir: str | None = None
    """Folder of the snapshots; unset means the profile folder."""
    memory_snapshot_path: str = "snapshot.pickle"
    """Name of the snapshot; rank and step go before its suffix."""
    memory_snapshot_num_steps: int = 3
    """Steps after which the snapshot is written and recording ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DebugConfig:
    """Half runs and replays."""

    dry_run: bool = False
    """Print the resolved configuration, the layout and the batch arithmetic, then exit; needs neither GPU nor Ray."""
    probe: bool = False
    """Load the model, train one step on packs of the greatest length and make one weight update, without engines or
    rollouts; print the memory that was estimated beside the measured, then exit."""
    save_debug_rollout_data: str | None = None
    """Write each rollout to this path; `{rollout_id}` becomes the step."""
    load_debug_rollout_data: str | None = None
    """Train on rollouts read from this path instead of generating; starts no engine."""
    debug_rollout_only: bool = False
    """Generate and grade, do not train."""
    debug_train_only: bool = False
    """Train without engines; needs `--load-debug-rollout-data`."""
