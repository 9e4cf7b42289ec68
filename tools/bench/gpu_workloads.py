"""The fixed workloads of `gpu_step.py`, and the command line of `train.py` that each one stands for."""

from dataclasses import dataclass, replace
from pathlib import Path

QWEN3_VOCAB = 151_936
SMALL_VOCAB = 49_152


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuWorkload:
    """GRPO steps of one optimizer step each: temperature 1, no KL, no reference model, AdamW at 1e-6."""

    name: str
    about: str
    shape: str
    """Of `make_random_model.py`."""
    vocab_size: int
    ignores_eos: bool
    """Every response has exactly `response_len` tokens; otherwise random weights end a few early."""
    num_ranks: int = 1
    num_engines: int = 1
    is_split: bool = False
    """Trainer and engine on GPUs of their own."""
    num_prompts: int = 32
    samples_per_prompt: int = 8
    response_len: int = 1024
    max_tokens_per_gpu: int = 16_384
    checkpoints_activations: bool = False
    """All of them; otherwise rlkit decides by an estimate of memory."""

    @property
    def num_gpus(self) -> int:
        return self.num_ranks + self.num_engines if self.is_split else self.num_ranks


_W1 = GpuWorkload(
    name="W1",
    about="0.6B, one GPU shared",
    shape="qwen3-0.6B",
    vocab_size=QWEN3_VOCAB,
    ignores_eos=True,
)
_W3 = replace(
    _W1,
    name="W3",
    about="4B, one GPU shared",
    shape="qwen3-4B",
    max_tokens_per_gpu=8192,
)
_PEER = {"vocab_size": SMALL_VOCAB, "ignores_eos": False}
"""As other frameworks were measured: the vocabulary of a small tokenizer, responses that may end."""

WORKLOADS = {
    load.name: load
    for load in (
        _W1,
        replace(_W1, name="W1p", about="W1 as other frameworks were measured", **_PEER),
        replace(_W1, name="W2", about="0.6B, two GPUs shared", num_ranks=2, num_engines=2),
        _W3,
        replace(_W3, name="W3p", about="W3 as other frameworks were measured", **_PEER),
        replace(_W3, name="W4", about="4B, trainer and engine on a GPU each", is_split=True),
    )
}


def tiny(load: GpuWorkload) -> GpuWorkload:
    """The same layout with next to nothing to compute, to try the benchmark itself on a CPU."""
    return replace(
        load,
        name=f"{load.name}-tiny",
        shape="tiny",
        num_prompts=4,
        samples_per_prompt=4,
        response_len=24,
        max_tokens_per_gpu=256,
    )


def train_flags(load: GpuWorkload, *, model: Path, prompts: Path, device: str, rm: tuple[str, ...]) -> list[str]:
    """Flags of `train.py` but for the number of steps and the run folder."""
    gpus_per_node = str(load.num_gpus)
    flags = [
        *("--hf-checkpoint", str(model), "--prompt-data", str(prompts)),
        *("--input-key", "prompt", "--label-key", "label", "--apply-chat-template", *rm),
        *("--rollout-batch-size", str(load.num_prompts), "--n-samples-per-prompt", str(load.samples_per_prompt)),
        *("--rollout-max-response-len", str(load.response_len), "--rollout-temperature", "1"),
        *("--num-steps-per-rollout", "1", "--max-tokens-per-gpu", str(load.max_tokens_per_gpu)),
        *("--lr", "1e-6", "--adam-beta2", "0.98", "--weight-decay", "0.1", "--eps-clip-high", "0.28"),
        *("--actor-num-gpus-per-node", str(load.num_ranks), "--num-gpus-per-node", gpus_per_node),
        *(("--rollout-num-gpus", str(load.num_engines)) if load.is_split else ("--colocate",)),
        *("--device", device),
    ]
    if load.ignores_eos:
        flags.append("--rollout-ignore-eos")
    if load.checkpoints_activations:
        flags.append("--gradient-checkpointing")
    if device == "cpu":
        return [*flags, "--embedded-max-running-requests", str(load.num_prompts * load.samples_per_prompt)]
    return [
        *flags,
        *("--sglang-mem-fraction-static", "0.7", "--sglang-cuda-graph-max-bs-decode", "256"),
        *("--sglang-chunked-prefill-size", "8192"),
    ]
