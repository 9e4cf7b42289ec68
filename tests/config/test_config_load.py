"""Command lines and recipe files: who wins, how values are written, and what is said about mistakes."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlkit.config.argv import read_command_line
from rlkit.config.errors import ConfigError
from rlkit.config.fields import all_fields, flag_of, sections
from rlkit.config.load import from_json, load_config, to_json
from rlkit.config.slime_flags import SLIME_ONLY


def problems(argv: list[str]) -> list[str]:
    """The lines of the one error that `argv` causes."""
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    title, *lines = str(caught.value).splitlines()
    assert title.startswith(f"{len(lines)} problem")
    return [line.removeprefix("  - ") for line in lines]


def value_of(argv: list[str], name: str) -> Any:
    return read_command_line(argv).values[name]


# ---- how values are written ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--rollout-batch-size", "32"], "rollout_batch_size", 32),
        (["--rollout-batch-size=32"], "rollout_batch_size", 32),
        (["--rollout_batch_size", "32"], "rollout_batch_size", 32),
        (["--rollout_batch-size=32"], "rollout_batch_size", 32),
        (["--lr", "1e-6"], "lr", 1e-6),
        (["--lr", "1"], "lr", 1.0),
        (["--rollout-top-k", "-1"], "rollout_top_k", -1),
        (["--colocate"], "colocate", True),
        (["--no-colocate"], "colocate", False),
        (["--colocate", "--no-colocate"], "colocate", False),
        (["--no-load-optim"], "no_load_optim", True),
        (["--no-no-load-optim"], "no_load_optim", False),
        (["--num-rollout", "3", "--num-rollout", "None"], "num_rollout", None),
        (["--save", "None"], "save", None),
        (["--hf-checkpoint", "None"], "hf_checkpoint", "None"),
        (["--device", "cpu"], "device", "cpu"),
        (["--rollout-stop", "A", "B b", "--lr", "1"], "rollout_stop", ("A", "B b")),
        (["--rollout-stop=--end"], "rollout_stop", ("--end",)),
        (["--rollout-stop", "-", "---"], "rollout_stop", ("-", "---")),
        (["--rollout-stop", "A", "--rollout-stop", "B"], "rollout_stop", ("B",)),
        (["--no-rollout-stop"], "rollout_stop", ()),
        (["--rollout-stop-token-ids", "1", "-7"], "rollout_stop_token_ids", (1, -7)),
        (["--eval-prompt-data", "a", "x", "b", "y@[:5]"], "eval_prompt_data", ("a", "x", "b", "y@[:5]")),
        (["--apply-chat-template-kwargs", '{"a": [false]}'], "apply_chat_template_kwargs", {"a": [False]}),
        (["--prompt-data", "x=y.jsonl"], "prompt_data", "x=y.jsonl"),
        (["--prompt-data=x=y.jsonl"], "prompt_data", "x=y.jsonl"),
        (["--lr", "fast", "--lr", "1"], "lr", 1.0),
    ],
    ids=lambda argument: " ".join(argument) if isinstance(argument, list) else "",
)  # fmt: skip
def test_value_on_the_command_line(argv: list[str], name: str, value: Any):
    read = value_of(argv, name)
    assert read == value and type(read) is type(value)


def test_every_flag_takes_its_own_default():
    """What a default is written as reads back as the default, for every flag of the schema."""
    for field in all_fields().values():
        if field.default is None:
            words = ["None"]
        elif field.default == () or field.hint is bool:
            continue
        elif field.is_list:
            words = [str(item) for item in field.default]
        else:
            words = [json.dumps(field.default) if isinstance(field.default, dict) else str(field.default)]
        line = read_command_line([field.flag, *words])
        assert line.problems == [] and line.values == {field.name: field.default}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lr", "fast"], "--lr 'fast': expected a number"),
        (["--num-rollout", "1.5"], "--num-rollout '1.5': expected an integer"),
        (["--num-rollout", ""], "--num-rollout '': expected an integer"),
        (["--device", "gpu"], "--device 'gpu': expected one of auto, cuda, cpu; did you mean cpu?"),
        (["--rollout-stop-token-ids", "1", "x"], "--rollout-stop-token-ids '1' 'x': expected a list, each an integer"),
        (["--apply-chat-template-kwargs", "[1]"], "--apply-chat-template-kwargs '[1]': expected a JSON object"),
        (["--apply-chat-template-kwargs", "{a}"], "expected a JSON object (Expecting property name"),
        (["--rollout-batch-size"], "--rollout-batch-size needs a value"),
        (["--rollout-batch-size", "--colocate"], "--rollout-batch-size needs a value"),
        (["--eval-prompt-data"], "--eval-prompt-data needs at least one value"),
        (["--config"], "--config needs a file"),
        (["--colocate=true"], "--colocate takes no value, got 'true': write --colocate or --no-colocate"),
        (["--no-colocate=true"], "--no-colocate takes no value"),
        (["--colocate", "true"], "unexpected word 'true' after --colocate"),
        (["--lr", "1", "2"], "unexpected word '2' after --lr 1"),
        (["train.jsonl"], "unexpected word 'train.jsonl' after the program name"),
        (["--"], "unexpected word '--'"),
    ],
    ids=lambda argument: " ".join(argument) if isinstance(argument, list) else "",
)  # fmt: skip
def test_unreadable_value(argv: list[str], message: str):
    (problem,) = read_command_line(argv).problems
    assert message in problem


# ---- unknown flags ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--colocat"], "unknown flag --colocat; did you mean --colocate?"),
        (["--rollout-batchsize", "4"], "unknown flag --rollout-batchsize; did you mean --rollout-batch-size?"),
        (["--rollout-batch", "4"], "unknown flag --rollout-batch; did you mean --rollout-batch-size?"),
        (["--confg", "x.toml"], "unknown flag --confg; did you mean --config?"),
        (["--no-lr"], "unknown flag --no-lr"),
        (["--zzz"], "unknown flag --zzz; --help lists all of them"),
        (["--sglang", "{}"], "unknown flag --sglang"),
        (["--use-dynamic-batch-size"], "--use-dynamic-batch-size does not exist in rlkit: micro-batches are"),
    ],
    ids=lambda argument: argument[0] if isinstance(argument, list) else "",
)  # fmt: skip
def test_unknown_flag_names_the_nearest(argv: list[str], message: str):
    (problem,) = read_command_line(argv).problems
    assert problem.startswith(message)


def test_prefixes_are_no_abbreviations():
    for field in all_fields().values():
        prefix = field.name[:-1]
        if prefix not in all_fields():
            assert read_command_line([flag_of(prefix), "1"]).values == {}


def test_hints_for_slime_scripts_are_about_unknown_flags():
    assert not SLIME_ONLY.keys() & all_fields().keys()


def test_all_mistakes_are_reported_at_once(valid_argv: list[str]):
    found = problems(
        [*valid_argv, "--lr", "x", "--adam-eps", "y", "--colocat", "--seeed", "1", "--kl-loss-coef", "0.1"]
    )
    assert len(found) == 5
    for part in ("--lr 'x'", "--adam-eps 'y'", "--colocat;", "--seeed;", "kl_loss_coef = 0.1"):
        assert sum(part in line for line in found) == 1


def test_an_unreadable_value_is_one_problem_not_two(valid_argv: list[str]):
    assert problems([*valid_argv, "--rollout-batch-size", "x"]) == ["--rollout-batch-size 'x': expected an integer"]


def test_nothing_given_names_everything_that_is_required():
    found = "\n".join(problems([]))
    for name in ("hf_checkpoint", "prompt_data", "rollout_batch_size", "num_rollout", "n_samples_per_prompt"):
        assert name in found and flag_of(name) in found


# ---- recipe files ----------------------------------------------------------------------------------------------------


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_flags_beat_files_beat_defaults(tmp_path: Path, valid_argv: list[str]):
    first = write(tmp_path / "a.toml", 'lr = 1e-5\nmin_lr = 1e-7\nseed = 7\nlr_decay_style = "cosine"')
    second = write(tmp_path / "b.toml", "[optimizer]\nmin-lr = 1e-8\n[train]\nseed = 8")
    resolved = load_config([*valid_argv, "--seed", "9", "--config", first, "--config", second])
    config, origin = resolved.config, resolved.provenance
    assert (config.optimizer.lr, config.optimizer.min_lr, config.train.seed) == (1e-5, 1e-8, 9)
    assert config.optimizer.adam_eps == 1e-8
    assert (origin["lr"], origin["min_lr"]) == (f"file {first}", f"file {second}")
    assert (origin["seed"], origin["adam_eps"]) == ("command line", "default")
    assert origin.keys() == all_fields().keys()


def test_a_file_may_hold_the_whole_run(tmp_path: Path):
    recipe = """
        hf_checkpoint = "models/tiny"
        prompt-data = "train.jsonl"
        rollout_stop = ["###"]
        colocate = true
        rollout_temperature = 1
        [data]
        label_key = "answer"
        apply_chat_template = true
        [data.apply_chat_template_kwargs]
        enable_thinking = false
        [reward]
        rm_type = "math"
        [rollout]
        num_rollout = 2
        rollout_batch_size = 4
        n-samples-per-prompt = 8
        rollout_stop_token_ids = [1, 2]
        [sglang]
        mem-fraction-static = 0.5
        disable_radix_cache = true
    """
    config = load_config(["--config", write(tmp_path / "run.toml", recipe)]).config
    assert config.cluster.colocate is True and config.rollout.rollout_stop == ("###",)
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert config.rollout.rollout_stop_token_ids == (1, 2)
    assert type(config.rollout.rollout_temperature) is float
    assert config.engine.sglang == {"mem_fraction_static": 0.5, "disable_radix_cache": True}


def test_the_command_line_switches_off_what_a_file_switches_on(tmp_path: Path, valid_argv: list[str]):
    recipe = write(tmp_path / "a.toml", "eval_interval = 5\neval_prompt_data = ['a', 'a.jsonl']\nuse_wandb = true")
    argv = [*valid_argv, "--config", recipe, "--no-use-wandb", "--no-eval-prompt-data", "--eval-interval", "None"]
    config = load_config(argv).config
    assert not config.logging.use_wandb
    assert config.evaluation.eval_interval is None and config.evaluation.eval_prompt_data == ()


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("rollout_batchsize = 4", "rollout_batchsize: unknown key rollout_batchsize; did you mean rollout_batch_size?"),
        ("[optimiser]\nlr = 1.0", "optimiser: unknown key optimiser; did you mean optimizer?"),
        ("[train]\nlr = 1.0", "[train] lr belongs to the table [optimizer]"),
        ("lr = '1e-5'", 'lr = "1e-5": expected a number'),
        ("lr = true", "lr = true: expected a number"),
        ("num_rollout = 1.0", "num_rollout = 1.0: expected an integer"),
        ("num_rollout = true", "num_rollout = true: expected an integer"),
        ("colocate = 1", "colocate = 1: expected true or false"),
        ("device = 'gpu'", 'device = "gpu": expected one of auto, cuda, cpu'),
        ("rollout_stop = '###'", 'rollout_stop = "###": expected a list, each a string'),
        ("rollout_stop = [1]", "rollout_stop = [1]: expected a list, each a string"),
        ("apply_chat_template_kwargs = [1]", "expected a JSON object"),
        ("seed = 2024-01-01", "expected an integer"),
        ("lr = 1.0\n[optimizer]\nlr = 2.0", "[optimizer] lr is given twice"),
        ("rollout_shuffle = true\nrollout-shuffle = true", "rollout-shuffle is given twice"),
        ("balance_data = true", "balance_data does not exist in rlkit: work is always balanced"),
        ("[sglang]\nmem_fraction = 0.5", "did you mean --sglang-mem-fraction-static?"),
        ("[sglang]\ntp_size = 2", "is set by rlkit: use --rollout-num-gpus-per-engine"),
        ("lr = ", "not a TOML file"),
    ],
    ids=lambda text: text.splitlines()[0] if "\n" in text else text,
)  # fmt: skip
def test_mistake_in_a_file_names_the_file(tmp_path: Path, valid_argv: list[str], recipe: str, message: str):
    path = write(tmp_path / "recipe.toml", recipe)
    (problem,) = problems([*valid_argv, "--config", path])
    assert path in problem and message in problem


def test_all_mistakes_of_all_files_are_reported(tmp_path: Path, valid_argv: list[str]):
    first = write(tmp_path / "a.toml", "lrr = 1.0\nseed = 'x'")
    second = write(tmp_path / "b.toml", "[train]\nmax_tokens = 1")
    assert len(problems([*valid_argv, "--config", first, "--config", second])) == 3


def test_a_missing_file_is_the_only_problem(tmp_path: Path):
    assert problems(["--config", str(tmp_path / "no.toml")]) == [
        f"--config {tmp_path / 'no.toml'}: there is no such file"
    ]


def test_a_flag_repairs_what_a_file_has_wrong(tmp_path: Path, valid_argv: list[str]):
    """The file is still wrong, but the value in force is judged, not the broken one."""
    recipe = write(tmp_path / "a.toml", "kl_loss_coef = 'x'")
    found = problems([*valid_argv, "--config", recipe, "--kl-loss-coef", "0.5"])
    assert len(found) == 2 and any("kl_loss_coef = 0.5" in line for line in found)


# ---- the resolved configuration as a document ------------------------------------------------------------------------


def test_round_trip_through_json(tmp_path: Path, valid_argv: list[str]):
    recipe = write(tmp_path / "a.toml", "[sglang]\ncuda_graph_bs_decode = [1, 2]\nmem_fraction_static = 0.5")
    extra = ["--rollout-stop", "A", "B", "--apply-chat-template", "--apply-chat-template-kwargs", '{"x": {"y": [1]}}']
    extra += ["--config", recipe, "--sglang-page-size", "16", "--lr", "3e-7", "--eval-temperature", "0"]
    resolved = load_config([*valid_argv, *extra])
    document = json.loads(json.dumps(to_json(resolved), allow_nan=False))
    assert from_json(document) == resolved.config
    assert document["optimizer"]["lr"] == {"value": 3e-7, "from": "command line"}
    assert document["optimizer"]["min_lr"] == {"value": 0.0, "from": "default"}
    assert document["engine"]["sglang"]["mem_fraction_static"] == {"value": 0.5, "from": f"file {recipe}"}
    assert document["engine"]["sglang"]["page_size"] == {"value": 16, "from": "command line"}
    assert list(document) == list(sections())


def test_an_older_document_gets_defaults(valid_argv: list[str]):
    resolved = load_config([*valid_argv, "--seed", "5"])
    document = to_json(resolved)
    del document["train"]["seed"], document["sync"]
    config = from_json(document)
    assert config.train.seed == 1234 and config.sync == resolved.config.sync


def test_a_foreign_document_is_refused(valid_argv: list[str]):
    document = to_json(load_config(valid_argv))
    document["train"]["sead"] = {"value": 1, "from": "default"}
    document["train"]["seed"] = {"value": "x", "from": "default"}
    with pytest.raises(ConfigError, match=r"train\.sead is no field") as caught:
        from_json(document)
    assert 'train.seed = "x": expected an integer' in str(caught.value)


def test_a_configuration_travels_between_processes(valid_argv: list[str]):
    config = load_config([*valid_argv, "--sglang-page-size", "16"]).config
    assert pickle.loads(pickle.dumps(config)) == config


def test_config_error_is_the_one_of_the_error_list():
    from rlkit.types import errors

    assert errors.ConfigError is ConfigError
    again = pickle.loads(pickle.dumps(ConfigError("no")))
    assert isinstance(again, errors.RlkitError) and isinstance(again, ValueError) and str(again) == "no"


# ---- help ------------------------------------------------------------------------------------------------------------


def run_help(*, columns: int) -> subprocess.CompletedProcess[str]:
    heavy = ("torch", "ray", "transformers", "numpy", "rich", "sglang")
    code = (
        "import sys\nfrom rlkit.config.load import load_config\n"
        "try: load_config(['--help'])\n"
        f"except SystemExit as end: print('EXIT', end.code, [m for m in {heavy!r} if m in sys.modules])"
    )
    environment = os.environ | {"COLUMNS": str(columns), "NO_COLOR": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)


def test_help_holds_every_flag_its_section_and_its_sentence():
    text = run_help(columns=100).stdout
    flat = " ".join(text.replace("│", " ").split())
    for field in all_fields().values():
        # a switch that is on is shown by the form that changes something
        shown = field.flag if field.default is not True else field.flag.replace("--", "--no-", 1)
        assert f"{shown} " in text, field.flag
        assert " ".join(field.doc.split()) in flat, field.flag
    for section in sections():
        assert f"{section.replace('_', '-')} options" in text
    assert "--config FILE.toml" in flat and "--sglang-NAME" in flat and "--sglang " not in flat
    assert text.rstrip().endswith("EXIT 0 []")


def test_help_into_a_closed_pipe_says_nothing():
    code = "from rlkit.config.load import load_config; load_config(['--help'])"
    done = subprocess.run(
        f'{sys.executable} -c "{code}" | head -1', shell=True, capture_output=True, text=True, check=True
    )
    assert done.stderr == "" and done.stdout.startswith("usage: train.py")
