"""`--sglang-*`: checked against the shipped table, handed to SGLang's command line unchanged."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlkit.config.argv import read_command_line
from rlkit.config.flags import find
from rlkit.config.recipe import read_recipe
from rlkit.config.sglang_flags import OWNED, SglangFlag, sglang_table, to_command_line

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        (["--sglang-mem-fraction-static", "0.7"], {"mem_fraction_static": 0.7}),
        (["--sglang_mem_fraction_static=0.7"], {"mem_fraction_static": 0.7}),
        (["--sglang-disable-radix-cache"], {"disable_radix_cache": True}),
        (["--sglang-disable-radix-cache", "--no-sglang-disable-radix-cache"], {"disable_radix_cache": False}),
        (["--sglang-lora-strict-loading"], {"lora_strict_loading": True}),
        (["--no-sglang-lora-strict-loading"], {"lora_strict_loading": False}),
        (["--sglang-attention-backend", "fa3"], {"attention_backend": "fa3"}),
        (["--sglang-cuda-graph-bs-decode", "1", "2", "4"], {"cuda_graph_bs_decode": [1, 2, 4]}),
        (["--sglang-cuda-graph-bs", "1", "2"], {"cuda_graph_bs_decode": [1, 2]}),
        (["--sglang-expert-parallel-size", "8"], {"ep_size": 8}),
        (["--sglang-context-length", "32k"], {"context_length": 32000}),
        (["--sglang-context-length", "32Ki"], {"context_length": 32768}),
        (["--sglang-context-length", "1.5k"], {"context_length": 1500}),
        (["--sglang-chunked-prefill-size", "-1"], {"chunked_prefill_size": -1}),
        (["--sglang-log-requests-level", "2"], {"log_requests_level": 2}),
        (["--sglang-extra-metric-labels", '{"a": "b"}'], {"extra_metric_labels": {"a": "b"}}),
        (["--sglang-sidecar-args", '["--x"]'], {"sidecar_args": ["--x"]}),
        (["--sglang-model-checksum"], {"model_checksum": ""}),
        (["--sglang-model-checksum", "abc"], {"model_checksum": "abc"}),
        (["--sglang-lora-paths"], {"lora_paths": []}),
        (["--sglang-device", "cpu"], {"device": "cpu"}),
    ],
    ids=lambda argument: " ".join(argument) if isinstance(argument, list) else "",
)
def test_value_lands_under_sglangs_own_name(argv: list[str], values: dict[str, Any]):
    line = read_command_line(argv)
    assert line.problems == []
    assert line.values == {f"sglang_{name}": value for name, value in values.items()}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sglang-mem-fraction-statc", "0.7"], "did you mean --sglang-mem-fraction-static?"),
        (["--sglang-zzz"], "SGLang 0.5.17 has no --zzz"),
        (["--sglang-mem-fraction-static", "much"], "--sglang-mem-fraction-static 'much': expected a number"),
        (["--sglang-mem-fraction-static"], "--sglang-mem-fraction-static needs a value"),
        (["--sglang-page-size", "1.5"], "--sglang-page-size '1.5': expected an integer"),
        (["--sglang-attention-backend", "fa"], "expected one of triton, torch_native"),
        (["--sglang-attention-backend", "flashinfre"], "did you mean flashinfer?"),
        (["--sglang-log-requests-level", "9"], "expected one of 0, 1, 2, 3"),
        (["--sglang-cuda-graph-bs-decode"], "needs at least one value"),
        (["--sglang-cuda-graph-bs-decode", "1", "x"], "expected an integer"),
        (["--sglang-context-length", "1.5Ki"], "expected an integer, possibly with k, M"),
        (["--sglang-cuda-graph-config", "[1]"], "expected a JSON object"),
        (["--sglang-sidecar-args", "{}"], "expected a JSON list"),
        (["--sglang-disable-radix-cache=1"], "takes no value"),
        (["--sglang-collect-tokens-histogram"], "has no effect in SGLang 0.5.17"),
    ],
    ids=lambda argument: " ".join(argument) if isinstance(argument, list) else "",
)
def test_mistake_is_named(argv: list[str], message: str):
    line = read_command_line(argv)
    assert len(line.problems) == 1 and message in line.problems[0]
    assert line.values == {}


def test_what_rlkit_sets_itself_is_refused_in_every_spelling():
    table = sglang_table()
    assert OWNED.keys() <= table.flags.keys()
    spellings = [*OWNED, *(alias for alias, name in table.aliases.items() if name in OWNED)]
    assert "tensor_parallel_size" in spellings and "model" in spellings
    for name in spellings:
        (problem,) = read_command_line([f"--sglang-{name.replace('_', '-')}", "1"]).problems
        assert "is set by rlkit: " in problem


def test_remedies_name_flags_that_exist():
    for remedy in OWNED.values():
        for flag in re.findall(r"--([a-z][a-z-]+)", remedy):
            assert flag == "config" or find(flag.replace("-", "_")), remedy


def test_server_concurrency_is_rlkits_own():
    assert read_command_line(["--sglang-server-concurrency", "8"]).values == {"sglang_server_concurrency": 8}
    assert "server_concurrency" not in sglang_table().flags


@pytest.mark.parametrize(
    ("recipe", "value"),
    [
        ("[sglang]\nmem-fraction-static = 0.7", 0.7),
        ("[engine.sglang]\nmem_fraction_static = 0.7", 0.7),
        ("sglang_mem_fraction_static = 0.7", 0.7),
        ("[engine]\n'sglang-mem-fraction-static' = 0.7", 0.7),
        ("[sglang]\nmem_fraction_static = 1", 1.0),
    ],
    ids=["table", "nested", "flat", "section", "integer"],
)
def test_recipe_file(tmp_path: Path, recipe: str, value: float):
    path = tmp_path / "r.toml"
    path.write_text(recipe)
    read = read_recipe(str(path))
    assert read.problems == [] and read.values == {"sglang_mem_fraction_static": value}


@pytest.mark.parametrize(
    "line",
    [
        "page_size = '16'",
        "page_size = true",
        "page_size = 1.5",
        "disable_radix_cache = 1",
        "attention_backend = 'x'",
        "cuda_graph_bs_decode = 1",
        "cuda_graph_bs_decode = ['x']",
        "context_length = 1.5",
        "context_length = '12q'",
        "cuda_graph_config = []",
        "mem_fraction_static = true",
        "log_level = 3",
    ],
)
def test_recipe_value_of_a_wrong_type(tmp_path: Path, line: str):
    path = tmp_path / "r.toml"
    path.write_text(f"[sglang]\n{line}")
    (problem,) = read_recipe(str(path)).problems
    assert "expected" in problem


def sample(flag: SglangFlag) -> list[str]:
    """Words after a flag, right for its kind."""
    word = {
        "int": "3",
        "float": "0.5",
        "str": "-word",
        "size": "16k",
        "json": '{"a": [1]}',
        "json_object": '{"decode": {"max_bs": 4}}',
        "json_list": "[1]",
    }
    if flag.is_switch:
        return []
    words = [str(flag.choices[-1])] if flag.choices else [word[flag.kind]]
    return words * 2 if flag.nargs in ("+", "*") and flag.kind != "str" else words


def test_every_flag_survives_the_way_to_sglangs_command_line():
    """Read by rlkit, written for SGLang, read by argparse as SGLang's own parser would: the same values."""
    sglang = argparse.ArgumentParser(allow_abbrev=False)
    values: dict[str, Any] = {}
    for name, flag in sglang_table().flags.items():
        if name in OWNED:
            continue
        option = "--" + name.replace("_", "-")
        if flag.kind == "switch":
            sglang.add_argument(option, action="store_true", dest=name)
        elif flag.kind == "toggle":
            sglang.add_argument(option, action=argparse.BooleanOptionalAction, dest=name)
        else:
            kinds = {"int": int, "size": int, "float": float, "str": str}
            sglang.add_argument(option, type=kinds.get(flag.kind, json.loads), nargs=flag.nargs, dest=name)
        words = [f"--sglang-{option[2:]}", *sample(flag)]
        if flag.kind == "str" and flag.nargs not in ("+", "*") and not flag.choices:
            words = [f"--sglang-{option[2:]}={sample(flag)[0]}"]
        if flag.kind == "str" and flag.nargs in ("+", "*") and not flag.choices:
            words[1:] = ["a", "b c"]
        line = read_command_line(words)
        assert line.problems == [], line.problems
        values[name] = line.values[f"sglang_{name}"]
    assert len(values) > 400
    assert vars(sglang.parse_args(to_command_line(values))) == values


def test_a_switch_that_is_off_is_not_written():
    assert to_command_line({"disable_radix_cache": False}) == []
    assert to_command_line({"lora_strict_loading": False}) == ["--no-lora-strict-loading"]


@pytest.mark.sglang
def test_table_is_the_one_of_the_installed_sglang(tmp_path: Path):
    """Run with RLKIT_SGLANG_PYTHON naming the interpreter of an environment that has the pinned SGLang."""
    interpreter = os.environ.get("RLKIT_SGLANG_PYTHON", sys.executable)
    output = tmp_path / "flags.json"
    generator = ROOT / "tools" / "gen_sglang_flags.py"
    subprocess.run([interpreter, str(generator), "--output", str(output)], check=True, capture_output=True)
    assert output.read_text() == (ROOT / "rlkit" / "config" / "sglang_flags.json").read_text()
