"""Random models load like real ones, with a tokenizer that knows fewer tokens than they do."""

import json

import make_random_model
import make_tiny_model
import pytest
import torch


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tiny_model.character_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_loads_and_generates(tokenizer, tmp_path, shape):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_random_model.make_model(shape, tmp_path / "m", tokenizer, vocab_size=700)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    words = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert len(words) < model.config.vocab_size == 700
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.generation_config.eos_token_id == words.eos_token_id
    out = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=True)
    assert isinstance(words.decode(out[0]), str), "ids beyond the tokenizer decode to something"


def test_the_seed_decides_and_complete_output_is_kept(tokenizer, tmp_path, capsys):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_random_model.make_model("tiny", tmp_path / name, tokenizer, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c
    make_random_model.make_model("tiny", tmp_path / "a", tokenizer)
    assert "nothing to do" in capsys.readouterr().out


def test_a_tokenizer_that_is_too_large_or_absent_is_refused(tokenizer, tmp_path):
    with pytest.raises(SystemExit, match="more than the model's vocabulary of 50"):
        make_random_model.make_model("tiny", tmp_path / "m", tokenizer, vocab_size=50)
    with pytest.raises(SystemExit, match=r"no tokenizer_config\.json"):
        make_random_model.make_model("tiny", tmp_path / "m", tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    with pytest.raises(SystemExit, match="not made by this tool"):
        make_random_model.make_model("tiny", tmp_path / "full", tokenizer)


def test_shapes_have_the_parameters_of_their_namesakes(tmp_path):
    """Counted on the meta device, tied heads once; the public model cards round these numbers."""
    from transformers import AutoModelForCausalLM

    expected = {"qwen3-0.6B": 596_049_920, "qwen3-4B": 4_022_468_096, "qwen3-8B": 8_190_735_360}
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    for name, count in expected.items():
        shape = make_random_model.SHAPES[name]
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(make_random_model.model_config(shape, ids, shape.vocab_size))
        assert sum(parameter.numel() for parameter in model.parameters()) == count, name
        assert json.loads(model.config.to_json_string())["tie_word_embeddings"] is (name != "qwen3-8B")
