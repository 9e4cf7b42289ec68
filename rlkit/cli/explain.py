"""`rlkit explain RUN_DIR --step N`: why trainer and engine disagree on log-probs.

Scores the recorded samples of the step again, on the CPU, with the weights that the step began with and under one other
condition after the other; what predicts the engine's numbers is the cause. Also started by a run itself when the
difference is beyond `--mismatch-bound`.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import orjson
import torch

from rlkit.backends.fsdp.rescoring import Rescorer, Scoring
from rlkit.cli.mismatch import Evidence, Explanation, Weights, explain
from rlkit.config.load import from_json
from rlkit.config.schema import RunConfig
from rlkit.data.tokenizer import Tokenizer, load_tokenizer
from rlkit.observability.sample_files import RecordedSample, read_samples, sample_files, samples_path
from rlkit.orchestration.checkpoints import complete_checkpoints, step_of
from rlkit.types.errors import DataError

FOLDER = "explain"
MAX_SAMPLES = 4
MAX_OLDER_WEIGHTS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="run folder")
    parser.add_argument("--step", type=int, required=True, help="the step whose samples are scored again")
    parser.add_argument("--json", action="store_true", help="print everything that was tried")


def main(args: argparse.Namespace) -> int:
    """0 when a cause is named or nothing is wrong, 1 when none fits, 2 when the step cannot be explained."""
    try:
        explanation = explain_step(args.run_dir, args.step)
    except (DataError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    document = {"step": args.step, **explanation.document()}
    write(args.run_dir, args.step, document)
    if args.json:
        print(json.dumps(document, indent=2))
    else:
        print("\n".join(lines(args.step, explanation)))
    return 1 if explanation.cause == "unknown" else 0


def lines(step: int, explanation: Explanation) -> list[str]:
    """For people."""
    told = [f"step {step}: {explanation.cause}: {explanation.evidence}"]
    if explanation.remedy:
        told.append(explanation.remedy)
    width = max((len(item.what) for item in explanation.tried), default=0)
    return told + [f"  {item.what:<{width}}  {item.residual:.3g}" for item in explanation.tried]


def write(run_dir: Path, step: int, document: dict[str, object]) -> Path:
    path = run_dir / FOLDER / f"step_{step:07d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_bytes(orjson.dumps(document))
    os.replace(unfinished, path)
    return path


def explain_step(run_dir: Path, step: int) -> Explanation:
    """DataError where samples or weights of the step are not there; the message says how to get them."""
    config = run_dir / "config.json"
    if not config.is_file():
        raise FileNotFoundError(f"{config} is not there: {run_dir} is no run folder")
    cfg = from_json(json.loads(config.read_text()))
    path = samples_path(run_dir, step)
    if not path.is_file():
        there = [int(file.stem.removeprefix("step_")) for file in sample_files(run_dir)]
        raise DataError(f"{path} is not there; samples were kept of steps {there or 'none'} (--report-samples)")
    tokenizer = load_tokenizer(cfg.model)
    samples = [evidence_of(sample, tokenizer) for sample in read_samples(path).samples if usable(sample)]
    samples = [sample for sample in samples if step in sample.versions] or samples
    if not samples:
        raise DataError(f"{path} holds no sample with log-probs of an engine and a prompt that was kept")
    versions = {version for sample in samples for version in sample.versions}
    if versions and step not in versions:
        return older_by_design(step, versions)
    rescorer = Rescorer(Path(cfg.model.hf_checkpoint), trust_remote_code=cfg.model.trust_remote_code)
    weights = weights_of(cfg, run_dir, step, rescorer)
    temperature = cfg.rollout.rollout_temperature
    base = Scoring(temperature=temperature, dtype=compute_dtype(cfg))
    sampling = Scoring(temperature=temperature, top_p=cfg.rollout.rollout_top_p, top_k=cfg.rollout.rollout_top_k)
    return explain(
        samples[:MAX_SAMPLES], rescorer.score, weights, base, sampling=sampling, has_experts=rescorer.has_experts
    )


def older_by_design(step: int, versions: set[int]) -> Explanation:
    """No response of the step names the weights that the trainer began it with."""
    named = ", ".join(f"v{version}" for version in sorted(versions))
    return Explanation(
        cause="stale weights",
        evidence=f"the responses themselves name weights {named}, and the trainer began the step with v{step}",
        remedy="That is how --async-mode, --partial-rollout and --update-weights-interval work; --use-tis and "
        "--use-rollout-logprobs correct for it.",
        difference=float("nan"),
        tried=[],
    )


def compute_dtype(cfg: RunConfig) -> torch.dtype:
    """What the trainer's forward pass computed in; on a GPU bfloat16 unless a flag says otherwise."""
    if cfg.model.dtype == "bfloat16" or (cfg.model.dtype == "auto" and cfg.cluster.device == "cuda"):
        return torch.bfloat16
    return torch.float32


def usable(sample: RecordedSample) -> bool:
    return bool(sample.prompt_ids) and len(sample.head.rollout_logprobs) == len(sample.head.ids) > 0


def evidence_of(sample: RecordedSample, tokenizer: Tokenizer) -> Evidence:
    head = sample.head
    trainer = None
    if head.gaps and any(head.gaps):
        trainer = [value + gap for value, gap in zip(head.rollout_logprobs, head.gaps, strict=True)]
    return Evidence(
        tokens=[*sample.prompt_ids, *head.ids],
        num_prompt=len(sample.prompt_ids),
        engine=head.rollout_logprobs,
        trainer=trainer,
        versions=sample.weight_versions,
        other_prompts=other_prompts(sample, tokenizer),
    )


def other_prompts(sample: RecordedSample, tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Prompts that an engine may have seen instead of the recorded ids."""
    ids = sample.prompt_ids
    found = {
        "a prompt without its first token": ids[1:],
        "a prompt without its last token": ids[:-1],
        "the prompt's text encoded again": tokenizer.encode(sample.prompt, add_special_tokens=False),
        "the same with special tokens": tokenizer.encode(sample.prompt, add_special_tokens=True),
    }
    if tokenizer.bos_token_id is not None:
        found["one more token of the beginning"] = [tokenizer.bos_token_id, *ids]
    return {name: other for name, other in found.items() if other and other != ids}


def weights_of(cfg: RunConfig, run_dir: Path, step: int, rescorer: Rescorer) -> Sequence[Weights]:
    """The weights that the step began with, then older ones."""
    saved = Path(cfg.checkpoint.save) if cfg.checkpoint.save is not None else run_dir / "checkpoints"
    by_step = {step_of(path): path for path in complete_checkpoints(saved)}
    first_step = cfg.rollout.start_rollout_id or 0
    found: list[Weights] = []
    if step - 1 in by_step:
        found.append(_checkpoint(by_step[step - 1], rescorer, is_current=True))
    elif step != first_step or cfg.checkpoint.load is not None:
        raise DataError(
            f"the weights that step {step} began with are not there: {saved} holds checkpoints of steps "
            f"{sorted(by_step) or 'none'}. Explain the step after one of those"
            + (f", or step {first_step}" if cfg.checkpoint.load is None else "")
        )
    is_current = not found
    start = Weights(name="--hf-checkpoint", load=rescorer.load_first, is_current=is_current)
    older = [by_step[number] for number in sorted(by_step, reverse=True) if number < step - 1][:MAX_OLDER_WEIGHTS]
    older_weights = [_checkpoint(path, rescorer, is_current=False) for path in older]
    return [start] if is_current else [*found, *older_weights, start]


def _checkpoint(path: Path, rescorer: Rescorer, *, is_current: bool) -> Weights:
    return Weights(
        name=f"step {step_of(path)}", load=lambda: rescorer.load_checkpoint(path / "trainer"), is_current=is_current
    )
