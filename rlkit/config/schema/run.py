"""The whole run, and the numbers that follow from it."""

from dataclasses import dataclass, field

from rlkit.config.schema.agents import AgentConfig
from rlkit.config.schema.algo import AlgoConfig, DistillConfig, MismatchConfig
from rlkit.config.schema.architecture import ArchitectureConfig
from rlkit.config.schema.asynchronous import AsyncConfig
from rlkit.config.schema.cluster import ClusterConfig
from rlkit.config.schema.critic import CriticConfig
from rlkit.config.schema.engines import EngineConfig, SyncConfig
from rlkit.config.schema.fsdp import FsdpConfig, LoraConfig, PrecisionConfig
from rlkit.config.schema.inputs import DataConfig, ModelConfig
from rlkit.config.schema.megatron import MegatronConfig
from rlkit.config.schema.preferences import DpoConfig
from rlkit.config.schema.records import CheckpointConfig, DebugConfig, LoggingConfig, ProfileConfig
from rlkit.config.schema.recovery import RecoveryConfig
from rlkit.config.schema.report import ReportConfig
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
    agent: AgentConfig = field(default_factory=AgentConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    dpo: DpoConfig = field(default_factory=DpoConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    architecture: ArchitectureConfig = field(default_factory=ArchitectureConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    async_training: AsyncConfig = field(default_factory=AsyncConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
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
    def schedule_end(self) -> int | None:
        """Optimizer step at which the learning rate's decay ends: `--lr-decay-iters`, else the end of the run; None
        where that is not known."""
        if self.optimizer.lr_decay_iters is not None or self.rollout.num_rollout is None:
            return self.optimizer.lr_decay_iters
        critic_alone = self.critic.num_critic_only_steps if self.needs_critic else 0
        return (self.rollout.num_rollout - critic_alone) * self.steps_per_rollout

    @property
    def warmup_steps(self) -> int:
        """Optimizer steps of warm-up; `--lr-warmup-fraction` of an unknown end is none."""
        fraction = self.optimizer.lr_warmup_fraction
        if fraction is None:
            return self.optimizer.lr_warmup_iters
        return round(fraction * (self.schedule_end or 0))

    @property
    def data_parallel_size(self) -> int:
        """Training ranks that get different samples."""
        shared = self.train.context_parallel_size * self.megatron.model_ranks
        return self.cluster.actor_num_gpus // shared

    def data_rank_of(self, rank: int) -> int:
        """Which share of the samples a training rank gets. Ranks of one share: neighbours under context and tensor
        parallelism, and one in every pipeline stage."""
        neighbours = self.train.context_parallel_size * self.megatron.tensor_model_parallel_size
        return rank // neighbours % max(1, self.data_parallel_size)

    @property
    def batch_size(self) -> int:
        """Samples per optimizer step (`--global-batch-size`, or derived)."""
        return self.samples_per_rollout // self.steps_per_rollout

    @property
    def needs_reference(self) -> bool:
        has_kl = self.algo.use_kl_loss or self.algo.kl_coef != 0
        return self.is_dpo or (has_kl and self.algo.loss_type == "policy_loss")

    @property
    def uses_lora(self) -> bool:
        return self.lora.lora_rank > 0

    @property
    def reference_is_base(self) -> bool:
        """Whether the reference is the policy without its adapters: no second copy is loaded."""
        return self.uses_lora and self.model.ref_load in (None, self.model.hf_checkpoint)

    @property
    def dtype_name(self) -> str:
        """`--dtype`, or float16 with `--fp16`."""
        return "float16" if self.precision.fp16 else self.model.dtype

    @property
    def needs_teacher(self) -> bool:
        return self.distill.use_opd and self.algo.loss_type == "policy_loss"

    @property
    def needs_critic(self) -> bool:
        return self.algo.advantage_estimator == "ppo" and self.algo.loss_type == "policy_loss"

    @property
    def is_sft(self) -> bool:
        return self.algo.loss_type == "sft_loss"

    @property
    def is_dpo(self) -> bool:
        return self.algo.loss_type == "dpo_loss"

    @property
    def is_supervised(self) -> bool:
        """Whether responses stand in the data: nothing is generated or graded."""
        return self.is_sft or self.is_dpo

    @property
    def keeps_messages(self) -> bool:
        """Whether somebody needs the messages of a prompt, not only its tokens."""
        return self.agent.has_agent or self.reward.rm_model is not None

    @property
    def starts_engines(self) -> bool:
        return self.debug.load_debug_rollout_data is None and not self.debug.debug_train_only and not self.is_supervised

    @property
    def starts_engine_processes(self) -> bool:
        """Whether the engines of the run are its own."""
        return self.starts_engines and not self.engine.rollout_external_engine_addrs

    @property
    def starts_trainer(self) -> bool:
        return not self.debug.debug_rollout_only

    @property
    def updates_in_flight(self) -> bool:
        """Whether weights may change while training responses are being generated."""
        mode = self.async_training
        return mode.is_full or (mode.is_one_step and self.sync.pause_generation_mode == "retract")
