"""`--true-on-policy-mode` without Ray: what the embedded engine says of a token while it generates, the trainer says
too."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from fsdp_setup import make_config, make_samples, make_updates, parts_of, start_backend, train_step

from rlkit.algo.batch_invariant import token_log_probs
from rlkit.backends.fsdp.trainer import micro_batch
from rlkit.engines.embedded.model import ModelRunner, PromptPiece, load_model
from rlkit.types.samples import Sample

LENGTHS = [(3, 5), (1, 12), (10, 90), (70, 50), (5, 9), (7, 66), (64, 4), (6, 2)]


def everything_counts(samples: list[Sample]) -> list[Sample]:
    for sample in samples:
        sample.loss_mask = [1] * len(sample.loss_mask)
    return samples


def of_trainer(path: Path, max_tokens: int, temperature: float) -> list[torch.Tensor]:
    """Log-probs of each sample's response, by the packed trainer."""
    cfg = make_config(path, true_on_policy_mode=True, rollout_temperature=temperature, max_tokens_per_gpu=max_tokens)
    parts = parts_of(start_backend(cfg))
    samples = everything_counts(make_samples(LENGTHS))
    found: dict[tuple[int, ...], torch.Tensor] = {}
    for batch in (batch for update in make_updates(samples, cfg)[0] for batch in update.micro_batches):
        (logp_T,) = parts.trainer.score(parts.policy, [micro_batch(batch, parts.mesh)])
        bounds = batch.cu_seqlens.tolist()
        for start, end in pairwise(bounds):
            found[tuple(batch.tokens_T[start:end].tolist())] = logp_T[start:end]
    return [found[tuple(sample.tokens)][sample.prompt_length :] for sample in samples]


def of_engine(runner: ModelRunner, pieces: int, temperature: float) -> list[torch.Tensor]:
    """The same, token by token: prompts in `pieces` passes, then decode steps of all that are not at their end."""
    samples = make_samples(LENGTHS)
    order = sorted(range(len(samples)), key=lambda i: samples[i].prompt_length - samples[i].total_length)
    found: list[list[float]] = [[] for _ in samples]

    def note(live: list[int], logits: torch.Tensor) -> None:
        targets = torch.tensor([samples[i].tokens[samples[i].prompt_length + len(found[i])] for i in live])
        column = None if temperature == 1.0 else torch.full((len(live), 1), temperature)
        for i, value in zip(live, token_log_probs(logits, targets, column).tolist(), strict=True):
            found[i].append(value)

    with torch.inference_mode():
        runner.cache.free()
        runner.cache.reserve(len(samples), 128)
        for slot, i in enumerate(order):
            prompt = samples[i].tokens[: samples[i].prompt_length]
            size = -(-len(prompt) // pieces)
            for start in range(0, len(prompt), size):
                tokens = prompt[start : start + size]
                is_last = start + size >= len(prompt)
                rows = [len(tokens) - 1] if is_last else []
                logits = runner.prefill([PromptPiece(slot=slot, tokens=tokens, start=start, logit_rows=rows)])
                if is_last:
                    note([i], logits)
        while True:  # those with the longest rest are in the first slots
            live = [i for i in order if samples[i].prompt_length + len(found[i]) < samples[i].total_length]
            if not live:
                return [torch.tensor(values) for values in found]
            lengths = [samples[i].prompt_length + len(found[i]) - 1 for i in live]
            note(live, runner.decode([samples[i].tokens[n] for i, n in zip(live, lengths, strict=True)], lengths))


@pytest.mark.parametrize("name", ["qwen3", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_prefill_decode_and_packs_give_the_same_bits(checkpoints: dict[str, Path], name: str, temperature: float):
    torch.set_num_threads(1)
    model = load_model(str(checkpoints[name]), device="cpu", dtype="float32", trust_remote_code=False)
    runner = ModelRunner(model, max_slots=8, context_length=128, is_batch_invariant=True)
    runner.check_against_transformers()
    expected = of_trainer(checkpoints[name], 400, temperature)
    assert sum(len(values) for values in expected) == 238
    for other in (
        of_trainer(checkpoints[name], 130, temperature),
        of_engine(runner, 1, temperature),
        of_engine(runner, 3, temperature),
    ):
        assert all(torch.equal(a, b) for a, b in zip(expected, other, strict=True))


def test_without_the_mode_bits_differ(checkpoints: dict[str, Path]):
    """The test above can fail."""
    torch.set_num_threads(1)
    model = load_model(str(checkpoints["qwen3"]), device="cpu", dtype="float32", trust_remote_code=False)
    plain = of_engine(ModelRunner(model, max_slots=8, context_length=128), 1, 1.0)
    expected = of_trainer(checkpoints["qwen3"], 400, 1.0)
    assert any(not torch.equal(a, b) for a, b in zip(expected, plain, strict=True))
    for a, b in zip(expected, plain, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def test_the_mode_trains_like_any_other(checkpoints: dict[str, Path]):
    results = []
    for mode in (False, True):
        cfg = make_config(
            checkpoints["qwen3"], true_on_policy_mode=mode, entropy_coef=0.01, gradient_checkpointing=mode
        )
        backend = start_backend(cfg)
        results.append([train_step(backend, cfg, step) for step in range(2)])
    for plain, tiled in zip(*results, strict=True):
        for metric in ("loss", "grad_norm", "entropy"):
            assert tiled[f"train/{metric}"] == pytest.approx(plain[f"train/{metric}"], rel=1e-3, abs=1e-6), metric
