"""Every setting of a run, as a tree of frozen dataclasses. A field is called what its flag is called
(`rollout_batch_size` <-> `--rollout-batch-size`).

The command line (`config/load.py`) flattens the tree into slime-compatible flags; `config/rules/` checks fields
against each other.
Nothing here is ever edited after parsing: derived numbers are properties. This module imports the standard library
only.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """How many GPUs (or, without CUDA, rank slots) train and generate, and whether they share them."""

    actor_num_nodes: int = 1
    """Nodes that hold training ranks."""
    actor_num_gpus_per_node: int = 8
    """Training ranks per node, one GPU each."""
    colocate: bool = False
    """Trainer and engines take turns on the same GPUs; otherwise each has its own."""
    rollout_num_gpus: int | None = None
    """GPUs of all engines together. Required when split; colocated it defaults to the trainer's number."""
    rollout_num_gpus_per_engine: int = 1
    """GPUs of one engine (tensor x pipeline parallel)."""
    num_gpus_per_node: int = 8
    """GPUs that one node of the cluster has; fewer than 8 must be said here."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto` takes CUDA where torch sees it. On `cpu` a "GPU" in the other flags is a rank slot: a process with its
    share of the cores."""
    ray_address: str | None = None
    """Address of a running Ray cluster (`auto` inside `ray job submit`); unset starts a private one that ends with the
    run."""
    placement_timeout_s: float = 600.0
    """Seconds to wait for the cluster to provide the GPUs, said aloud meanwhile, before giving up."""
    gpu_type: str | None = None
    """Name of the GPU that `--dry-run` plans for on a machine without it, e.g. `H200`."""
    gpu_memory_gib: float | None = None
    """Memory of that GPU in GiB, for `--dry-run`."""

    @property
    def actor_num_gpus(self) -> int:
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def engine_num_gpus(self) -> int:
        """GPUs of all engines."""
        if self.rollout_num_gpus is not None:
            return self.rollout_num_gpus
        return self.actor_num_gpus if self.colocate else 0

    @property
    def num_engines(self) -> int:
        return self.engine_num_gpus // self.rollout_num_gpus_per_engine

    @property
    def slots_per_node(self) -> int:
        """GPUs of a node that this run counts with: several trainer nodes each give exactly their training ranks."""
        return self.actor_num_gpus_per_node if self.actor_num_nodes > 1 else self.num_gpus_per_node


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which model, and how it is loaded."""

    hf_checkpoint: str = ""
    """Folder of the Hugging Face checkpoint: architecture, tokenizer and, unless `--load` resumes, the weights.
    Required."""
    ref_load: str | None = None
    """Folder of the reference model's Hugging Face checkpoint; unset means `--hf-checkpoint`. Loaded only where a KL
    term needs it."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute and engine dtype. `auto` is bfloat16 on CUDA and float32 on a CPU. Master weights are always float32."""
    attn_implementation: Literal["auto", "flash_attention_2", "sdpa", "eager"] = "auto"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """What is generated in one step."""

    num_rollout: int | None = None
    """Steps of the run (one rollout each). This or `--num-epoch` is required; 0 evaluates only."""
    num_epoch: int | None = None
    """Passes over the prompt file, when `--num-rollout` is unset."""
    rollout_batch_size: int = 0
    """Prompts per rollout. Required."""
    n_samples_per_prompt: int = 1
    """Responses per prompt; GRPO needs at least 2."""
    rollout_temperature: float = 1.0
    """Sampling temperature; the trainer scores log-probs at the same one."""
    rollout_top_p: float = 1.0
    """Nucleus sampling. Below 1 the policy that samples is not the one that is trained: warned about."""
    rollout_top_k: int = -1
    """Top-k sampling; -1 is the whole vocabulary. The same warning holds."""
    rollout_max_response_len: int = 1024
    """Most tokens of one response; longer ones are marked truncated."""
    rollout_max_context_len: int | None = None
    """Most tokens of prompt and response together; unset means the model's own limit."""
    rollout_stop: tuple[str, ...] = ()
    """Strings that end a response."""
    rollout_stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, beside the model's end-of-sequence ids."""
    rollout_skip_special_tokens: bool = False
    """Leave special tokens out of the response text that graders see."""
    start_rollout_id: int | None = None
    """First step; unset continues after the loaded checkpoint, or starts at 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """How responses are graded."""

    rm_type: str | None = None
    """Built-in grader: `math`, `exact`, `deepscaler`, `dapo`, `f1`, `gpqa` or `random`; `boxed_` in front grades what
    \\boxed{} holds. A row's metadata may name another (`rm_type`)."""
    custom_rm_path: str | None = None
    """`package.module.function` or `file.py:function`: `(response, label, metadata) -> float | dict | None`, or the
    same as a coroutine. Instead of `--rm-type`."""
    reward_key: str | None = None
    """Key of the number to train on, where the grader returns a dict."""
    eval_reward_key: str | None = None
    """The same for evaluation; unset means `--reward-key`."""
    rm_timeout_s: float = 10.0
    """Seconds one grading may take; then its process is replaced and the sample counts as unscored."""
    rm_num_workers: int = 2
    """Grader processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Held-out evaluation."""

    eval_interval: int | None = None
    """Evaluate after every so many steps, before the first and after the last. Unset: never."""
    eval_prompt_data: tuple[str, ...] = ()
    """Pairs `name path [name path ...]`; paths may be sliced."""
    n_samples_per_eval_prompt: int = 1
    """Responses per evaluation prompt."""
    eval_temperature: float | None = None
    """Unset takes the rollout's; 0 is greedy."""
    eval_top_p: float | None = None
    """Unset takes the rollout's."""
    eval_top_k: int | None = None
    """Unset takes the rollout's."""
    eval_max_response_len: int | None = None
    """Unset takes the rollout's."""
    eval_input_key: str | None = None
    """Unset takes `--input-key`."""
    eval_label_key: str | None = None
    """Unset takes `--label-key`."""
    skip_eval_before_train: bool = False
    """Do not evaluate before the first step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Inference engines and the router in front of them."""

    rollout_engine: Literal["auto", "sglang", "embedded"] = "auto"
    """`auto` takes SGLang where the device is CUDA and the embedded engine otherwise."""
    sglang_server_concurrency: int = 512
    """Most requests in flight per engine."""
    engine_start_timeout_s: float = 600.0
    """Seconds from process start to the first answer of an engine."""
    engine_timeout_s: float = 600.0
    """Seconds for one generation request before it is re-issued."""
    embedded_max_running_requests: int = 64
    """Sequences that the embedded engine decodes together; more wait in its queue."""
    sglang: dict[str, Any] = field(default_factory=dict[str, Any])
    """Pass-through: every `--sglang-NAME VALUE` of the pinned SGLang lands here as NAME -> VALUE."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgoConfig:
    """Advantages and loss. Formulas and papers: docs/algorithms.md."""

    advantage_estimator: Literal["grpo", "rloo"] = "grpo"
    """`grpo`: reward minus the mean of its prompt group, over its standard deviation. `rloo`: minus the mean of the
    group's other samples."""
    disable_grpo_std_normalization: bool = False
    """Centre only, do not divide by the group's standard deviation (as Dr.GRPO)."""
    loss_type: Literal["policy_loss", "sft_loss"] = "policy_loss"
    """Policy gradient, or supervised cross-entropy on given responses."""
    calculate_per_token_loss: bool = False
    """Mean over all trained tokens of the step; off: mean over samples of their token means."""
    eps_clip: float = 0.2
    """The ratio is clipped at 1 - eps_clip from below."""
    eps_clip_high: float | None = None
    """and at 1 + eps_clip_high from above; unset means `--eps-clip`."""
    eps_clip_c: float | None = None
    """Dual clip for negative advantages: the loss is at most -c * advantage; must be above 1."""
    use_kl_loss: bool = False
    """Add `--kl-loss-coef` times KL(policy, reference) to the loss; loads the reference model."""
    kl_loss_coef: float = 0.0
    """Weight of the KL term. 0 with `--use-kl-loss` reports the KL without training on it."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    """KL estimator; low_var_kl is k3 clamped to [-10, 10]."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus. Entropy is reported in any case."""
    use_rollout_logprobs: bool = False
    """Take the engine's log-probs as the old policy's instead of scoring again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW on float32 master weights."""

    lr: float = 1e-6
    """Peak learning rate."""
    min_lr: float = 0.0
    """Floor of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the schedule after the warm-up, in optimizer steps."""
    lr_warmup_iters: int = 0
    """Optimizer steps of linear warm-up from 0."""
    lr_decay_iters: int | None = None
    """Optimizer steps until `--min-lr`; unset means the whole run."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.98
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay on matrices; norms and biases are left alone."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 does not clip."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Batching and memory of the trainer."""

    train_backend: Literal["fsdp"] = "fsdp"
    """FSDP2: `fully_shard` per block over all training ranks."""
    global_batch_size: int | None = None
    """Samples per optimizer step; unset follows from `--num-steps-per-rollout`."""
    num_steps_per_rollout: int | None = None
    """Optimizer steps per rollout; unset follows from `--global-batch-size`, else 1."""
    max_tokens_per_gpu: int = 8192
    """Most tokens of one micro-batch on one GPU. A longer sample runs alone."""
    log_probs_chunk_size: int = 1024
    """Tokens whose logits are held in float32 at a time; bounds memory at large vocabularies."""
    gradient_checkpointing: bool = False
    """Recompute each block's activations in the backward pass: slower, far less memory."""
    seed: int = 1234
    """Seed of the trainer's random state."""
    distributed_timeout_minutes: int = 10
    """Minutes that training ranks wait for each other, at the start and in every collective, before they give up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncConfig:
    """How new weights reach the engines."""

    update_weight_transport: Literal["auto", "ipc", "nccl", "disk"] = "auto"
    """`auto`: shared memory (`ipc`) when colocated, one process group (`nccl`; gloo on a CPU) when split."""
    update_weight_buffer_size: int = 512 * 1024 * 1024
    """Bytes of one bucket."""
    update_weight_disk_dir: str | None = None
    """Folder for the `disk` transport, visible to trainer and engines; unset means the run folder."""
    check_weight_update_equal: bool = False
    """After every update compare checksums of all engine weights with the trainer's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """What is kept on disk, and where a run continues."""

    save: str | None = None
    """Folder for checkpoints; unset means `<output-dir>/checkpoints`."""
    save_interval: int | None = None
    """Save after every so many steps and after the last; unset saves after the last step only."""
    keep_checkpoints: int | None = None
    """Keep this many of the newest complete checkpoints; unset keeps all."""
    load: str | None = None
    """Checkpoint folder to continue from; unset looks into the folder of `--save`."""
    ckpt_step: int | None = None
    """Continue from this step's checkpoint instead of the newest complete one."""
    no_load_optim: bool = False
    """Take only weights from the checkpoint; optimizer and schedule start anew."""
    save_hf: str | None = None
    """Also export a Hugging Face checkpoint here at every save; `{rollout_id}` becomes the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig:
    """What the run tells, and where."""

    output_dir: str | None = None
    """Run folder; unset means `runs/<model>-<time>`. Starting again with the same folder resumes it."""
    use_wandb: bool = False
    """Also log to Weights & Biases."""
    wandb_mode: Literal["online", "offline", "disabled"] = "online"
    """`offline` writes under the run folder and needs no account."""
    wandb_project: str = "rlkit"
    """Project name there."""
    wandb_group: str | None = None
    """Group name there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DebugConfig:
    """Half runs and replays."""

    dry_run: bool = False
    """Print the resolved configuration, the layout and the batch arithmetic, then exit; needs neither GPU nor Ray."""
    save_debug_rollout_data: str | None = None
    """Write each rollout to this path; `{rollout_id}` becomes the step."""
    load_debug_rollout_data: str | None = None
    """Train on rollouts read from this path instead of generating; starts no engine."""
    debug_rollout_only: bool = False
    """Generate and grade, do not train."""
    debug_train_only: bool = False
    """Train without engines; needs `--load-debug-rollout-data`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The whole run."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def samples_per_rollout(self) -> int:
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps per rollout."""
        if self.train.num_steps_per_rollout is not None:
            return self.train.num_steps_per_rollout
        if self.train.global_batch_size is not None:
            return self.samples_per_rollout // self.train.global_batch_size
        return 1

    @property
    def batch_size(self) -> int:
        """Samples per optimizer step (`--global-batch-size`, or derived)."""
        return self.samples_per_rollout // self.steps_per_rollout

    @property
    def needs_reference(self) -> bool:
        return self.algo.use_kl_loss and self.algo.loss_type == "policy_loss"

    @property
    def is_sft(self) -> bool:
        return self.algo.loss_type == "sft_loss"

    @property
    def starts_engines(self) -> bool:
        return self.debug.load_debug_rollout_data is None and not self.debug.debug_train_only and not self.is_sft

    @property
    def starts_trainer(self) -> bool:
        return not self.debug.debug_rollout_only
