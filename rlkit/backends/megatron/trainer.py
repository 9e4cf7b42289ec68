"""One `train` call of one rank: score old and reference log-probs, then an optimizer step per update. Called by
`backend.py`.

Scores and metrics come into being on the last pipeline stage and are handed to the others, so that every rank knows the
same. Weights change only after loss and gradient of all ranks were seen to be finite.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlkit.algo.gap_record import GapRecord
from rlkit.algo.memory_plan import auto_chunk_size
from rlkit.algo.objective import Objective
from rlkit.backends.megatron.batches import MicroBatch, without_loss
from rlkit.backends.megatron.model import Model
from rlkit.backends.megatron.optimizer import MainOptimizer
from rlkit.backends.megatron.parallel import Ranks
from rlkit.backends.megatron.pipeline import forward_backward, forward_only
from rlkit.backends.schedules import Schedule
from rlkit.backends.step_metrics import StepMetrics, reduce_metrics
from rlkit.config.schema import RunConfig
from rlkit.dist.collectives import sum_over_data
from rlkit.observability.spans import SpanName, Spans
from rlkit.types.errors import TrainError
from rlkit.types.ranks import MetricSet


@dataclass(frozen=True, kw_only=True, slots=True)
class Runnable:
    """A model and the modules that Megatron's schedules call: the chunks, wrapped where they are trained."""

    model: Model
    chunks: Sequence[nn.Module]


class Trainer:
    """Owns the order of things inside a step; model and optimizer are the backend's."""

    def __init__(
        self,
        cfg: RunConfig,
        *,
        policy: Runnable,
        optimizer: MainOptimizer,
        ranks: Ranks,
        spans: Spans,
        schedule: Schedule,
        optimizer_steps: int,
    ) -> None:
        self._cfg = cfg
        self._policy = policy
        self._optimizer = optimizer
        self._ranks = ranks
        self._spans = spans
        self._schedule = schedule
        self.optimizer_steps = optimizer_steps
        """Optimizer steps taken since the start of the run; the schedule's only state."""
        self.objective = Objective(cfg, sum_over_data=lambda partial: sum_over_data(partial, ranks.mesh))
        self.gaps = GapRecord()
        """Differences to the engine's log-probs in the last rollout, for the report."""

    @torch.no_grad()
    def score(self, runnable: Runnable, micro_batches: list[MicroBatch]) -> list[Tensor]:
        """Log-probs of every micro-batch under a model, f32 [T] each, on every rank. Collective."""
        with self._spans(SpanName.LOG_PROB):
            was_training = [chunk.training for chunk in runnable.chunks]
            for chunk in runnable.chunks:
                chunk.eval()  # recomputation is for training
            scored = forward_only(
                runnable.model,
                runnable.chunks,
                self._whole_rounds(micro_batches),
                lambda micro, hidden: self._score(runnable.model, micro, hidden)[0],
            )[: len(micro_batches)]
            for chunk, training in zip(runnable.chunks, was_training, strict=True):
                chunk.train(training)
        return self._from_last_stage(scored, micro_batches)

    def _from_last_stage(self, scored: list[Tensor], micro_batches: list[MicroBatch]) -> list[Tensor]:
        pipeline = self._ranks.pipeline
        if pipeline.size == 1:
            return scored
        sizes = [micro.batch.num_tokens for micro in micro_batches]
        flat = (
            torch.cat(scored)
            if pipeline.rank == pipeline.size - 1
            else torch.empty(sum(sizes), device=self._ranks.device)
        )
        dist.broadcast(flat, group=pipeline.group, group_src=pipeline.size - 1)
        return list(flat.split(sizes))

    def finish(self, updates: list[list[MicroBatch]], *, num_rollouts: list[int]) -> list[list[MicroBatch]]:
        """What the loss has to know of the whole rollout, once log-probs are scored. Collective."""
        if not self.objective.finishes:
            return updates
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
            norms.append(self._apply(step, step_metrics, lr))
            metrics.append(step_metrics)
        reduced = reduce_metrics(
            metrics,
            num_loss_tokens=num_loss_tokens,
            sum_names=self.objective.sum_names,
            max_names=self.objective.max_names,
            mesh=self._ranks.mesh,
        )
        return self.objective.derive(reduced) | {"train/grad_norm": sum(norms) / len(norms), "train/lr": lr}

    def _accumulate(self, micro_batches: list[MicroBatch]) -> StepMetrics:
        """Forward and backward over one optimizer step's micro-batches, and the reduction of the gradients."""
        metrics = StepMetrics(self.objective.sum_names, self.objective.max_names, self._ranks.device)

        def loss(micro: MicroBatch, hidden: Tensor) -> Tensor:
            logp_T, entropy_T = self._score(self._policy.model, micro, hidden)
            if self._cfg.report.report_samples > 0:
                self.gaps.add(micro.batch, logp_T)
            report = self.objective.loss(micro.batch, logp_T, entropy_T)
            metrics.add(report.sums)
            for name, value in report.maxima.items():
                metrics.add_max(name, value)
            return report.loss

        forward_backward(self._policy.model, self._policy.chunks, self._whole_rounds(micro_batches), loss)
        self._optimizer.reduce_grads()
        if self._ranks.pipeline.size > 1:
            metrics.share(self._ranks.pipeline.group)
        return metrics

    def _whole_rounds(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """With untrained ones behind, where stages have several runs of layers: the interleaved schedule wants a
        multiple of the stages.
        """
        if len(self._policy.chunks) == 1:
            return micro_batches
        surplus = -len(micro_batches) % self._ranks.pipeline.size
        return micro_batches + [without_loss(micro_batches[0])] * surplus

    def _score(self, model: Model, micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        vocab_size = model.architecture.vocab_size
        chunk = self._cfg.train.log_probs_chunk_size
        return model.last.score(
            hidden,
            micro.batch.tokens_T,
            micro.scored_N,
            micro.predictors_N,
            temperature=1.0 if self._cfg.is_supervised else self._cfg.rollout.rollout_temperature,
            chunk_size=chunk or auto_chunk_size(vocab_size, is_cuda=self._ranks.device.type == "cuda"),
            context=micro.layout.context,
        )

    def _apply(self, step: int, metrics: StepMetrics, lr: float) -> float:
        """Check, clip, step. Returns the gradient norm before clipping. Collective; the one wait for the device per
        optimizer step.
        """
        loss = sum_over_data(metrics.loss.clone(), self._ranks.mesh)
        squared_norm = self._optimizer.squared_grad_norm()
        if self._ranks.mesh.world_size > 1:
            dist.all_reduce(squared_norm)
        loss, squared_norm = torch.stack([loss, squared_norm]).tolist()
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
        if 0.0 < limit < norm:
            self._optimizer.scale_grads(limit / (norm + 1e-6))
        self._optimizer.step(lr)
        self.optimizer_steps += 1
        return norm
