"""What the file system has to hold. Checked before launch; the dry run only mentions it, as it runs anywhere."""

import importlib.util
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from rlkit.config.checkpoint_files import config_problems, missing_shards, weight_problems
from rlkit.config.errors import ConfigError
from rlkit.config.eval_sets import eval_sets
from rlkit.config.hooks import HOOKS, check_source
from rlkit.config.quantization import quantized_names, read_quantization
from rlkit.config.reward_names import REWARD_NAMES
from rlkit.config.rules.required import evaluates, reads_prompts
from rlkit.config.rules.rollout import eval_pairs, without_slice
from rlkit.config.rules.sampling import functions_can_be_called
from rlkit.config.schema import RunConfig


def checkpoint_folders(cfg: RunConfig) -> list[tuple[str, str, str]]:
    """(field, flag, folder) of every Hugging Face checkpoint that the run reads."""
    folders = [("hf_checkpoint", "--hf-checkpoint", cfg.model.hf_checkpoint)]
    if cfg.needs_reference and cfg.model.ref_load is not None:
        folders.append(("ref_load", "--ref-load", cfg.model.ref_load))
    if cfg.needs_teacher and cfg.distill.opd_teacher_load is not None:
        folders.append(("opd_teacher_load", "--opd-teacher-load", cfg.distill.opd_teacher_load))
    if cfg.needs_critic and cfg.critic.critic_load is not None:
        folders.append(("critic_load", "--critic-load", cfg.critic.critic_load))
    if cfg.reward.rm_model is not None:
        folders.append(("rm_model", "--rm-model", cfg.reward.rm_model))
    return folders


def checkpoints_can_be_read(cfg: RunConfig) -> list[str]:
    """What is wrong with the checkpoint files that are on this machine; those that are not are none of it."""
    folders = [Path(folder) for folder in dict.fromkeys(folder for _, _, folder in checkpoint_folders(cfg))]
    found: list[str] = []
    for folder in folders:
        if (folder / "config.json").is_file():
            found += [*config_problems(folder), *weight_problems(folder)]
    return found


def checkpoints_are_there(cfg: RunConfig) -> list[str]:
    """`--hf-checkpoint`, and `--ref-load` where it is used, are folders with a config.json and all weights of their
    index.
    """
    found: list[str] = []
    for name, flag, folder in checkpoint_folders(cfg):
        path = Path(folder)
        if not path.is_dir():
            looks_like_hub = folder.count("/") == 1 and not folder.startswith((".", "/", "~"))
            remedy = f"download it first and pass the folder to {flag}" if looks_like_hub else f"correct {flag}"
            found.append(f"{name} = {folder} is not a folder; {remedy}")
        elif not (path / "config.json").is_file():
            found.append(f"{name} = {folder} has no config.json, so it is no Hugging Face checkpoint; correct {flag}")
        else:
            found += [f"{name} = {folder}: {problem}" for problem in missing_shards(path)]
    return found


def quantisation_is_known(cfg: RunConfig) -> list[str]:
    """fp8 in blocks of 128 x 128 is dequantised, and quantised again on its way to the engines; nothing else is."""
    folders = [cfg.model.hf_checkpoint]
    if cfg.needs_reference and cfg.model.ref_load is not None:
        folders.append(cfg.model.ref_load)
    if cfg.needs_teacher and cfg.distill.opd_teacher_load is not None:
        folders.append(cfg.distill.opd_teacher_load)
    found: list[str] = []
    for folder in folders:
        try:
            scheme = read_quantization(folder)
            if scheme is not None:
                quantized_names(folder, scheme)
        except ConfigError as error:
            found.append(str(error))
    return found


def scoring_models_read_the_same_tokens(cfg: RunConfig) -> list[str]:
    """A teacher or reference of another vocabulary would score other words, in silence."""
    found: list[str] = []
    if cfg.needs_teacher and cfg.distill.opd_teacher_load is not None:
        found += _other_vocabulary(cfg, "opd_teacher_load", cfg.distill.opd_teacher_load)
    if cfg.needs_critic and cfg.critic.critic_load is not None:
        found += _other_vocabulary(cfg, "critic_load", cfg.critic.critic_load)
    if cfg.needs_reference and cfg.model.ref_load is not None:
        found += _other_vocabulary(cfg, "ref_load", cfg.model.ref_load)
    return found


def _other_vocabulary(cfg: RunConfig, name: str, folder: str) -> list[str]:
    """Asked where both tokenizers can be read."""
    ours, theirs = (_read_vocabulary(path) for path in (cfg.model.hf_checkpoint, folder))
    if ours is None or theirs is None or ours == theirs:
        return []
    num_other = sum(theirs.get(token) != number for token, number in ours.items())
    return [
        f"{name} = {folder} has another vocabulary than hf_checkpoint = {cfg.model.hf_checkpoint}:"
        f" {num_other} of {len(ours)} tokens mean something else there;"
        f" pass a --{name.replace('_', '-')} of the same tokenizer"
    ]


def prompt_files_are_there(cfg: RunConfig) -> list[str]:
    files: list[tuple[str, str]] = []
    if reads_prompts(cfg) and cfg.data.prompt_data:
        files.append(("prompt_data", cfg.data.prompt_data))
    if evaluates(cfg):
        files += [("eval_prompt_data", path) for _, path in eval_pairs(cfg)]
    return [
        f"{name} = {path}: there is no file {without_slice(path)}; correct --{name.replace('_', '-')}"
        for name, path in files
        if not Path(without_slice(path)).is_file()
    ]


def first_row_has_the_columns(cfg: RunConfig) -> list[str]:
    """A misspelt column is found here, not after Ray is up. The other rows are read when the run starts."""
    if not reads_prompts(cfg) or not cfg.data.prompt_data:
        return []
    path = Path(without_slice(cfg.data.prompt_data))
    row = _first_row(path)
    if row is None:
        return []
    wanted = [("input_key", cfg.data.input_key), ("label_key", cfg.data.label_key)]
    if cfg.is_dpo:
        wanted += [("chosen_key", cfg.dpo.chosen_key), ("rejected_key", cfg.dpo.rejected_key)]
    return [
        f"{name} = {key}: the first row of {path} has no such column, it has {', '.join(map(repr, row))};"
        f" correct --{name.replace('_', '-')}"
        for name, key in wanted
        if key is not None and key not in row
    ]


def _first_row(path: Path) -> Mapping[str, Any] | None:
    """None where it cannot be read here; the reader of the data says why, with the line."""
    try:
        with path.open("rb") as file:
            row = json.loads(file.readline())
    except (OSError, ValueError):
        return None
    return cast("Mapping[str, Any]", row) if isinstance(row, dict) else None


def evaluation_sets_can_be_read(cfg: RunConfig) -> list[str]:
    """The file of `--eval-config` is right, and so are the files and graders that it names."""
    if cfg.evaluation.eval_config is None or not evaluates(cfg):
        return []
    try:
        sets = eval_sets(cfg)
    except ConfigError as error:
        return [str(error)]
    found: list[str] = []
    for item in sets:
        where = f"eval_config: {item.name}"
        if not Path(without_slice(item.path)).is_file():
            found.append(f"{where}: there is no file {without_slice(item.path)}; correct --eval-config")
        if item.rm_type is not None and item.rm_type not in REWARD_NAMES:
            found.append(f"{where}: rm_type = {item.rm_type} is not a built-in grader; correct --eval-config")
        if item.rm_type is None and item.custom_rm_path is None and not cfg.agent.has_agent:
            found.append(f"{where} has no grader; give it rm_type or custom_rm_path, or pass --rm-type")
        if item.custom_rm_path is not None and (problem := check_source(HOOKS["custom_rm_path"], item.custom_rm_path)):
            found.append(f"{where}: {problem}")
    return found


def resumed_folder_is_there(cfg: RunConfig) -> list[str]:
    load = cfg.checkpoint.load
    # Scripts of slime's users pass the same folder to --load and --save: on the first start it is not there yet.
    if load is None or load == cfg.checkpoint.save or Path(load).is_dir():
        return []
    return [f"load = {load} is not a folder; correct --load, or drop it to start anew"]


def replayed_rollout_is_there(cfg: RunConfig) -> list[str]:
    template = cfg.debug.load_debug_rollout_data
    if template is None:
        return []
    first = cfg.rollout.start_rollout_id
    if "{rollout_id}" in template and first is None:
        return []  # the first step is known after the checkpoint is read
    path = Path(template.replace("{rollout_id}", str(first)))
    return [] if path.is_file() else [f"load_debug_rollout_data = {template}: there is no file {path}"]


def output_folders_can_be_made(cfg: RunConfig) -> list[str]:
    folders = {
        "output_dir": cfg.logging.output_dir,
        "save": cfg.checkpoint.save,
        "update_weight_disk_dir": cfg.sync.update_weight_disk_dir,
    }
    return [
        f"{name} = {folder}: {problem}; choose another --{name.replace('_', '-')}"
        for name, folder in folders.items()
        if folder is not None and (problem := _why_not_writable(output_folder(folder)))
    ]


def output_folder(name: str) -> Path:
    """`~` is the home folder also where no shell has replaced it: in a recipe, and after `--output-dir=`."""
    return Path(name).expanduser()


def _why_not_writable(folder: Path) -> str | None:
    """Asked of the nearest folder that is there, by making one in it and taking that away again: permissions alone
    do not tell what a read-only or virtual file system allows.
    """
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is a file, not a folder"
    try:
        with tempfile.TemporaryDirectory(prefix=".rlkit-", dir=folder):
            return None
    except OSError as error:
        return f"no folder can be made in {folder} ({error.strerror})"


def attention_heads_split_evenly(cfg: RunConfig) -> list[str]:
    """The heads that config.json states divide over the GPUs of an engine, where the folder is there."""
    model = read_model_config(cfg.model.hf_checkpoint)
    heads = model.get("num_attention_heads") if model is not None else None
    tensor = cfg.cluster.rollout_num_gpus_per_engine // cfg.engine.sglang.get("pp_size", 1)
    attention = tensor // cfg.engine.sglang.get("dp_size", 1)
    if not isinstance(heads, int) or not cfg.starts_engines or heads % attention == 0:
        return []
    width = cfg.cluster.rollout_num_gpus_per_engine
    return [
        f"rollout_num_gpus_per_engine = {width} splits attention {attention} ways, but the model has"
        f" num_attention_heads = {heads}; pass a --rollout-num-gpus-per-engine that divides it"
    ]


def read_model_config(folder: str) -> dict[str, Any] | None:
    """The checkpoint's config.json (the text part of a multimodal one); None where it cannot be read."""
    try:
        model = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(model, dict):
        return None
    whole = cast("dict[str, Any]", model)
    text = whole.get("text_config", whole)
    return cast("dict[str, Any]", text) if isinstance(text, dict) else None


def _read_vocabulary(folder: str) -> dict[str, int] | None:
    """Token -> id of a tokenizer.json; None where there is none, or one of another kind."""
    try:
        vocabulary = json.loads((Path(folder) / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    except (OSError, ValueError, KeyError):
        return None
    return cast("dict[str, int]", vocabulary) if isinstance(vocabulary, dict) else None


def adapters_have_their_package(cfg: RunConfig) -> list[str]:
    if not cfg.uses_lora or importlib.util.find_spec("peft") is not None:
        return []
    return [
        f"lora_rank = {cfg.lora.lora_rank} needs the package peft, which is not installed; pip install 'rlkit[lora]',"
        " or drop --lora-rank"
    ]


PATH_RULES = (
    checkpoints_are_there,
    checkpoints_can_be_read,
    adapters_have_their_package,
    quantisation_is_known,
    scoring_models_read_the_same_tokens,
    prompt_files_are_there,
    first_row_has_the_columns,
    functions_can_be_called,
    evaluation_sets_can_be_read,
    resumed_folder_is_there,
    replayed_rollout_is_there,
    output_folders_can_be_made,
    attention_heads_split_evenly,
)
