"""Provoked mismatches are attributed to their causes: tiny random models, whose scores under one changed condition
stand for what an engine reports."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rlkit.backends.fsdp.rescoring import Rescorer, Scoring
from rlkit.cli.explain import older_by_design
from rlkit.cli.main import main
from rlkit.cli.mismatch import Evidence, Explanation, Weights, explain
from rlkit.observability.sample_files import RecordedSample, StepSamples, TokenRun, write_samples

VOCABULARY = ["<pad>", "<eos>", "<unk>", *"0123456789abcdefghijklmnopqrstuvwxyz +="]
TEMPERATURE = 0.8
BASE = Scoring(temperature=TEMPERATURE)


def shape(experts: dict[str, int]) -> dict[str, object]:
    return {
        "vocab_size": len(VOCABULARY), "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 256,
        "initializer_range": 0.25, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, **experts,
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints `dense`, `moved` (the same after a few steps, say) and `experts`, with a tokenizer of characters."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    dense = Qwen3ForCausalLM(Qwen3Config(**shape({})))
    dense.save_pretrained(root / "dense")
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    dense.save_pretrained(root / "moved")
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape(experts))).save_pretrained(root / "experts")
    characters = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")
    for name in ("dense", "moved", "experts"):
        tokenizer.save_pretrained(root / name)
    return root


def sequences(count: int = 3) -> list[tuple[list[int], int]]:
    rng = random.Random(1)
    return [([rng.randrange(3, len(VOCABULARY)) for _ in range(40)], 12) for _ in range(count)]


def likely(rescorer: Rescorer, how: Scoring) -> list[tuple[list[int], int]]:
    """Sequences as sampling makes them: each token is the best of a few tries, so that a nucleus holds it."""
    rng = random.Random(2)
    found = []
    for _ in range(2):
        tokens = [rng.randrange(3, len(VOCABULARY)) for _ in range(8)]
        for _ in range(16):
            tries = [[*tokens, rng.randrange(3, len(VOCABULARY))] for _ in range(6)]
            tokens = max(tries, key=lambda t: rescorer.score(t, len(t) - 1, how)[0])
        found.append((tokens, 8))
    return found


def attributed(
    rescorer: Rescorer,
    engine: Scoring,
    *,
    weights: list[Weights] | None = None,
    samples: list[tuple[list[int], int]] | None = None,
    engine_weights: Weights | None = None,
    engine_prompt: int = 0,
    sampling: Scoring = BASE,
    noise: float = 0.0,
) -> Explanation:
    """What `explain` says when the engine scores as `engine` and the trainer as `BASE`; `engine_prompt` tokens are
    missing at the front of the engine's prompt."""
    current = Weights(name="now", load=rescorer.load_first, is_current=True)
    rng = random.Random(3)
    evidence = []
    for tokens, num_prompt in samples or sequences():
        (engine_weights or current).load()
        seen = tokens[engine_prompt:]
        reported = [value + rng.gauss(0, noise) for value in rescorer.score(seen, num_prompt - engine_prompt, engine)]
        current.load()
        evidence.append(
            Evidence(
                tokens=tokens,
                num_prompt=num_prompt,
                engine=reported,
                trainer=rescorer.score(tokens, num_prompt, BASE),
                other_prompts={"a prompt without its first token": tokens[1:num_prompt]},
            )
        )
    return explain(
        evidence, rescorer.score, weights or [current], BASE, sampling=sampling, has_experts=rescorer.has_experts
    )


@pytest.mark.parametrize(
    "engine, cause, what",
    [
        (BASE, "none", "agrees"),
        (replace(BASE, temperature=1.0), "temperature", "temperature 1"),
        (replace(BASE, temperature=1.31), "temperature", "which fits best"),
        (replace(BASE, num_padding=4), "padding", "4 padding tokens"),
        (replace(BASE, dtype=torch.bfloat16), "precision", "bfloat16"),
    ],
)
def test_conditions_of_a_dense_model(folder: Path, engine: Scoring, cause: str, what: str):
    found = attributed(Rescorer(folder / "dense"), engine)
    assert (found.cause, what in found.evidence) == (cause, True), found


def test_nucleus(folder: Path):
    rescorer = Rescorer(folder / "dense")
    engine = replace(BASE, top_p=0.9)
    found = attributed(rescorer, engine, samples=likely(rescorer, BASE), sampling=engine)
    assert found.cause == "top-p or top-k" and "0.9" in found.evidence, found


def test_stale_weights(folder: Path):
    rescorer = Rescorer(folder / "dense")
    old = Rescorer(folder / "moved")
    moved = dict(old._model.state_dict())
    stale = Weights(name="step 3", load=lambda: rescorer._load(moved), is_current=False)
    current = Weights(name="now", load=rescorer.load_first, is_current=True)
    found = attributed(rescorer, BASE, weights=[current, stale], engine_weights=stale)
    assert found.cause == "stale weights" and "step 3" in found.evidence, found


def test_tokens(folder: Path):
    found = attributed(Rescorer(folder / "dense"), BASE, engine_prompt=1)
    assert found.cause == "tokens" and "without its first token" in found.evidence, found


def test_routing(folder: Path):
    found = attributed(Rescorer(folder / "experts"), replace(BASE, expert_change=1))
    assert found.cause == "routing" and "+1 expert" in found.evidence, found


def test_rounding_of_another_machine_is_precision(folder: Path):
    """No machine repeats another one's rounding: noise of that size is all that there is."""
    rescorer = Rescorer(folder / "dense")
    plain = rescorer.score(*sequences(1)[0], BASE)
    rounded = rescorer.score(*sequences(1)[0], replace(BASE, dtype=torch.bfloat16))
    size = sum(abs(a - b) for a, b in zip(plain, rounded, strict=True)) / len(plain)
    found = attributed(rescorer, BASE, noise=1.2 * size)
    assert found.cause == "precision", found


def test_what_nothing_explains_is_unknown(folder: Path):
    found = attributed(Rescorer(folder / "dense"), BASE, noise=2.0)
    assert found.cause == "unknown", found


def test_the_command_explains_a_recorded_step(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """An engine that reports log-probs at temperature 1, through files of a run."""
    rescorer = Rescorer(folder / "dense")
    samples = []
    for number, (tokens, num_prompt) in enumerate(sequences()):
        engine = rescorer.score(tokens, num_prompt, Scoring())
        trainer = rescorer.score(tokens, num_prompt, BASE)
        response = tokens[num_prompt:]
        run = TokenRun(
            start=0, ids=response, pieces=[VOCABULARY[i] for i in response], rollout_logprobs=engine,
            gaps=[a - b for a, b in zip(trainer, engine, strict=True)],
        )  # fmt: skip
        samples.append(
            RecordedSample(
                group=number, index=0, seed=1, kinds=["best"],
                prompt="".join(VOCABULARY[i] for i in tokens[:num_prompt]), prompt_ids=tokens[:num_prompt], label="",
                response_length=len(response), reward=1.0, status="completed", weight_versions=[0], mean_gap=0.1,
                max_gap=0.2, head=run, tail=None,
            )
        )  # fmt: skip
    write_samples(tmp_path, StepSamples(step=0, samples=samples))
    entry = {"value": str(folder / "dense"), "from": "command line"}
    settings = {
        "model": {"hf_checkpoint": entry},
        "cluster": {"device": {"value": "cpu", "from": "command line"}},
        "rollout": {"rollout_temperature": {"value": TEMPERATURE, "from": "command line"}},
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert main(["explain", str(tmp_path), "--step", "0"]) == 0
    assert "step 0: temperature: temperature 1: the mean difference" in capsys.readouterr().out
    assert json.loads((tmp_path / "explain" / "step_0000000.json").read_text())["cause"] == "temperature"
    assert main(["explain", str(tmp_path), "--step", "7"]) == 2
    assert "samples were kept of steps [0]" in capsys.readouterr().err


def test_responses_that_name_older_weights_are_explained_by_them():
    found = older_by_design(6, {4, 5})
    assert found.cause == "stale weights" and "name weights v4, v5" in found.evidence and "--async-mode" in found.remedy


def test_a_temperature_that_fits_a_little_of_anything_is_no_cause(folder: Path):
    """Weights that are gone: the best temperature takes some of the difference away, as a free number always does."""
    rescorer = Rescorer(folder / "dense")
    moved = dict(Rescorer(folder / "moved")._model.state_dict())
    stale = Weights(name="gone", load=lambda: rescorer._load(moved), is_current=False)
    found = attributed(rescorer, BASE, engine_weights=stale)
    assert found.cause == "unknown", found
