"""Flags of the Megatron backend against each other and against what that backend has. What needs the model's
config.json is in `megatron_model.py`.
"""

import importlib.metadata
import importlib.util

from rlkit.config.fields import all_fields
from rlkit.config.schema import MegatronConfig, RunConfig


def megatron_flags_have_their_backend(cfg: RunConfig) -> str | None:
    if cfg.train.train_backend == "megatron":
        return None
    for name in MegatronConfig.__dataclass_fields__:
        value = getattr(cfg.megatron, name)
        if value != all_fields()[name].default:
            return (
                f"{name} = {value} belongs to the Megatron backend, and train_backend = {cfg.train.train_backend};"
                f" pass --train-backend megatron or drop {all_fields()[name].flag}"
            )
    return None


def megatron_does_what_is_asked(cfg: RunConfig) -> str | None:
    """What only the FSDP backend has so far."""
    if cfg.train.train_backend != "megatron":
        return None
    lacking = {
        "async_save": (cfg.checkpoint.async_save, "saves wait; drop --async-save"),
        "fp16": (cfg.precision.fp16, "it computes in bfloat16 or float32; drop --fp16"),
        "only_train_params_name_list": (
            bool(cfg.optimizer.only_train_params_name_list),
            "it trains every parameter; drop --only-train-params-name-list",
        ),
        "freeze_params_name_list": (
            bool(cfg.optimizer.freeze_params_name_list),
            "it trains every parameter; drop --freeze-params-name-list",
        ),
        "torch_compile": (cfg.train.torch_compile == "on", "its layers are not compiled; pass --torch-compile auto"),
    }
    for name, (is_asked, told) in lacking.items():
        if is_asked:
            value = getattr(getattr(cfg, all_fields()[name].section), name)
            return f"{name} = {value}, but train_backend = megatron lacks it: {told}, or pass --train-backend fsdp"
    return None


TESTED = "0.19."
"""Versions of megatron-core that begin so."""


def megatron_has_its_packages(cfg: RunConfig) -> list[str]:
    """Asked before a launch. Megatron-Core imports triton wherever it runs."""
    if cfg.train.train_backend != "megatron" or not cfg.starts_trainer:
        return []
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return ["train_backend = megatron needs the package megatron-core; pip install 'rlkit[megatron]' (Python 3.12)"]
    found: list[str] = []
    if not version.startswith(TESTED):
        found.append(
            f"train_backend = megatron was tested with megatron-core {TESTED}x, not {version};"
            f" pip install 'megatron-core=={TESTED}*'"
        )
    if importlib.util.find_spec("triton") is None:
        found.append(
            "train_backend = megatron needs the package triton, which megatron-core imports; pip install triton"
        )
    return found


def sequence_parallel_has_tensor_ranks(cfg: RunConfig) -> str | None:
    tensor = cfg.megatron.tensor_model_parallel_size
    if not cfg.megatron.sequence_parallel or tensor > 1:
        return None
    return (
        f"sequence_parallel = True deals tokens over tensor_model_parallel_size = {tensor} rank; raise"
        " --tensor-model-parallel-size or drop --sequence-parallel"
    )


def virtual_stages_have_stages(cfg: RunConfig) -> str | None:
    stages, runs = cfg.megatron.pipeline_model_parallel_size, cfg.megatron.virtual_pipeline_size
    if runs is None or stages > 1:
        return None
    return (
        f"num_virtual_stages_per_pipeline_rank = {runs} needs several stages, and pipeline_model_parallel_size ="
        f" {stages}; raise --pipeline-model-parallel-size or drop --num-virtual-stages-per-pipeline-rank"
    )


def uneven_stages_are_whole_runs(cfg: RunConfig) -> str | None:
    sizes = cfg.megatron
    ends = {
        "decoder_first_pipeline_num_layers": sizes.decoder_first_pipeline_num_layers,
        "decoder_last_pipeline_num_layers": sizes.decoder_last_pipeline_num_layers,
    }
    given = {name: layers for name, layers in ends.items() if layers is not None}
    if not given or sizes.pipeline_model_parallel_size > 1:
        return None
    name, layers = next(iter(given.items()))
    return (
        f"{name} = {layers} needs several stages, and pipeline_model_parallel_size = 1; raise"
        f" --pipeline-model-parallel-size or drop {all_fields()[name].flag}"
    )


def recomputation_is_whole(cfg: RunConfig) -> str | None:
    sizes = cfg.megatron
    given = {"recompute_method": sizes.recompute_method, "recompute_num_layers": sizes.recompute_num_layers}
    for name, value in given.items():
        if value is not None and sizes.recompute_granularity != "full":
            return (
                f"{name} = {value} has no effect with recompute_granularity = {sizes.recompute_granularity}; pass"
                " --recompute-granularity full"
            )
    if sizes.recompute_granularity is not None and cfg.train.gradient_checkpointing is False:
        return (
            f"recompute_granularity = {sizes.recompute_granularity} and gradient_checkpointing = False contradict each"
            " other; drop --no-gradient-checkpointing or --recompute-granularity"
        )
    return None


RULES = (
    megatron_flags_have_their_backend,
    megatron_does_what_is_asked,
    sequence_parallel_has_tensor_ranks,
    virtual_stages_have_stages,
    uneven_stages_are_whole_runs,
    recomputation_is_whole,
)
