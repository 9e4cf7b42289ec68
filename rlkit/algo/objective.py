"""What a run optimises, as its flags say: which log-probs must be scored, how they become advantages and weights, the
loss of a micro-batch, and the names of what is reported. Every training backend calls it; only here does the maths of
this folder meet the configuration.

Order within a rollout: the backend fills in reference, teacher and old log-probs as `needs_old` demands, `finish` turns
them into what the loss needs of the whole rollout or step, then `loss` is called for each micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from rlkit.algo import dpo
from rlkit.algo.distillation import distillation_advantages
from rlkit.algo.importance import (
    ImportanceWeights,
    Rejection,
    Weighting,
    effective_sample_share,
    importance_weights,
)
from rlkit.algo.kl import token_kl
from rlkit.algo.losses import PolicyObjective, log_prob_gap, mismatch_kl, policy_loss, sft_loss
from rlkit.algo.opsm import drifted_sequences
from rlkit.algo.ppo import gae
from rlkit.algo.reducers import token_weights
from rlkit.algo.reinforce import returns_to_go, token_rewards
from rlkit.algo.sequences import Sequences, SumShares, unshared
from rlkit.algo.whitening import whiten
from rlkit.config.schema import MismatchConfig, RunConfig
from rlkit.types.batches import PackedBatch
from rlkit.types.ranks import MetricSet

GAP = "train_rollout_logprob_abs_diff"


@dataclass(frozen=True, kw_only=True, slots=True)
class LossReport:
    """One micro-batch. Sums and maxima are detached scalars, see `losses.py` for what is divided by what."""

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


class StepObjective(Protocol):
    """What optimizer steps minimise: a policy's objective, or a critic's (`value.py`)."""

    @property
    def sum_names(self) -> tuple[str, ...]: ...

    @property
    def max_names(self) -> tuple[str, ...]: ...

    def loss(self, batch: PackedBatch, *outputs: Tensor) -> LossReport:
        """Of a micro-batch and what the model made of it, [T] each."""
        ...

    def derive(self, metrics: MetricSet) -> MetricSet:
        """The reduced metrics with those that follow from others."""
        ...


class Objective:
    """Stateless. `sum_over_data` adds over the ranks that hold other samples, `sum_over_context` over those that hold
    other tokens of the same ones; both are called in the same order on every rank.
    """

    def __init__(
        self, cfg: RunConfig, *, sum_over_data: SumShares = unshared, sum_over_context: SumShares = unshared
    ) -> None:
        self._cfg = cfg
        self._sum_over_data = sum_over_data
        self._sum_over_context = sum_over_context
        self._weighting, self._rejection = _importance_settings(cfg.mismatch)
        mismatch, algo = cfg.mismatch, cfg.algo
        is_policy = not cfg.is_supervised
        self._weighs = is_policy and (self._weighting is not None or self._rejection is not None)
        self._weighs_whole_step = self._weighs and (
            mismatch.use_rs or mismatch.tis_mode == "mask" or mismatch.tis_batch_normalize
        )
        self._scores_tokens = is_policy and (algo.kl_coef != 0 or cfg.needs_teacher)
        self._shapes_tokens = (
            self._scores_tokens or cfg.needs_critic or (is_policy and (algo.normalize_advantages or algo.gamma != 1.0))
        )
        self.max_names = (f"{GAP}_max",) if is_policy else ()
        self.sum_names = tuple(self._sum_names())

    def _sum_names(self) -> list[str]:
        names = ["loss", "entropy"]
        if self._cfg.is_supervised:
            return [*names, *dpo.SUM_NAMES] if self._cfg.is_dpo else names
        names += ["pg_loss", "ppo_kl", "clip_fraction", GAP, "mismatch_k1", "mismatch_k3"]
        optional = {
            "kl_loss": self._cfg.algo.use_kl_loss,
            "kl_reward": self._cfg.algo.kl_coef != 0,
            "opd_reverse_kl": self._cfg.needs_teacher,
            "opsm_fraction": self._cfg.algo.use_opsm,
            "importance_weight": self._weighs,
            "importance_squared": self._weighs,
            "importance_clip_fraction": self._weighs,
            "importance_reject_fraction": self._weighs,
        }
        return names + [name for name, is_reported in optional.items() if is_reported]

    def needs_old(self, number: int) -> bool:
        """Whether old log-probs must be scored for the rollout's optimizer step `number`, from 0.

        The policy has not moved before the first, so there they are the current ones, unless something has to know them
        before the loss. The engine's stand in for them with `--use-rollout-logprobs`.
        """
        if self._cfg.is_supervised or self._cfg.algo.use_rollout_logprobs:
            return False
        return number > 0 or self._scores_tokens or self._weighs_whole_step

    @property
    def finishes(self) -> bool:
        """Whether `finish` has anything to do; the same on every rank."""
        return self._shapes_tokens or self._weighs_whole_step

    def finish(
        self, updates: Sequence[Sequence[PackedBatch]], *, num_rollouts: Sequence[int]
    ) -> list[list[PackedBatch]]:
        """[optimizer step][micro-batch] of one rollout with advantages of tokens and importance weights, where these
        are not what `loss` can see in a single micro-batch. `num_rollouts`: of each step, over all ranks. Collective.
        """
        finished = [list(batches) for batches in updates]
        if self._shapes_tokens:
            finished = self._with_advantages(finished)
        if self._weighs_whole_step:
            finished = [self._with_weights(step, num) for step, num in zip(finished, num_rollouts, strict=True)]
        return finished

    def loss(self, batch: PackedBatch, *outputs: Tensor) -> LossReport:
        """`outputs`: log-probs and entropies [T] of the current policy, differentiable."""
        logp_T, entropy_T = outputs
        if self._cfg.is_sft:
            loss, sums = sft_loss(logp_T, mask_T=batch.loss_mask_T, weight_T=batch.loss_weight_T, entropy_T=entropy_T)
            return LossReport(loss=loss, sums=sums, maxima={})
        if self._cfg.is_dpo:
            return self._pair_loss(batch, logp_T, entropy_T)
        algo = self._cfg.algo
        sequences = self._sequences(batch)
        old_logp_T = self._old_logp(batch, logp_T)
        advantages_T = batch.advantages_T
        if advantages_T is None:
            advantages_T = sequences.spread(batch.advantages_S)
        importance_T, sums = self._importance(batch, old_logp_T, sequences)
        if algo.use_opsm:
            drifted_T = drifted_sequences(
                logp_T, old_logp_T, advantages_T, batch.loss_mask_T, sequences, delta=algo.opsm_delta
            )
            kept_T = (~drifted_T).to(logp_T.dtype)
            importance_T = kept_T if importance_T is None else importance_T * kept_T
            sums["opsm_fraction"] = drifted_T.sum(dtype=torch.float32)
        loss, loss_sums = policy_loss(
            logp_T,
            old_logp_T,
            advantages_T,
            mask_T=batch.loss_mask_T,
            weight_T=batch.loss_weight_T,
            eps_clip=algo.eps_clip,
            eps_clip_high=algo.eps_clip_high,
            eps_clip_c=algo.eps_clip_c,
            objective=_policy_objective(self._cfg),
            sequences=sequences,
            importance_T=importance_T,
            entropy_T=entropy_T,
            entropy_coef=algo.entropy_coef,
            ref_logp_T=batch.ref_logp_T if algo.use_kl_loss else None,
            kl_loss_coef=algo.kl_loss_coef,
            kl_loss_type=algo.kl_loss_type,
            use_unbiased_kl=algo.use_unbiased_kl,
        )
        gap_sums, maxima = self._gap_to_engine(batch, logp_T)
        return LossReport(
            loss=loss, sums=loss_sums | sums | gap_sums | self._token_scores(batch, old_logp_T), maxima=maxima
        )

    def derive(self, metrics: MetricSet) -> MetricSet:
        """The reduced `train/...` metrics with those that follow from others."""
        squared = metrics.get("train/importance_squared")
        if squared is None:
            return metrics
        rest = {name: value for name, value in metrics.items() if name != "train/importance_squared"}
        return rest | {"train/importance_ess": effective_sample_share(rest["train/importance_weight"], squared)}

    # ---- before the first optimizer step -----------------------------------------------------------------------------

    def _with_advantages(self, updates: list[list[PackedBatch]]) -> list[list[PackedBatch]]:
        batches = [batch for step in updates for batch in step]
        if self._cfg.needs_critic:
            batches = [self._with_estimates(batch) for batch in batches]
        advantages = [self._token_advantages(batch) for batch in batches]
        if self._cfg.algo.normalize_advantages:
            advantages = whiten(advantages, [batch.loss_mask_T for batch in batches], sum_shares=self._sum_over_all)
        shaped = iter(replace(batch, advantages_T=value_T) for batch, value_T in zip(batches, advantages, strict=True))
        return [[next(shaped) for _ in step] for step in updates]

    def _token_advantages(self, batch: PackedBatch) -> Tensor:
        algo = self._cfg.algo
        mask_T = batch.loss_mask_T
        if batch.advantages_T is not None:
            scores_T = batch.advantages_T  # a critic's
        else:
            scores_T = self._sequences(batch).spread(batch.advantages_S)
            if algo.kl_coef != 0 or algo.gamma != 1.0:
                scores_T = returns_to_go(
                    scores_T,
                    self._penalties(batch),
                    mask_T=mask_T,
                    cu_seqlens=batch.cu_seqlens,
                    max_len=batch.max_seqlen,
                    gamma=algo.gamma,
                )
        if self._cfg.needs_teacher:
            old_logp_T = self._old_logp(batch, None)
            assert batch.teacher_logp_T is not None
            coef = self._cfg.distill.opd_kl_coef
            scores_T = scores_T + distillation_advantages(old_logp_T, batch.teacher_logp_T, mask_T=mask_T, coef=coef)
        return scores_T

    def _with_estimates(self, batch: PackedBatch) -> PackedBatch:
        """With GAE's advantages, and the returns that the critic learns: both hold what is paid for KL."""
        assert batch.values_T is not None, "the critic scores before anything is finished"
        mask_T, cu_seqlens, max_len = batch.loss_mask_T, batch.cu_seqlens, batch.max_seqlen
        scores_T = self._sequences(batch).spread(batch.advantages_S)
        penalties_T = self._penalties(batch)
        advantages_T, returns_T = gae(
            token_rewards(scores_T, penalties_T, mask_T=mask_T, cu_seqlens=cu_seqlens, max_len=max_len),
            batch.values_T,
            mask_T=mask_T,
            cu_seqlens=cu_seqlens,
            max_len=max_len,
            gamma=self._cfg.algo.gamma,
            lambd=self._cfg.critic.lambd,
        )
        return replace(batch, advantages_T=advantages_T, returns_T=returns_T)

    def _penalties(self, batch: PackedBatch) -> Tensor | None:
        """What each token pays for its KL to the reference."""
        algo = self._cfg.algo
        if algo.kl_coef == 0:
            return None
        assert batch.ref_logp_T is not None
        return algo.kl_coef * token_kl(self._old_logp(batch, None), batch.ref_logp_T, kl_type=algo.kl_loss_type)

    def _with_weights(self, batches: list[PackedBatch], num_rollouts: int) -> list[PackedBatch]:
        """Importance weights, and loss weights that count only what is kept, over all ranks of one optimizer step."""
        weights = [self._weights(batch, self._old_logp(batch, None), self._sequences(batch)) for batch in batches]
        kept = [
            self._sequences(batch).sums(item.keep_T.double())[0] for batch, item in zip(batches, weights, strict=True)
        ]
        tokens_R = kept[0].new_zeros(num_rollouts)
        for batch, kept_S in zip(batches, kept, strict=True):
            tokens_R.index_add_(0, batch.rollouts_S, kept_S)
        tokens_R = self._sum_over_data(tokens_R)
        mean = tokens_R.new_ones(())
        if self._cfg.mismatch.tis_batch_normalize:
            total = torch.stack([item.weight_T.sum(dtype=torch.float64) for item in weights]).sum()
            mean = self._sum_over_all(total[None])[0] / tokens_R.sum().clamp(min=1.0)
            mean = torch.where(mean > 0.0, mean, 1.0)
        algo = self._cfg.algo
        finished = []
        for batch, item in zip(batches, weights, strict=True):
            weight_S = token_weights(
                batch.rollouts_S,
                tokens_R,
                per_token_loss=algo.calculate_per_token_loss,
                constant_length=algo.loss_constant_length,
            )
            weight_T = self._sequences(batch).spread(weight_S.to(batch.loss_weight_T.dtype))
            finished.append(
                replace(
                    batch,
                    loss_weight_T=torch.where(item.keep_T, weight_T, 0.0),
                    importance_T=(item.weight_T / mean).to(item.weight_T.dtype),
                )
            )
        return finished

    # ---- parts of the loss -------------------------------------------------------------------------------------------

    def _importance(
        self, batch: PackedBatch, old_logp_T: Tensor, sequences: Sequences
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """(weights of the policy loss, what is reported of them)."""
        if not self._weighs:
            return None, {}
        item = self._weights(batch, old_logp_T, sequences)
        weight_T = item.weight_T if batch.importance_T is None else batch.importance_T
        return weight_T, {
            "importance_weight": weight_T.sum(),
            "importance_squared": weight_T.square().sum(),
            "importance_clip_fraction": item.is_changed_T.sum(dtype=torch.float32),
            "importance_reject_fraction": (batch.loss_mask_T & ~item.keep_T).sum(dtype=torch.float32),
        }

    def _pair_loss(self, batch: PackedBatch, logp_T: Tensor, entropy_T: Tensor) -> LossReport:
        assert batch.ref_logp_T is not None
        loss, sums = dpo.dpo_loss(
            logp_T,
            batch.ref_logp_T,
            mask_T=batch.loss_mask_T,
            weight_T=batch.loss_weight_T,
            is_chosen_S=batch.advantages_S > 0,
            sequences=self._sequences(batch),
            beta=self._cfg.dpo.dpo_beta,
            loss_type=self._cfg.dpo.dpo_loss_type,
            label_smoothing=self._cfg.dpo.dpo_label_smoothing,
            entropy_T=entropy_T,
        )
        return LossReport(loss=loss, sums=sums, maxima={})

    def _weights(self, batch: PackedBatch, old_logp_T: Tensor, sequences: Sequences) -> ImportanceWeights:
        assert batch.rollout_logp_T is not None
        return importance_weights(
            old_logp_T,
            batch.rollout_logp_T,
            batch.loss_mask_T,
            sequences,
            weighting=self._weighting,
            rejection=self._rejection,
        )

    def _old_logp(self, batch: PackedBatch, logp_T: Tensor | None) -> Tensor:
        """The policy's log-probs before the rollout's first step; the current ones where nothing has moved yet."""
        old_logp_T = batch.rollout_logp_T if self._cfg.algo.use_rollout_logprobs else batch.old_logp_T
        if old_logp_T is None:
            assert logp_T is not None, "what needs old log-probs before the loss must have them scored"
            old_logp_T = logp_T.detach()
        return old_logp_T

    def _token_scores(self, batch: PackedBatch, old_logp_T: Tensor) -> dict[str, Tensor]:
        """What was paid to the reference and to the teacher, as they were before the first step."""
        sums = {}
        mask_T, zero = batch.loss_mask_T, old_logp_T.new_zeros(())
        if self._cfg.algo.kl_coef != 0:
            assert batch.ref_logp_T is not None
            kl_T = token_kl(old_logp_T, batch.ref_logp_T, kl_type=self._cfg.algo.kl_loss_type)
            sums["kl_reward"] = torch.where(mask_T, kl_T, zero).sum()
        if self._cfg.needs_teacher:
            assert batch.teacher_logp_T is not None
            sums["opd_reverse_kl"] = torch.where(mask_T, old_logp_T - batch.teacher_logp_T, zero).sum()
        return sums

    def _gap_to_engine(self, batch: PackedBatch, logp_T: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Compare with the engine by the log-probs that are nearest to its weights: the old ones where they were
        scored.
        """
        assert batch.rollout_logp_T is not None
        scored_T = logp_T if batch.old_logp_T is None else batch.old_logp_T
        total, largest = log_prob_gap(scored_T, batch.rollout_logp_T, batch.loss_mask_T)
        k1, k3 = mismatch_kl(scored_T, batch.rollout_logp_T, batch.loss_mask_T)
        return {GAP: total, "mismatch_k1": k1, "mismatch_k3": k3}, {f"{GAP}_max": largest}

    def _sequences(self, batch: PackedBatch) -> Sequences:
        return Sequences.of(batch.cu_seqlens, batch.num_tokens, self._sum_over_context)

    def _sum_over_all(self, partial: Tensor) -> Tensor:
        return self._sum_over_data(self._sum_over_context(partial))


def _policy_objective(cfg: RunConfig) -> PolicyObjective:
    match cfg.algo.advantage_estimator:
        case "gspo":
            return "gspo"
        case "cispo":
            return "cispo"
        case _:
            return "clip"


def _importance_settings(mismatch: MismatchConfig) -> tuple[Weighting | None, Rejection | None]:
    weighting = rejection = None
    if mismatch.use_tis:
        weighting = Weighting(
            level=mismatch.tis_level, mode=mismatch.tis_mode, low=mismatch.tis_clip_low, high=mismatch.tis_clip
        )
    if mismatch.use_rs:
        veto = mismatch.rs_veto_threshold
        rejection = Rejection(
            level=mismatch.rs_level, low=mismatch.rs_lower_bound, high=mismatch.rs_upper_bound, veto_below=veto
        )
    return weighting, rejection
