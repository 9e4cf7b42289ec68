"""Graders that compare words: `exact`, `f1` and the deterministic `random`. Called by `grading.py`."""

import hashlib
import re
import string
import unicodedata
from collections import Counter

from rlkit.rewards.labels import label_texts

MAX_CHARS = 1_000_000
"""A longer text is not compared word by word; it is no answer."""

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})


def grade_exact(answer: str, label: object) -> float:
    """1.0 where the answer is one of the labels, character by character after trimming white space; True and true are
    both fine.
    """
    answer = answer.strip()
    accepted = label_texts(label)
    if isinstance(label, bool):
        answer, accepted = answer.lower(), (str(label).lower(),)
    return float(answer in accepted)


def grade_f1(answer: str, label: object) -> float:
    """Best token F1 over the labels, as in SQuAD (Rajpurkar et al. 2016): lower case, no punctuation, no articles,
    repeated tokens counted.
    """
    if len(answer) > MAX_CHARS:
        return 0.0
    return max((_token_f1(answer, text) for text in label_texts(label)), default=0.0)


def grade_random(response: str, label: object) -> float:
    """A fair coin that falls the same way for the same response and label: the reward that must teach nothing."""
    text = "\0".join((response, *label_texts(label)))
    return float(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=1).digest()[0] & 1)


def _token_f1(prediction: str, target: str) -> float:
    if prediction.strip() and prediction.strip() == target.strip():
        return 1.0  # also where nothing but articles or punctuation would be left
    predicted, expected = _squad_text(prediction), _squad_text(target)
    if not expected:  # an answer such as "A" or "The": the article is all there is
        predicted, expected = _squad_text(prediction, articles=True), _squad_text(target, articles=True)
    if predicted != expected and (predicted in _CLOSED_ANSWERS or expected in _CLOSED_ANSWERS):
        return 0.0
    predicted_tokens, expected_tokens = predicted.split(), expected.split()
    overlap = sum((Counter(predicted_tokens) & Counter(expected_tokens)).values())
    if overlap == 0:
        return 0.0
    precision, recall = overlap / len(predicted_tokens), overlap / len(expected_tokens)
    return 2 * precision * recall / (precision + recall)


def _squad_text(text: str, *, articles: bool = False) -> str:
    text = unicodedata.normalize("NFC", text).lower().translate(_PUNCTUATION)
    return " ".join((text if articles else _ARTICLES.sub(" ", text)).split())
