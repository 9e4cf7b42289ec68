"""The model and the prompts."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which model, and how it is loaded."""

    hf_checkpoint: str = ""
    """Folder of the Hugging Face checkpoint: architecture, tokenizer and, unless `--load` resumes, the weights.
    Required."""
    ref_load: str | None = None
    """Folder of the reference model's Hugging Face checkpoint; unset means `--hf-checkpoint`. Loaded only where a KL
    term or DPO needs it."""
    ref_update_interval: int | None = None
    """Make the policy the new reference after every so many steps; checkpoints then hold the reference too. Unset: it
    stays what it is."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute and engine dtype. `auto` is bfloat16 on CUDA and float32 on a CPU. Master weights are always float32."""
    attn_implementation: Literal["auto", "flash_attention_2", "flash_attention_3", "sdpa", "eager"] = "auto"
    """Attention of the trainer. `auto` takes flash-attn where it is installed, else torch's varlen or SDPA kernels."""
    trust_remote_code: bool = False
    """Run Python code that the checkpoint folder brings. Off unless asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The prompt file."""

    prompt_data: str | None = None
    """JSONL file, optionally sliced like Python: `train.jsonl@[100:2000]`. Required."""
    input_key: str = "input"
    """Column of the prompt: a string, or a list of chat messages."""
    label_key: str | None = None
    """Column of the reference answer handed to the grader."""
    metadata_key: str = "metadata"
    """Column (a dict) handed to graders and hooks; may be absent."""
    tool_key: str = "tools"
    """Column of tool definitions handed to the chat template; may be absent."""
    apply_chat_template: bool = False
    """Render the prompt through the tokenizer's chat template with a generation prompt."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    """JSON object of extra arguments for the chat template, e.g. '{"enable_thinking": false}'."""
    rollout_shuffle: bool = False
    """Shuffle the rows anew in every epoch."""
    rollout_seed: int = 42
    """Seed of the shuffle and of every sample's generation seed."""
    rollout_max_prompt_len: int | None = None
    """Longer prompts (tokens) are left out, counted and reported; never cut."""
