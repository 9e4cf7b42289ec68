"""The tiny model of the quick start, without the minute of warm-up that `test_quickstart.py` spends."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import jinja2
import make_tiny_model as tool
import pytest
from tiny_task import split_problems

TOOL = Path(tool.__file__)


@pytest.fixture(scope="module")
def blank(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("blank")
    tool.write_blank_model(path, seed=0)
    return path


class ScriptedPupil:
    """Answers with given accuracies, one a look, and records what it is taught."""

    def __init__(self, *accuracies: float) -> None:
        self._accuracies = list(accuracies)
        self.lessons: list[tuple[int, float]] = []

    @property
    def num_steps(self) -> int:
        return sum(steps for steps, _ in self.lessons)

    def learn(self, num_steps: int, *, forgets: float) -> None:
        self.lessons.append((num_steps, forgets))

    def greedy_accuracy(self) -> float:
        return self._accuracies.pop(0)


def test_warm_up_stops_at_once_inside_the_range():
    pupil, recipe = ScriptedPupil(0.42), tool.WarmUp()
    assert tool.warm_up(pupil, recipe) == 0.42
    assert pupil.lessons == [(recipe.num_steps, recipe.forgets)]


def test_warm_up_teaches_against_the_side_it_missed():
    pupil, recipe = ScriptedPupil(0.30, 0.55, 0.40), tool.WarmUp()
    assert tool.warm_up(pupil, recipe) == 0.40
    (_, first), (_, below), (_, above) = pupil.lessons
    assert below < first < above


@pytest.mark.parametrize("accuracy", [0.2, 0.8, float("nan")])
def test_warm_up_fails_aloud_outside_the_range(accuracy):
    pupil, recipe = ScriptedPupil(*[accuracy] * 100), tool.WarmUp()
    with pytest.raises(SystemExit, match=r"greedy accuracy of .* not between 0\.37 and 0\.47"):
        tool.warm_up(pupil, recipe)


def test_range_lies_inside_the_promised_band():
    recipe = tool.WarmUp()
    assert 0.35 < recipe.aim_low < recipe.aim_high < 0.5


def test_blank_model_loads_with_tied_embeddings_and_about_a_million_parameters(blank):
    from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

    model = AutoModelForCausalLM.from_pretrained(blank)
    assert isinstance(model, Qwen3ForCausalLM)
    assert 0.8e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.2e6
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tokenizer_is_one_token_a_character_and_comes_back_whole(blank):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(blank)
    text = "37+58 = 95, isn't it?\n~{}"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer.encode("é", add_special_tokens=False)) == tool.UNKNOWN


def test_chat_ends_a_turn_with_the_eos_of_the_generation_config(blank):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(blank)
    chat = [{"role": "user", "content": "37+58"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|user|>37+58<|end|><|assistant|>"
    whole = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": "95"}], tokenize=False)
    assert whole == prompt + "95<|end|>"
    assert len(tokenizer.encode(prompt, add_special_tokens=False)) == 8
    eos = json.loads((blank / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.encode(whole, add_special_tokens=False)[-1] == eos == tokenizer.eos_token_id


def test_chat_template_refuses_a_system_message(blank):
    from transformers import AutoTokenizer

    with pytest.raises(jinja2.TemplateError, match="roles user and assistant"):
        AutoTokenizer.from_pretrained(blank).apply_chat_template([{"role": "system", "content": "x"}], tokenize=False)


def test_rlkit_reads_the_same_end_of_turn(blank):
    from rlkit.config.schema import ModelConfig
    from rlkit.data.sft import turn_end_id
    from rlkit.data.tokenizer import eos_token_ids, load_tokenizer

    model = ModelConfig(hf_checkpoint=str(blank))
    tokenizer = load_tokenizer(model)
    assert eos_token_ids(model, tokenizer) == (turn_end_id(tokenizer),)


def test_a_few_steps_lower_the_loss_and_reach_the_export(blank, tmp_path):
    from transformers import AutoModelForCausalLM

    recipe = replace(tool.WarmUp(), num_steps=30, lr_warmup_steps=5)
    train, held_out = split_problems(0)
    with tool.Pupil(blank, recipe, train, held_out[:32], seed=0, num_threads=1) as pupil:
        pupil.learn(30, forgets=recipe.forgets)
        accuracy = pupil.greedy_accuracy()
        pupil.export(tmp_path / "model", tmp_path / "checkpoint")
    assert 0.0 <= accuracy < 0.35, "thirty steps are not enough to know anything"
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (blank, tmp_path / "model"))
    problems = [(pupil._prompt_ids(problem), problem) for problem in held_out[:32]]
    losses = [mean_loss(model, problems, pupil) for model in (before, after)]
    assert losses[1] < 0.6 * losses[0]


def mean_loss(model, problems, pupil) -> float:
    """Cross-entropy of the right answers, per token."""
    import torch

    total, count = 0.0, 0
    for _, problem in problems:
        sample = pupil._sample(problem, problem.answer)
        tokens = torch.tensor([sample.tokens])
        labels = tokens.clone()
        labels[:, : sample.prompt_length] = -100
        with torch.no_grad():
            total += model(tokens, labels=labels).loss.item() * sample.response_length
        count += sample.response_length
    return total / count


def test_finished_output_is_not_made_again(tmp_path):
    recipe = asdict(tool.WarmUp())
    (tmp_path / tool.MARKER).write_text(json.dumps({"made_from": {"seed": 3, "recipe": recipe, "tool": 1}}))
    done = run_tool(tmp_path, seed=3)
    assert done.returncode == 0 and "nothing to do" in done.stdout


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    done = run_tool(tmp_path, seed=0)
    assert done.returncode != 0 and "was not made by this tool" in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def run_tool(output: Path, *, seed: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), "--output", str(output), "--seed", str(seed)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
