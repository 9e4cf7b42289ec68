"""One `train` call of one rank: score old and reference log-probs, then an optimizer step per update. Called by
`backend.py`.

Invariants: every rank makes the same calls into the sharded modules, whatever its micro-batches hold (an empty one is
replaced by a single untrained token); gradients are reduced over ranks once per optimizer step; nothing waits for the
device inside a loop over micro-batches; weights change only after loss and gradient of all ranks were seen to be
finite.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlkit.algo.logprobs import scored_positions
from rlkit.algo.losses import LossAndSums, log_prob_gap, policy_loss, sft_loss
from rlkit.backends.fsdp.attention import PackedLayout, packed_layout
from rlkit.backends.fsdp.metrics import StepMetrics, reduce_metrics
from rlkit.backends.fsdp.model import ScoringModel, fsdp
from rlkit.backends.fsdp.optimizer import ShardOptimizer, learning_rate
from rlkit.config.schema import RunConfig
from rlkit.dist.collectives import sum_over_data
from rlkit.dist.groups import RankMesh
from rlkit.observability.spans import SpanName, Spans
from rlkit.types.batches import PackedBatch
from rlkit.types.errors import TrainError
from rlkit.types.ranks import MetricSet


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """A packed batch with what the model needs to run it."""

    batch: PackedBatch
    layout: PackedLayout
    scored_N: Tensor  # int64 [N]; positions of trained tokens
    advantages_T: Tensor  # f32 [T]

    def to(self, device: torch.device) -> "MicroBatch":
        if device.type == "cpu":
            return self
        return MicroBatch(
            batch=self.batch.to(device),
            layout=self.layout.to(device),
            scored_N=self.scored_N.to(device, non_blocking=True),
            advantages_T=self.advantages_T.to(device, non_blocking=True),
        )


def micro_batch(batch: PackedBatch) -> MicroBatch:
    """Prepare a batch that lies on the CPU. An empty one becomes one untrained token, so that its forward pass has
    something to do.
    """
    if batch.num_tokens == 0:
        batch = _dummy_token(batch)
    lengths_S = batch.cu_seqlens.diff().long()
    return MicroBatch(
        batch=batch,
        layout=packed_layout(batch.cu_seqlens),
        scored_N=scored_positions(batch.loss_mask_T, batch.cu_seqlens),
        advantages_T=batch.advantages_S.repeat_interleave(lengths_S),
    )


def _dummy_token(batch: PackedBatch) -> PackedBatch:
    return replace(
        batch,
        tokens_T=torch.zeros(1, dtype=torch.int64),
        positions_T=torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        max_seqlen=1,
        loss_mask_T=torch.zeros(1, dtype=torch.bool),
        loss_weight_T=torch.zeros(1),
        advantages_S=torch.zeros(1),
        sample_ids_S=torch.full((1,), -1, dtype=torch.int64),
        rollout_logp_T=None if batch.rollout_logp_T is None else torch.zeros(1),
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
        decay_steps: int,
        optimizer_steps: int,
    ) -> None:
        self._cfg = cfg
        self._policy = policy
        self._optimizer = optimizer
        self._mesh = mesh
        self._spans = spans
        self._decay_steps = decay_steps
        self.optimizer_steps = optimizer_steps
        """Optimizer steps taken since the start of the run; the schedule's only state."""
        self._sum_names = ["loss", "entropy"]
        self._max_names: list[str] = []
        if not cfg.is_sft:
            gap = "train_rollout_logprob_abs_diff"
            self._sum_names += ["pg_loss", "ppo_kl", "clip_fraction", gap] + ["kl_loss"] * cfg.needs_reference
            self._max_names = [f"{gap}_max"]

    @torch.no_grad()
    def score(self, model: ScoringModel, micro_batches: list[MicroBatch]) -> list[Tensor]:
        """Log-probs of every micro-batch under `model`, f32 [T] each. Collective."""
        with self._spans(SpanName.LOG_PROB):
            scored = [self._forward(model, micro.to(self._mesh.device))[0] for micro in micro_batches]
            # without a backward pass FSDP2 leaves the root's parameters whole, where sleep and save want shards
            fsdp(model).reshard()
        return scored

    def train(self, step: int, updates: list[list[MicroBatch]], *, num_loss_tokens: list[int]) -> MetricSet:
        """Take an optimizer step for each update. `num_loss_tokens`: trained tokens of each, over all ranks.
        Collective.
        """
        metrics: list[StepMetrics] = []
        norms: list[float] = []
        lr = math.nan
        for micro_batches in updates:
            lr = learning_rate(self._cfg.optimizer, self.optimizer_steps, decay_steps=self._decay_steps)
            step_metrics = self._accumulate(micro_batches)
            norms.append(self._apply(step, step_metrics, lr))
            metrics.append(step_metrics)
        reduced = reduce_metrics(
            metrics,
            num_loss_tokens=num_loss_tokens,
            sum_names=self._sum_names,
            max_names=self._max_names,
            mesh=self._mesh,
        )
        return reduced | {"train/grad_norm": sum(norms) / len(norms), "train/lr": lr}

    def _accumulate(self, micro_batches: list[MicroBatch]) -> StepMetrics:
        """Forward and backward over one optimizer step's micro-batches."""
        metrics = StepMetrics(self._sum_names, self._max_names, self._mesh.device)
        for number, micro in enumerate(micro_batches):
            fsdp(self._policy).set_requires_gradient_sync(number == len(micro_batches) - 1)
            micro = micro.to(self._mesh.device)
            logp_T, entropy_T = self._forward(self._policy, micro)
            loss, sums = self._loss(micro, logp_T, entropy_T)
            # FSDP averages gradients over the data ranks; our loss is divided by global counts already, so undo that
            # mean
            (loss * self._mesh.data_size).backward()
            metrics.add(sums)
            if micro.batch.rollout_logp_T is not None and not self._cfg.is_sft:
                self._add_log_prob_gap(metrics, micro.batch, logp_T)
        return metrics

    def _loss(self, micro: MicroBatch, logp_T: Tensor, entropy_T: Tensor) -> LossAndSums:
        batch, algo = micro.batch, self._cfg.algo
        if self._cfg.is_sft:
            return sft_loss(logp_T, mask_T=batch.loss_mask_T, weight_T=batch.loss_weight_T, entropy_T=entropy_T)
        old_logp_T = batch.rollout_logp_T if algo.use_rollout_logprobs else batch.old_logp_T
        return policy_loss(
            logp_T,
            # no old log-probs: the policy has not moved since the rollout, so they are these very numbers
            logp_T.detach() if old_logp_T is None else old_logp_T,
            micro.advantages_T,
            mask_T=batch.loss_mask_T,
            weight_T=batch.loss_weight_T,
            eps_clip=algo.eps_clip,
            eps_clip_high=algo.eps_clip_high,
            eps_clip_c=algo.eps_clip_c,
            entropy_T=entropy_T,
            entropy_coef=algo.entropy_coef,
            ref_logp_T=batch.ref_logp_T,
            kl_loss_coef=algo.kl_loss_coef,
            kl_loss_type=algo.kl_loss_type,
        )

    def _add_log_prob_gap(self, metrics: StepMetrics, batch: PackedBatch, logp_T: Tensor) -> None:
        """Compare with the engine by the log-probs that are nearest to its weights: the old ones where they were
        scored.
        """
        assert batch.rollout_logp_T is not None
        scored_T = logp_T if batch.old_logp_T is None else batch.old_logp_T
        total, largest = log_prob_gap(scored_T, batch.rollout_logp_T, batch.loss_mask_T)
        metrics.add({"train_rollout_logprob_abs_diff": total})
        metrics.add_max("train_rollout_logprob_abs_diff_max", largest)

    def _forward(self, model: ScoringModel, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        return model(
            micro.batch.tokens_T,
            micro.batch.positions_T,
            micro.layout,
            micro.scored_N,
            temperature=1.0 if self._cfg.is_sft else self._cfg.rollout.rollout_temperature,
            chunk_size=self._cfg.train.log_probs_chunk_size,
        )

    def _apply(self, step: int, metrics: StepMetrics, lr: float) -> float:
        """Check, clip, step. Returns the gradient norm before clipping. Collective; the one wait for the device per
        optimizer step.
        """
        totals = torch.stack([metrics.loss, self._optimizer.squared_grad_norm()])
        loss, squared_norm = sum_over_data(totals, self._mesh).tolist()
        norm = math.sqrt(squared_norm) if squared_norm >= 0 else math.nan
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._optimizer.zero_grad()
            raise TrainError(
                f"step {step}, optimizer step {self.optimizer_steps}: loss {loss}, gradient norm {norm}, "
                f"learning rate {lr:g}; not finite, so the weights were left as they are. Look at "
                "train/train_rollout_logprob_abs_diff and train/ppo_kl of the steps before, and at this step's "
                "samples; a lower --lr or --eps-clip-c often helps"
            )
        limit = self._cfg.optimizer.clip_grad
        if limit > 0.0 and norm > limit:
            self._optimizer.scale_grads(limit / (norm + 1e-6))
        self._optimizer.step(lr)
        self.optimizer_steps += 1
        return norm
