"""The whole run, and the numbers that follow from it."""

from dataclasses import dataclass, field

from rlkit.config.schema.algo import AlgoConfig
from rlkit.config.schema.cluster import ClusterConfig
from rlkit.config.schema.engines import EngineConfig, SyncConfig
from rlkit.config.schema.inputs import DataConfig, ModelConfig
from rlkit.config.schema.records import CheckpointConfig, DebugConfig, LoggingConfig
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
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def samples_per_rollout(self) -> int:
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps per rollout."""
        if self.train.num_steps_per_rollout is not None:
            return self.train.num_steps_per_rollout
        if self.train.global_batch_size is not None:
            return self.samples_per_rollout // self.train.global_batch_size
        return 1

    @property
    def batch_size(self) -> int:
        """Samples per optimizer step (`--global-batch-size`, or derived)."""
        return self.samples_per_rollout // self.steps_per_rollout

    @property
    def needs_reference(self) -> bool:
        return self.algo.use_kl_loss and self.algo.loss_type == "policy_loss"

    @property
    def is_sft(self) -> bool:
        return self.algo.loss_type == "sft_loss"

    @property
    def starts_engines(self) -> bool:
        return self.debug.load_debug_rollout_data is None and not self.debug.debug_train_only and not self.is_sft

    @property
    def starts_trainer(self) -> bool:
        return not self.debug.debug_rollout_only
