"""What a launch wants to find on disk, and what works but is probably not meant."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlkit.config.rules import ADVICE, advice, check, check_paths
from rlkit.config.schema import RunConfig

Make = Callable[..., RunConfig]
SPLIT = {"colocate": False, "rollout_num_gpus": 2}
EVAL = {"eval_interval": 5, "eval_prompt_data": ("gsm8k", "test.jsonl")}
SFT = {"loss_type": "sft_loss", "n_samples_per_prompt": 1}
REPLAY = {"load_debug_rollout_data": "dump_{rollout_id}.jsonl"}


@pytest.fixture
def on_disk(tmp_path: Path) -> dict[str, Any]:
    """Fields of a run whose files are all there."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "x", "num_attention_heads": 6}))
    for name in ("train.jsonl", "test.jsonl", "grade.py"):
        (tmp_path / name).touch()
    return {
        "hf_checkpoint": str(model),
        "prompt_data": f"{tmp_path}/train.jsonl@[:10]",
        "eval_interval": 1,
        "eval_prompt_data": ("test", f"{tmp_path}/test.jsonl"),
    }


def test_nothing_is_missing(make_config: Make, on_disk: dict[str, Any]):
    assert check_paths(make_config(**on_disk)) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"hf_checkpoint": "no/such/folder"},
            "hf_checkpoint = no/such/folder is not a folder; correct --hf-checkpoint",
        ),
        ({"hf_checkpoint": "Qwen/Qwen3-4B"}, "download it first and pass the folder to --hf-checkpoint"),
        ({"hf_checkpoint": "{tmp}"}, "has no config.json"),
        ({"ref_load": "no/ref/here", "use_kl_loss": True}, "ref_load = no/ref/here is not a folder"),
        ({"ref_load": "no/ref/here", "kl_coef": 0.1}, "ref_load = no/ref/here is not a folder"),
        ({"opd_teacher_load": "no/teacher", "use_opd": True}, "opd_teacher_load = no/teacher is not a folder"),
        ({"prompt_data": "{tmp}/no.jsonl@[1:]"}, "there is no file {tmp}/no.jsonl; correct --prompt-data"),
        ({"eval_prompt_data": ("a", "{tmp}/no.jsonl")}, "there is no file {tmp}/no.jsonl; correct --eval-prompt-data"),
        ({"rm_type": None, "custom_rm_path": "{tmp}/no.py:f"}, "there is no file {tmp}/no.py"),
        ({"load": "{tmp}/no"}, "load = {tmp}/no is not a folder"),
        ({"load_debug_rollout_data": "{tmp}/no.jsonl"}, "there is no file {tmp}/no.jsonl"),
        ({"load_debug_rollout_data": "{tmp}/n_{{rollout_id}}", "start_rollout_id": 3}, "there is no file {tmp}/n_3"),
        ({"output_dir": "{tmp}/train.jsonl"}, "is a file, not a folder; choose another --output-dir"),
        ({"output_dir": "{tmp}/train.jsonl/x"}, "{tmp}/train.jsonl is a file, not a folder; choose another --output"),
        ({"save": "/proc/y"}, "save = /proc/y: no folder can be made in /proc"),
        (
            {"rollout_num_gpus_per_engine": 4, "actor_num_gpus_per_node": 4},
            "splits attention 4 ways, but the model has num_attention_heads = 6",
        ),
    ],
    ids=lambda fields: " ".join(fields) if isinstance(fields, dict) else "",
)
def test_missing_path_is_named(
    make_config: Make, on_disk: dict[str, Any], tmp_path: Path, fields: dict[str, Any], message: str
):
    def fill(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(fill, value))
        return value.format(tmp=tmp_path) if isinstance(value, str) else value

    cfg = make_config(**on_disk | {name: fill(value) for name, value in fields.items()})
    assert check(cfg) == []
    (problem,) = check_paths(cfg)
    assert message.format(tmp=tmp_path) in problem


@pytest.mark.parametrize(
    "fields",
    [
        {"ref_load": "no/ref/here"},
        {"load": "{tmp}/first_start", "save": "{tmp}/first_start"},
        {"rm_type": None, "custom_rm_path": "package.module.function"},
        {"load_debug_rollout_data": "later_{rollout_id}.jsonl", "prompt_data": "no.jsonl"},
        {"rollout_num_gpus_per_engine": 2},
        {"rollout_num_gpus_per_engine": 8, "actor_num_gpus_per_node": 8, "sglang": {"pp_size": 4}},
    ],
    ids=lambda fields: " ".join(fields),
)
def test_what_is_not_read_need_not_be_there(make_config: Make, on_disk: dict[str, Any], fields: dict[str, Any]):
    assert check_paths(make_config(**on_disk | fields)) == []


def test_a_teacher_of_another_vocabulary_is_refused(make_config: Make, on_disk: dict[str, Any], tmp_path: Path):
    ours, same, other = tmp_path / "model", tmp_path / "same", tmp_path / "other"
    for folder, vocabulary in ((ours, ["a", "b", "c"]), (same, ["a", "b", "c"]), (other, ["a", "c", "b"])):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"model_type": "x", "num_attention_heads": 6}))
        tokenizer = {"model": {"vocab": {token: number for number, token in enumerate(vocabulary)}}}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert check_paths(make_config(**on_disk, use_opd=True, opd_teacher_load=str(same))) == []
    (message,) = check_paths(make_config(**on_disk, use_opd=True, opd_teacher_load=str(other)))
    assert "2 of 3 tokens mean something else" in message and "--opd-teacher-load" in message


def test_all_missing_paths_at_once(make_config: Make):
    cfg = make_config(eval_interval=1, eval_prompt_data=("a", "no.jsonl"), load="no")
    assert len(check_paths(cfg)) == 4


ADVISED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "truncated_sampling_biases_the_gradient": (
        {"rollout_top_p": 0.9},
        {"rollout_top_p": 0.9, "debug_rollout_only": True},
    ),
    "kl_is_only_reported": ({"use_kl_loss": True}, {"use_kl_loss": True, "kl_loss_coef": 0.1}),
    "reference_is_not_loaded": ({"ref_load": "m"}, {"ref_load": "m", "use_kl_loss": True, "kl_loss_coef": 0.1}),
    "epochs_are_overruled": ({"num_epoch": 1}, {"num_epoch": 1, "num_rollout": None}),
    "schedule_is_constant": ({"lr_decay_iters": 5}, {"lr_decay_iters": 5, "lr_decay_style": "linear"}),
    "warmup_never_ends": ({"lr_warmup_iters": 10}, {"lr_warmup_iters": 9}),
    "nothing_is_learned": ({"lr": 0.0}, {"lr": 1e-9}),
    "long_responses_run_alone": ({"max_tokens_per_gpu": 1023}, {"max_tokens_per_gpu": 1024}),
    "context_cuts_responses": (
        {"rollout_max_prompt_len": 1000, "rollout_max_context_len": 2000},
        {"rollout_max_prompt_len": 976, "rollout_max_context_len": 2000},
    ),
    "greedy_samples_are_equal": (
        {**EVAL, "eval_temperature": 0.0, "n_samples_per_eval_prompt": 4},
        {**EVAL, "eval_temperature": 0.1, "n_samples_per_eval_prompt": 4},
    ),
    "evaluation_is_off": ({**EVAL, **REPLAY}, EVAL),
    "supervised_rows_are_not_graded": (SFT, {**SFT, "rm_type": None}),
    "some_shared_gpus_do_not_generate": ({"rollout_num_gpus": 1}, {**SPLIT, "rollout_num_gpus": 1}),
    "only_grpo_divides_by_the_deviation": (
        {"advantage_estimator": "rloo", "disable_grpo_std_normalization": True},
        {"disable_grpo_std_normalization": True},
    ),
    "half_precision_is_slow_on_a_cpu": ({"device": "cpu", "dtype": "bfloat16"}, {"dtype": "bfloat16"}),
    "export_overwrites_itself": (
        {"save_hf": "hf", "save_interval": 2},
        {"save_hf": "hf_{rollout_id}", "save_interval": 2},
    ),
    "upper_clip_is_tighter": ({"eps_clip_high": 0.1}, {"eps_clip_high": 0.28}),
    "cispo_is_free_from_below": (
        {"advantage_estimator": "cispo"},
        {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0},
    ),
    "sequence_ratios_are_close_to_one": (
        {"advantage_estimator": "gspo"},
        {"advantage_estimator": "gspo", "eps_clip": 3e-4, "eps_clip_high": 4e-4},
    ),
    "reward_kl_is_biased": ({"kl_coef": 0.1}, {"kl_coef": 0.1, "kl_loss_type": "k1"}),
    "asynchronous_samples_are_off_policy": (
        {**SPLIT, "async_mode": "one-step"},
        {**SPLIT, "async_mode": "one-step", "use_tis": True},
    ),
    "no_logging_account_is_used": ({"wandb_group": "g"}, {"wandb_group": "g", "use_wandb": True}),
}


def test_every_advice_has_an_example():
    assert {rule.__name__ for rule in ADVICE} == ADVISED.keys()


@pytest.mark.parametrize("name", ADVISED)
def test_advice_is_given_where_it_helps(make_config: Make, name: str):
    given, spared = ADVISED[name]
    (rule,) = [rule for rule in ADVICE if rule.__name__ == name]
    assert check(make_config(**given)) == check(make_config(**spared)) == [], "advice is about runs that work"
    assert rule(make_config(**given)) in advice(make_config(**given))
    assert rule(make_config(**spared)) is None


def test_a_plain_run_needs_no_advice(make_config: Make):
    assert advice(make_config()) == []


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"wandb_mode": "offline"}, "--use-wandb"),
        ({"wandb_project": "p"}, "--use-wandb"),
        ({"wandb_run_name": "n"}, "--use-wandb"),
        ({"tensorboard_dir": "t"}, "--use-tensorboard"),
        ({"mlflow_run_name": "m"}, "--use-mlflow"),
    ],
    ids=lambda fields: " ".join(fields) if isinstance(fields, dict) else "",
)
def test_options_of_a_tracker_that_is_off_are_noted(make_config: Make, fields: dict[str, Any], flag: str):
    (sentence,) = advice(make_config(**fields))
    assert sentence == f"{next(iter(fields))} is not used without {flag}"


CONFIGS = {
    "no object": ("[]", "holds a list, not an object"),
    "cut off": ("{", "is not JSON"),
    "empty": ("{}", "has no model_type"),
    "no size": ('{"model_type": "qwen3", "vocab_size": 5}', "hidden_size is missing"),
    "no number": ('{"model_type": "qwen3", "vocab_size": "x"}', 'vocab_size = "x" is not a whole number above 0'),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_json_that_cannot_be_right_is_named(make_config: Make, on_disk: dict[str, Any], name: str):
    text, message = CONFIGS[name]
    path = Path(on_disk["hf_checkpoint"]) / "config.json"
    path.write_text(text)
    problems = check_paths(make_config(**on_disk))
    assert any(message in problem and str(path) in problem for problem in problems), problems


def test_the_probe_of_an_output_folder_leaves_nothing(make_config: Make, on_disk: dict[str, Any], tmp_path: Path):
    before = sorted(tmp_path.iterdir())
    assert check_paths(make_config(**on_disk, output_dir=f"{tmp_path}/a/b", save=str(tmp_path))) == []
    assert sorted(tmp_path.iterdir()) == before
