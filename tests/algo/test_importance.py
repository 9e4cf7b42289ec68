"""TIS, MIS and IcePop: weights by hand, by the bug case, and against loops."""

import math

import pytest
import torch
from algo_cases import case
from hypothesis import given
from hypothesis import strategies as st
from packed_batches import EXACT, Packed, mean, packed

from rlkit.algo.importance import (
    ImportanceWeights,
    Rejection,
    Weighting,
    effective_sample_share,
    importance_weights,
)
from rlkit.algo.reducers import token_weights
from rlkit.algo.sequences import Sequences

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask")


def weigh(log_ratios: list[float], **options: object) -> ImportanceWeights:
    """One sequence, all trained."""
    log_T = torch.tensor(log_ratios, dtype=torch.float64)
    settings = {"weighting": None, "rejection": None} | options
    mask_T = torch.ones(len(log_ratios), dtype=torch.bool)
    sequences = Sequences.of(torch.tensor([0, len(log_ratios)]), len(log_ratios))
    return importance_weights(log_T - 1.0, torch.full_like(log_T, -1.0), mask_T, sequences, **settings)


def test_ls08_truncated_and_masked_weights():
    ls08 = case("ls-08")
    log_ratios, losses = ls08["input"]["log_ratio_train_minus_rollout"], ls08["input"]["token_pg_loss"]
    expected, near = ls08["expected"], {"abs": ls08["tolerance"]}
    loss_T = torch.tensor(losses, dtype=torch.float64)

    def token_mean(item: ImportanceWeights) -> float:
        """As `objective.py` counts: what is rejected is in no denominator."""
        (weight,) = token_weights(torch.tensor([0]), item.keep_T.sum()[None], per_token_loss=True).tolist()
        return (loss_T * item.weight_T).sum().item() * weight

    free = weigh(log_ratios, weighting=Weighting(level="token", mode="truncate", low=0.0, high=100.0))
    assert free.weight_T.tolist() == pytest.approx(expected["weights"], **near)
    cut = weigh(
        log_ratios, weighting=Weighting(level="token", mode="truncate", low=0.0, high=ls08["input"]["truncate_at"])
    )
    assert cut.weight_T.tolist() == pytest.approx(expected["truncated_weights"], **near)
    assert cut.is_changed_T.tolist() == [False, False, False, True, False]
    assert token_mean(cut) == pytest.approx(expected["truncated_token_mean"], **near)
    low, high = ls08["input"]["mask_band"]
    masked = weigh(log_ratios, weighting=Weighting(level="token", mode="mask", low=low, high=high))
    assert masked.keep_T.tolist() == expected["kept_by_mask"]
    assert token_mean(masked) == pytest.approx(expected["masked_token_mean"], **near)


def test_levels_by_hand():
    """Ratios 2, 1/2 and 8: product 8, geometric mean 2."""
    logs = [math.log(2.0), -math.log(2.0), math.log(8.0)]
    for level, expected in (("token", [2.0, 0.5, 8.0]), ("sequence", [8.0] * 3), ("geometric", [2.0] * 3)):
        weighting = Weighting(level=level, mode="truncate", low=0.0, high=10.0)
        assert weigh(logs, weighting=weighting).weight_T.tolist() == pytest.approx(expected, abs=1e-12)


def test_modes_by_hand():
    logs = [math.log(0.1), 0.0, math.log(3.0)]
    expected = {"truncate": [0.1, 1.0, 2.0], "clip": [0.5, 1.0, 2.0], "mask": [0.0, 1.0, 0.0]}
    for mode, weights in expected.items():
        found = weigh(logs, weighting=Weighting(level="token", mode=mode, low=0.5, high=2.0))
        assert found.weight_T.tolist() == pytest.approx(weights, abs=1e-12)
        assert found.keep_T.tolist() == [mode != "mask", True, mode != "mask"]


def test_rejection_without_weighting_keeps_weight_one():
    """slime skips rejection where nothing is truncated; here each works alone."""
    found = weigh([math.log(3.0), 0.1], rejection=Rejection(level="token", low=0.5, high=2.0))
    assert found.weight_T.tolist() == [0.0, 1.0] and found.keep_T.tolist() == [False, True]


def test_one_catastrophic_token_vetoes_its_sequence_only():
    mask_T = torch.tensor([1, 1, 1, 1, 0], dtype=torch.bool)
    log_T = torch.tensor([0.0, math.log(5e-5), 0.0, 0.0, math.log(1e-9)], dtype=torch.float64)
    found = importance_weights(
        log_T,
        torch.zeros(5, dtype=torch.float64),
        mask_T,
        Sequences.of(torch.tensor([0, 2, 5]), 5),
        weighting=None,
        rejection=Rejection(level="token", low=0.0, high=2.0, veto_below=1e-4),
    )
    assert found.keep_T.tolist() == [False, False, True, True, False], "the masked token has no say"


@given(
    batch=packed(num_columns=2),
    level=st.sampled_from(LEVELS),
    mode=st.sampled_from(MODES),
    reject_level=st.sampled_from([None, *LEVELS]),
    veto=st.sampled_from([None, 0.2]),
)
def test_weights_equal_the_loop(batch: Packed, level: str, mode: str, reject_level: str | None, veto: float | None):
    low, high, reject_low, reject_high = 0.6, 1.7, 0.4, 2.5
    all_weights, all_kept, all_changed = [], [], []

    def ratios(logs: list[float], of: str) -> list[float]:
        joint = {"sequence": math.fsum(logs), "geometric": mean(logs)}
        return [math.exp(log if of == "token" else joint[of]) for log in logs]

    for olds, rollouts in zip(batch.kept(0), batch.kept(1), strict=True):
        logs = [old - rollout for old, rollout in zip(olds, rollouts, strict=True)]
        weights, kept, changed = [], [], []
        is_vetoed = reject_level is not None and veto is not None and any(math.exp(log) < veto for log in logs)
        for place, ratio in enumerate(ratios(logs, level)):
            weight, keep = ratio, not is_vetoed
            if mode == "mask":
                keep = keep and low <= ratio <= high
            else:
                weight = min(ratio, high) if mode == "truncate" else min(max(ratio, low), high)
            if reject_level is not None:
                keep = keep and reject_low <= ratios(logs, reject_level)[place] <= reject_high
            weights.append(weight if keep else 0.0)
            kept.append(float(keep))
            changed.append(float(weight != ratio))
        all_weights.append(weights)
        all_kept.append(kept)
        all_changed.append(changed)
    rejection = None
    if reject_level is not None:
        rejection = Rejection(level=reject_level, low=reject_low, high=reject_high, veto_below=veto)  # pyright: ignore
    found = importance_weights(
        batch.column(0, garbage=math.nan).requires_grad_(),
        batch.column(1, garbage=math.inf),
        batch.mask_T,
        batch.sequences,
        weighting=Weighting(level=level, mode=mode, low=low, high=high),  # pyright: ignore
        rejection=rejection,
    )
    torch.testing.assert_close(found.weight_T, batch.put_back(all_weights), **EXACT)
    assert found.keep_T.double().tolist() == batch.put_back(all_kept).tolist()
    assert found.is_changed_T.double().tolist() == batch.put_back(all_changed).tolist()
    assert not found.weight_T.requires_grad


def test_a_sequence_that_is_shared_by_two_ranks_has_one_ratio():
    """Each rank holds half of the tokens, and of a second sequence one rank holds nothing."""
    log_T = torch.tensor([0.3, -0.1, 0.4, 0.2, -0.6], dtype=torch.float64)
    zero_T, mask_T = torch.zeros(5, dtype=torch.float64), torch.tensor([1, 1, 1, 1, 1], dtype=torch.bool)
    places = [([0, 1], [2, 0]), ([2, 3, 4], [1, 2])]  # tokens of each rank, and how many of each sequence
    shares: list[torch.Tensor] = []
    for tokens, lengths in places:
        sequences = Sequences(lengths_S=torch.tensor(lengths), num_tokens=len(tokens))
        shares.append(sequences.sums(log_T[tokens], mask_T[tokens].double()))
    whole = Sequences.of(torch.tensor([0, 3, 5]), 5)
    for level in ("sequence", "geometric"):
        weighting = Weighting(level=level, mode="truncate", low=0.0, high=9.0)
        expected_T = importance_weights(log_T, zero_T, mask_T, whole, weighting=weighting, rejection=None).weight_T
        for tokens, lengths in places:
            both = shares[0] + shares[1]
            sequences = Sequences(
                lengths_S=torch.tensor(lengths),
                num_tokens=len(tokens),
                sum_shares=lambda partial, both=both: both[: len(partial)],
            )
            found = importance_weights(
                log_T[tokens], zero_T[tokens], mask_T[tokens], sequences, weighting=weighting, rejection=None
            )
            torch.testing.assert_close(found.weight_T, expected_T[tokens], **EXACT)


def test_a_huge_ratio_stays_finite():
    for level in LEVELS:
        found = weigh([300.0, 300.0], weighting=Weighting(level=level, mode="mask", low=0.5, high=2.0))
        assert found.weight_T.tolist() == [0.0, 0.0]


def test_effective_sample_share():
    assert effective_sample_share(1.0, 1.0) == 1.0
    # weights 1, 1, 1, 5: 64 / (4 * 28)
    assert effective_sample_share(2.0, 7.0) == pytest.approx(64 / 112)
    assert effective_sample_share(0.0, 0.0) == 0.0
