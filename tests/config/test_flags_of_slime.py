"""Every flag that a script for slime may bring is accepted, or refused with a sentence that says what to do instead.

`tests/data/slime_flags.tsv` is the list. When a flag becomes a field of the schema, its refusal has to go.
"""

from pathlib import Path
from types import ModuleType

import pytest

from rlkit.config.errors import ConfigError
from rlkit.config.fields import all_fields
from rlkit.config.flags import find, find_negated, why_unknown
from rlkit.config.load import load_config
from rlkit.config.slime_flags import SLIME_ONLY

ROOT = Path(__file__).parents[2]
FLAGS = [
    line.split("\t")[0]
    for line in (ROOT / "tests" / "data" / "slime_flags.tsv").read_text().splitlines()
    if line and not line.startswith("#")
]
VERBS = ("use ", "remove it", "pass ", "set ", "--", "name ", "start again", "is in ", "are in ", "cut ", "write ")
"""A refusal says what to do: one of these stands in it."""


@pytest.mark.parametrize("spelled", FLAGS)
def test_flag_is_accepted_or_refused_with_a_remedy(spelled: str):
    name = spelled.replace("-", "_")
    is_field = find(name) is not None or find_negated(name) is not None
    if is_field:
        return
    message = why_unknown(name)
    assert not message.startswith("unknown flag"), (
        f"--{spelled} of slime is neither a field (rlkit/config/schema/) nor refused with a sentence"
        " (rlkit/config/slime_flags.py)"
    )
    told = message.partition(": ")[2].lower()
    assert message.startswith(f"--{spelled} ")
    assert any(verb in told for verb in VERBS), f"{message!r} does not say what to do"


@pytest.mark.parametrize("name", SLIME_ONLY)
def test_refusal_is_needed(name: str):
    assert find(name) is None, f"--{name.replace('_', '-')} is a field now: take it out of rlkit/config/slime_flags.py"
    spelled = name.replace("_", "-")
    assert spelled in FLAGS, f"--{spelled} is refused but not a flag of slime: add it to tests/data/slime_flags.tsv"


@pytest.mark.parametrize("name", SLIME_ONLY)
def test_refusal_sends_nobody_to_a_flag_that_does_not_exist(name: str):
    words = SLIME_ONLY[name].replace(",", " ").replace(";", " ").replace(":", " ").replace(")", " ").split()
    named = {word.split("=")[0] for word in words if word.startswith("--") and not word.endswith("*")}
    unknown = {flag for flag in named if find(flag[2:].replace("-", "_")) is None} - {"--config"}
    assert not unknown, f"--{name.replace('_', '-')}: {unknown} do not exist"


def test_the_list_is_long_and_holds_each_flag_once():
    assert len(FLAGS) > 250
    assert len(set(FLAGS)) == len(FLAGS)


def test_refused_flags_are_reported_all_at_once_with_their_values_skipped(valid_argv: list[str]):
    argv = [*valid_argv, "--micro-batch-size", "2", "--sglang-router-ip", "10.0.0.1", "--swiglu"]
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    message = str(caught.value)
    assert message.startswith("3 problems")
    assert "--micro-batch-size does not exist" in message
    assert "--sglang-router-ip does not exist in rlkit: every run starts a router of its own" in message


def test_from_slime_md_is_up_to_date(generator: ModuleType):
    written = (ROOT / "docs" / "from_slime.md").read_text()
    assert written == generator.render(), "run python tools/gen_slime_docs.py"


def test_from_slime_md_names_every_flag_once_as_accepted_or_refused(generator: ModuleType):
    text = generator.render()
    for spelled in FLAGS:
        assert f"`--{spelled}`" in text, spelled


def test_from_slime_md_tells_other_defaults(generator: ModuleType):
    rows = {row.split("|")[1].strip() for row in generator.default_rows()}
    assert "`--kl-loss-type`" in rows, "slime: k1, here: low_var_kl"
    assert all_fields()["tis_clip"].default == 2.0 and "`--tis-clip`" not in rows


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    import importlib.util

    spec = importlib.util.spec_from_file_location("gen_slime_docs", ROOT / "tools" / "gen_slime_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
