import pytest
from tiny_model import END, SPECIAL, make_tokenizer

from rlkit.engines.embedded.detokenize import IncrementalText, StopStringFinder

TEXTS = ["the one on a", "héllo wörld", "日本語 と emoji 🙂🙂 done", f"before {SPECIAL} after{END}", ""]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("step", [1, 3, 100])
def test_text_read_in_pieces_is_the_text_decoded_at_once(text: str, step: int):
    tokenizer = make_tokenizer()
    prompt, ids = tokenizer.encode("prompt é"), tokenizer.encode(text)
    reader = IncrementalText(tokenizer, prompt)
    partial = ""
    for stop in range(step, len(ids) + step, step):
        grown = reader.read(ids[:stop])
        assert grown.startswith(partial), "text that was shown is never taken back"
        partial = grown
    assert reader.read(ids, is_final=True) == text == tokenizer.decode(ids)


def test_half_a_character_is_shown_only_at_the_end():
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("a🙂")[:-1]
    reader = IncrementalText(tokenizer, [])
    assert reader.read(ids) == "a"
    assert reader.read(ids, is_final=True) == "a\ufffd"


def test_special_tokens_are_left_out_where_asked():
    tokenizer = make_tokenizer()
    ids = tokenizer.encode(f"x{SPECIAL}y")
    assert IncrementalText(tokenizer, [], skip_special_tokens=True).read(ids) == "xy"
    assert IncrementalText(tokenizer, []).read(ids) == f"x{SPECIAL}y"


def test_a_stop_string_is_found_however_it_is_spelled():
    tokenizer = make_tokenizer()
    whole = tokenizer.encode("so the end")  # "the" is one token here,
    letters = [token for char in "so the end" for token in tokenizer.encode(char)]  # and three here
    assert len(letters) > len(whole)
    for ids in (whole, letters):
        finder = StopStringFinder(tokenizer, [], ("nothing", "the"))
        found = [finder.find(ids[:stop]) for stop in range(1, len(ids) + 1)]
        first = next(index for index, stop in enumerate(found) if stop)
        assert found[first] == "the"
        assert tokenizer.decode(ids[: first + 1]) == "so the"
        assert not any(found[:first])


def test_a_stop_string_that_straddles_special_tokens_is_found_in_the_whole_text():
    tokenizer = make_tokenizer()
    finder = StopStringFinder(tokenizer, [], (f"a{SPECIAL}",))
    ids = tokenizer.encode(f"bca{SPECIAL}")
    assert [finder.find(ids[:stop]) for stop in range(1, len(ids) + 1)] == [None, None, None, f"a{SPECIAL}"]
