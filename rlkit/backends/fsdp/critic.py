"""PPO's critic inside a training rank: values before the policy moves, and its own optimizer steps. Called by
`backend.py`.

It is on the GPU only while it works; between steps it lies in host memory, so it sleeps whenever the policy does. What
it learns is in `algo/value.py`; optimizer steps are those of `trainer.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rlkit.algo.value import ValueObjective, value_fit
from rlkit.backends.fsdp.checkpoint import TrainerMeta, load_tensors, tensors_to_save
from rlkit.backends.fsdp.frozen import build_module, local_shards, with_column
from rlkit.backends.fsdp.model import ScoringModel, named_shards
from rlkit.backends.fsdp.optimizer import ShardOptimizer
from rlkit.backends.fsdp.stored import stored_shapes
from rlkit.backends.fsdp.trainer import MicroBatch, Trainer
from rlkit.backends.fsdp.value_model import ValueModel, export_critic, load_value_weights
from rlkit.backends.loading import CheckpointReader
from rlkit.backends.schedules import Schedule
from rlkit.backends.sleep import HostSwap
from rlkit.config.schema import LoraConfig, RunConfig
from rlkit.dist.collectives import sum_over_data
from rlkit.dist.groups import RankMesh
from rlkit.observability.spans import Spans
from rlkit.types.errors import CheckpointError, TrainError
from rlkit.types.fingerprints import CRITIC
from rlkit.types.ranks import MetricSet


class CriticTrainer(Trainer):
    """Takes optimizer steps on values instead of log-probs."""

    def __init__(
        self,
        cfg: RunConfig,
        *,
        policy: ScoringModel,
        optimizer: ShardOptimizer,
        mesh: RankMesh,
        spans: Spans,
        schedule: Schedule,
        resumed: TrainerMeta | None,
    ) -> None:
        super().__init__(
            cfg, policy=policy, optimizer=optimizer, mesh=mesh, spans=spans, schedule=schedule, resumed=resumed
        )
        self._step_objective = ValueObjective(cfg)

    def _forward(self, model: ScoringModel, micro: MicroBatch) -> tuple[Tensor, ...]:
        batch = micro.batch
        return (model(batch.tokens_T, batch.positions_T, micro.layout, micro.scored_N, micro.predictors_N),)


class Critic:
    """One rank's part of the critic."""

    def __init__(
        self,
        cfg: RunConfig,
        mesh: RankMesh,
        dtype: torch.dtype,
        spans: Spans,
        *,
        policy: ScoringModel,
        resume_from: Path | None,
        meta: TrainerMeta | None,
    ) -> None:
        """Build and fill it, from `resume_from` if that holds a critic, else from `--critic-load` or the policy's
        checkpoint. `meta`: what the checkpoint says of the trainer; `policy` stays on the GPU beside it. Collective.
        """
        self._cfg = cfg = critic_config(cfg)
        self._mesh = mesh
        self._source = CheckpointReader(Path(cfg.critic.critic_load or cfg.model.hf_checkpoint))
        beside = 3 * sum(shard.nbytes for shard in local_shards(policy))  # masters and two moments
        model = build_module(cfg, self._source, mesh, dtype, trainable=True, kind=ValueModel, num_resident_bytes=beside)
        assert isinstance(model, ValueModel)
        self.model = model
        self._optimizer = ShardOptimizer(model, cfg.optimizer)
        self._swap = HostSwap(mesh.device)
        resumed = None
        if resume_from is not None and self._is_in(resume_from):
            with_optimizer = not cfg.checkpoint.no_load_optim
            load_tensors(resume_from, self._named(with_optimizer=with_optimizer), mesh)
            if with_optimizer and meta is not None:
                resumed = replace(meta, optimizer_steps=meta.critic_optimizer_steps, loss_scale=None)
        else:
            load_value_weights(model, self._source, mesh)
        self._trainer = CriticTrainer(
            cfg,
            policy=model,
            optimizer=self._optimizer,
            mesh=mesh,
            spans=spans,
            schedule=Schedule.of(cfg),
            resumed=resumed,
        )
        self._rest()

    @property
    def optimizer_steps(self) -> int:
        """Taken since the start of the run."""
        return self._trainer.optimizer_steps

    @property
    def num_params(self) -> int:
        return sum(shard.numel() for _, shard in named_shards(self.model))

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Inside, the critic is on the device."""
        self._swap.restore()
        yield
        self._rest()

    def with_values(self, updates: list[list[MicroBatch]]) -> list[list[MicroBatch]]:
        """The micro-batches with the values of their tokens, before anything moves. Collective; awake."""
        return [with_column(step, "values_T", self._trainer.score(self.model, step)) for step in updates]

    def train(self, step: int, updates: list[list[MicroBatch]], *, num_loss_tokens: list[int]) -> MetricSet:
        """One optimizer step per update, towards the returns in it. Returns `critic/...`. Collective; awake."""
        metrics = self._fit(updates)
        try:
            trained = self._trainer.train(step, updates, num_loss_tokens=num_loss_tokens)
        except TrainError as error:
            raise TrainError(f"the critic (--critic-lr, --value-clip): {error}") from error
        return metrics | {f"critic/{name.removeprefix('train/')}": value for name, value in trained.items()}

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of it, by name. Awake."""
        return self._named(with_optimizer=True)

    def export(self, step: int) -> None:
        """Write `--critic-save`, if that is set. Collective; awake."""
        path = self._cfg.critic.critic_save
        if path is not None:
            export_critic(self.model, self._mesh, self._source, Path(path.format(rollout_id=step)))

    def _named(self, *, with_optimizer: bool) -> dict[str, Tensor]:
        tensors = tensors_to_save(self.model, self._optimizer if with_optimizer else None)
        return {f"{CRITIC}{name}": tensor for name, tensor in tensors.items()}

    def _is_in(self, directory: Path) -> bool:
        if any(name.startswith(CRITIC) for name in stored_shapes(directory)):
            return True
        if self._cfg.critic.critic_load is None:
            raise CheckpointError(
                f"{directory} holds no critic: the run that saved it had another --advantage-estimator. Pass "
                "--critic-load with the checkpoint that the critic shall start from"
            )
        return False

    def _rest(self) -> None:
        self._optimizer.zero_grad()
        if self._mesh.device.type == "cuda":
            self._swap.offload([*local_shards(self.model), *self._optimizer.state_tensors()])
            torch.cuda.empty_cache()

    def _fit(self, updates: list[list[MicroBatch]]) -> MetricSet:
        """How well the values foretold the returns. Every rank of a context-parallel group holds whole rows."""
        values, returns, masks = [], [], []
        for batch in (micro.batch for update in updates for micro in update):
            assert batch.values_T is not None and batch.returns_T is not None
            values.append(batch.values_T)
            returns.append(batch.returns_T)
            masks.append(batch.loss_mask_T)
        fit = value_fit(values, returns, masks, sum_shares=lambda partial: sum_over_data(partial, self._mesh))
        names = ("critic/value_mean", "critic/return_mean", "critic/explained_variance")
        return dict(zip(names, fit.tolist(), strict=True))


def critic_config(cfg: RunConfig) -> RunConfig:
    """The run as the critic's trainer sees it: its own rate and warm-up, all of its parameters trained, and optimizer
    steps from the first rollout on.
    """
    critic, optimizer = cfg.critic, cfg.optimizer
    lr = optimizer.lr if critic.critic_lr is None else critic.critic_lr
    own = replace(
        optimizer,
        lr=lr,
        min_lr=min(optimizer.min_lr, lr),
        lr_warmup_iters=critic.critic_lr_warmup_iters,
        lr_warmup_fraction=None,
        lr_warmup_init=min(optimizer.lr_warmup_init, lr),
        only_train_params_name_list=(),
        freeze_params_name_list=(),
    )
    return replace(cfg, optimizer=own, lora=LoraConfig(), critic=replace(critic, num_critic_only_steps=0))
