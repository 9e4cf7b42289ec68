"""The whole run, and the numbers that follow from it."""

from dataclasses import dataclass, field

from rlkit.config.schema.algo import AlgoConfig, DistillConfig, MismatchConfig
from rlkit.config.schema.cluster import ClusterConfig
from rlkit.config.schema.engines import EngineConfig, SyncConfig
from rlkit.config.schema.inputs import DataConfig, ModelConfig
from rlkit.config.schema.records import CheckpointConfig, DebugConfig, LoggingConfig, ProfileConfig
from rlkit.config.schema.recovery import RecoveryConfig
from rlkit.config.schema.rollout import EvalConfig, RewardConfig, RolloutConfig
from rlkit.config.schema.training import OptimizerConfig, TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The whole run."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def samples_per_rollout(self) -> int:
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    @property
    def over_sampling_batch_size(self) -> int:
        """Groups started at once."""
        return self.rollout.over_sampling_batch_size or self.rollout.rollout_batch_size

    @property
    def max_groups_tried(self) -> int:
        """Groups that one step may start before it gives up."""
        bound = self.rollout.dynamic_sampling_max_groups
        return bound or max(10 * self.rollout.rollout_batch_size, self.over_sampling_batch_size)

    @property
    def cuts_groups_off(self) -> bool:
        """Whether groups may still run when enough are kept."""
        over_samples = self.over_sampling_batch_size > self.rollout.rollout_batch_size
        return over_samples or self.rollout.dynamic_sampling_filter_path is not None

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps per rollout."""
        if self.train.num_steps_per_rollout is not None:
            return self.train.num_steps_per_rollout
        if self.train.global_batch_size is not None:
            return self.samples_per_rollout // self.train.global_batch_size
        return 1

    @property
    def data_parallel_size(self) -> int:
        """Training ranks that get different samples."""
        return self.cluster.actor_num_gpus // self.train.context_parallel_size

    @property
    def batch_size(self) -> int:
        """Samples per optimizer step (`--global-batch-size`, or derived)."""
        return self.samples_per_rollout // self.steps_per_rollout

    @property
    def needs_reference(self) -> bool:
        return (self.algo.use_kl_loss or self.algo.kl_coef != 0) and self.algo.loss_type == "policy_loss"

    @property
    def needs_teacher(self) -> bool:
        return self.distill.use_opd and self.algo.loss_type == "policy_loss"

    @property
    def is_sft(self) -> bool:
        return self.algo.loss_type == "sft_loss"

    @property
    def starts_engines(self) -> bool:
        return self.debug.load_debug_rollout_data is None and not self.debug.debug_train_only and not self.is_sft

    @property
    def starts_engine_processes(self) -> bool:
        """Whether the engines of the run are its own."""
        return self.starts_engines and not self.engine.rollout_external_engine_addrs

    @property
    def starts_trainer(self) -> bool:
        return not self.debug.debug_rollout_only
