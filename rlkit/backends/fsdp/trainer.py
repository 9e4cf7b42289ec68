"""One `train` call of one rank: score old and reference log-probs, then an optimizer step per update. Called by
`backend.py`.

Invariants: every rank makes the same calls into the sharded modules, whatever its micro-batches hold (an empty one is
replaced by a single untrained token); gradients are reduced over ranks once per optimizer step; nothing waits for the
device inside a loop over micro-batches; weights change only after loss and gradient of all ranks were seen to be
finite.
"""

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from rlkit.algo.context_shards import num_padding_tokens, pad_row
from rlkit.algo.gap_record import GapRecord
from rlkit.algo.logprobs import scored_positions
from rlkit.algo.objective import Objective, StepObjective
from rlkit.backends.attention.context import context_layout
from rlkit.backends.attention.packed import PackedLayout, packed_layout
from rlkit.backends.fsdp.checkpoint import TrainerMeta
from rlkit.backends.fsdp.lora import without_dropout
from rlkit.backends.fsdp.memory import chunk_size
from rlkit.backends.fsdp.model import ScoringModel, fsdp, reshard
from rlkit.backends.fsdp.optimizer import ShardOptimizer
from rlkit.backends.loss_scale import LossScale
from rlkit.backends.schedules import Schedule
from rlkit.backends.step_metrics import StepMetrics, reduce_metrics
from rlkit.config.schema import RunConfig
from rlkit.dist.collectives import sum_over_data, sum_over_shards
from rlkit.dist.groups import RankMesh
from rlkit.observability.spans import SpanName, Spans
from rlkit.types.batches import PackedBatch
from rlkit.types.errors import TrainError
from rlkit.types.ranks import MetricSet

OnHost = TypeVar("OnHost", PackedBatch, PackedLayout)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """A packed batch with what the model needs to run it."""

    batch: PackedBatch
    layout: PackedLayout
    scored_N: Tensor  # int64 [N]; positions of the trained tokens that this rank scores
    predictors_N: Tensor  # int64 [N]; for each, which of this rank's hidden states predicts it

    def to(self, device: torch.device) -> "MicroBatch":
        if device.type == "cpu":
            return self
        return MicroBatch(
            batch=_pinned(self.batch).to(device),
            layout=_pinned(self.layout).to(device),
            scored_N=_pinned_tensor(self.scored_N).to(device, non_blocking=True),
            predictors_N=_pinned_tensor(self.predictors_N).to(device, non_blocking=True),
        )


def _pinned(value: OnHost) -> OnHost:
    """The same with its tensors in pinned memory, as far as they lie on the host: a copy from pageable memory waits for
    everything that the GPU was told before.
    """
    tensors = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
    moved = {name: _pinned_tensor(x) for name, x in tensors.items() if isinstance(x, Tensor) and not x.is_cuda}
    return replace(value, **moved) if moved else value


def _pinned_tensor(value: Tensor) -> Tensor:
    return value if value.is_cuda else value.pin_memory()


def micro_batch(batch: PackedBatch, mesh: RankMesh) -> MicroBatch:
    """Prepare a batch that lies on the CPU. An empty one becomes two untrained tokens, so that its forward pass has
    something to do (two: compiled blocks would be compiled anew for a single one); under context parallelism a row is
    padded so that its ranks hold equally many tokens.
    """
    if batch.num_tokens == 0:
        batch = _dummy_sequence(batch)
    batch = pad_row(batch, num_padding_tokens(batch.num_tokens, mesh.context_size))
    layout = packed_layout(batch.cu_seqlens)
    scored_N = scored_positions(batch.loss_mask_T, batch.cu_seqlens)
    predictors_N = scored_N - 1
    if mesh.context_size > 1:
        context = context_layout(
            batch.cu_seqlens.tolist(), cp=mesh.context_size, rank=mesh.context_rank, group=mesh.context_group
        )
        layout = replace(layout, context=context)
        local_N = context.local_of_row[predictors_N]
        scored_N, predictors_N = scored_N[local_N >= 0], local_N[local_N >= 0]
    return MicroBatch(
        batch=batch,
        layout=layout,
        scored_N=scored_N,
        predictors_N=predictors_N,
    )


def _dummy_sequence(batch: PackedBatch) -> PackedBatch:
    return replace(
        batch,
        tokens_T=torch.zeros(2, dtype=torch.int64),
        positions_T=torch.arange(2),
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
        max_seqlen=2,
        loss_mask_T=torch.zeros(2, dtype=torch.bool),
        loss_weight_T=torch.zeros(2),
        advantages_S=torch.zeros(1),
        sample_ids_S=torch.full((1,), -1, dtype=torch.int64),
        rollouts_S=torch.zeros(1, dtype=torch.int64),
        rollout_logp_T=None if batch.rollout_logp_T is None else torch.zeros(2),
    )


class Trainer:
    """Owns the order of things inside a step; the modules, the optimizer and the mesh are the backend's."""

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
        """`resumed`: what a checkpoint says of the trainer; None where optimizer and schedule start anew."""
        self._cfg = cfg
        self._policy = policy
        self._optimizer = optimizer
        self._mesh = mesh
        self._spans = spans
        self._schedule = schedule
        self.optimizer_steps = resumed.optimizer_steps if resumed else 0
        """Optimizer steps taken since the start of the run; the schedule's only state."""
        self._loss_scale = LossScale(cfg.precision)
        if resumed and resumed.loss_scale:
            self._loss_scale.load(resumed.loss_scale)
        self.objective = Objective(cfg, sum_over_data=lambda partial: sum_over_data(partial, mesh))
        self._step_objective: StepObjective = self.objective
        """What the optimizer steps minimise."""
        self.gaps = GapRecord()
        """Differences to the engine's log-probs in the last rollout, for the report."""

    @torch.no_grad()
    def score(self, model: ScoringModel, micro_batches: list[MicroBatch]) -> list[Tensor]:
        """Log-probs of every micro-batch under `model`, f32 [T] each. Collective."""
        with self._spans(SpanName.LOG_PROB), without_dropout(model):
            scored = [self._forward(model, micro.to(self._mesh.device))[0] for micro in micro_batches]
            # without a backward pass FSDP2 leaves the root's parameters whole, where sleep and save want shards
            reshard(model)
        return scored

    def finish(self, updates: list[list[MicroBatch]], *, num_rollouts: list[int]) -> list[list[MicroBatch]]:
        """What the loss has to know of the whole rollout, once log-probs are scored. Collective."""
        if not self.objective.finishes:
            return updates
        updates = [[micro.to(self._mesh.device) for micro in update] for update in updates]
        batches = [[micro.batch for micro in update] for update in updates]
        finished = self.objective.finish(batches, num_rollouts=num_rollouts)
        return [
            [replace(micro, batch=batch) for micro, batch in zip(update, done, strict=True)]
            for update, done in zip(updates, finished, strict=True)
        ]

    def train(self, step: int, updates: list[list[MicroBatch]], *, num_loss_tokens: list[int]) -> MetricSet:
        """Take an optimizer step for each update. `num_loss_tokens`: trained tokens of each, over all ranks.
        Collective.
        """
        self.gaps.clear()
        metrics: list[StepMetrics] = []
        norms: list[float] = []
        lr = math.nan
        if self._cfg.optimizer.reset_optimizer_states:
            self._optimizer.reset()
        for micro_batches in updates:
            lr = self._schedule.rate(self.optimizer_steps)
            step_metrics = self._accumulate(micro_batches)
            norm = self._apply(step, step_metrics, lr)
            norms += [] if norm is None else [norm]
            metrics.append(step_metrics)
        reduced = reduce_metrics(
            metrics,
            num_loss_tokens=num_loss_tokens,
            sum_names=self._step_objective.sum_names,
            max_names=self._step_objective.max_names,
            mesh=self._mesh,
        )
        own = {"train/grad_norm": sum(norms) / max(1, len(norms)), "train/lr": lr}
        if self._loss_scale.is_on:
            own["train/loss_scale"] = self._loss_scale.value
            own["train/num_skipped_steps"] = float(self._loss_scale.num_skipped)
        return self._step_objective.derive(reduced) | own

    def meta(self, step: int) -> TrainerMeta:
        """What a checkpoint after `step` has to say of the trainer."""
        return TrainerMeta(
            step=step,
            optimizer_steps=self.optimizer_steps,
            world_size=self._mesh.world_size,
            loss_scale=self._loss_scale.state() if self._loss_scale.is_on else None,
            lora=asdict(self._cfg.lora) if self._cfg.uses_lora else None,
        )

    def _accumulate(self, micro_batches: list[MicroBatch]) -> StepMetrics:
        """Forward and backward over one optimizer step's micro-batches."""
        objective = self._step_objective
        metrics = StepMetrics(objective.sum_names, objective.max_names, self._mesh.device)
        for number, micro in enumerate(micro_batches):
            is_last = number == len(micro_batches) - 1
            fsdp(self._policy).set_requires_gradient_sync(is_last)
            # weights that were gathered or cast for this micro-batch serve the next ones as well
            fsdp(self._policy).set_reshard_after_backward(is_last or not self._policy.plan.keeps_weights)
            micro = micro.to(self._mesh.device)
            scored = self._forward(self._policy, micro)
            if self._cfg.report.report_samples > 0 and objective is self.objective:
                self.gaps.add(micro.batch, scored[0])
            report = objective.loss(micro.batch, *scored)
            # FSDP averages gradients over all ranks; our loss is divided by global counts already, so undo that
            # mean
            (report.loss * (self._mesh.world_size * self._loss_scale.value)).backward()
            metrics.add(report.sums)
            for name, value in report.maxima.items():
                metrics.add_max(name, value)
        return metrics

    def _forward(self, model: ScoringModel, micro: MicroBatch) -> tuple[Tensor, ...]:
        """What `StepObjective.loss` takes beside the batch. The first is what `score` returns."""
        return model(
            micro.batch.tokens_T,
            micro.batch.positions_T,
            micro.layout,
            micro.scored_N,
            micro.predictors_N,
            temperature=1.0 if self._cfg.is_supervised else self._cfg.rollout.rollout_temperature,
            chunk_size=chunk_size(self._cfg, model.config.get_text_config().vocab_size, self._mesh.device),
        )

    def _apply(self, step: int, metrics: StepMetrics, lr: float) -> float | None:
        """Check, clip, step. Returns the gradient norm before clipping; None where float16 overflowed and the step was
        skipped. Collective; the one wait for the device per optimizer step.
        """
        loss = sum_over_data(metrics.loss.clone(), self._mesh)
        squared_norm = sum_over_shards(self._optimizer.squared_grad_norm().to(self._mesh.device), self._mesh)
        loss, squared_norm = torch.stack([loss, squared_norm]).tolist()
        scale = self._loss_scale.value
        norm = math.sqrt(squared_norm) / scale if squared_norm >= 0 else math.nan
        if self._loss_scale.is_on and math.isfinite(loss) and not math.isfinite(norm):
            self._optimizer.zero_grad()
            self._loss_scale.step_skipped(f"step {step}, optimizer step {self.optimizer_steps}")
            return None
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._optimizer.zero_grad()
            raise TrainError(
                f"step {step}, optimizer step {self.optimizer_steps}: loss {loss}, gradient norm {norm}, "
                f"learning rate {lr:g}; not finite, so the weights were left as they are. Look at "
                "train/train_rollout_logprob_abs_diff and train/ppo_kl of the steps before, and at this step's "
                "samples; a lower --lr or --eps-clip-c often helps"
            )
        limit = self._cfg.optimizer.clip_grad
        factor = limit / (norm + 1e-6) if 0.0 < limit < norm else 1.0
        if factor != 1.0 or scale != 1.0:
            self._optimizer.scale_grads(factor / scale)
        self._optimizer.step(lr)
        self._loss_scale.step_taken()
        self.optimizer_steps += 1
        return norm
