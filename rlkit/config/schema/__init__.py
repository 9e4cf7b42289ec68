"""Every setting of a run, as a tree of frozen dataclasses. A field is called what its flag is called
(`rollout_batch_size` <-> `--rollout-batch-size`).

The command line (`config/load.py`) flattens the tree into slime-compatible flags; `config/rules/` checks fields
against each other. Nothing here is ever edited after parsing: derived numbers are properties. These modules import the
standard library only.
"""

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
from rlkit.config.schema.run import RunConfig
from rlkit.config.schema.training import OptimizerConfig, TrainConfig

__all__ = [
    "AgentConfig",
    "AlgoConfig",
    "ArchitectureConfig",
    "AsyncConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "CriticConfig",
    "DataConfig",
    "DebugConfig",
    "DistillConfig",
    "DpoConfig",
    "EngineConfig",
    "EvalConfig",
    "FsdpConfig",
    "LoggingConfig",
    "LoraConfig",
    "MegatronConfig",
    "MismatchConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "ProfileConfig",
    "RecoveryConfig",
    "ReportConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SyncConfig",
    "TrainConfig",
]
