"""One spelling for one answer: Unicode and LaTeX typography are mapped to a small canonical LaTeX. Called by
`equivalence.py`.

Only typography changes here. Nothing that carries a value is dropped: units, percent signs, order and brackets are
judged by `equivalence.py`.
"""

import re
import unicodedata

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SUBSCRIPT_RUN = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞↉]")
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("−–—‐‑‒﹣－", "-"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000", " "),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
        **dict.fromkeys("×✕✖", "\\times "),
        **dict.fromkeys("·⋅∙", "\\cdot "),
        **dict.fromkeys("÷∕⁄", "/"),
        **dict.fromkeys("‘’′", "'"),
        **dict.fromkeys("“”", '"'),
        "∗": "*",
        "π": "\\pi ",
        "∞": "\\infty ",
        "√": "\\sqrt ",
        "±": "\\pm ",
        "≤": "\\le ",
        "≥": "\\ge ",
        "≠": "\\ne ",
        "≈": "\\approx ",
        "°": "^\\circ ",
        "º": "^\\circ ",
        "∪": "\\cup ",
        "∩": "\\cap ",
        "∈": "\\in ",
        "∅": "\\emptyset ",
        "θ": "\\theta ",
        "α": "\\alpha ",
        "β": "\\beta ",
        "λ": "\\lambda ",
        "％": "%",
        "，": ",",
    }
)
_STYLED_LETTER = re.compile(r"\\math(?:rm|bf|it|sf|tt|up)\s*\{\s*([A-Za-z])\s*\}|\\mathbb\s*(?=[A-Z])")
_OPERATOR_NAME = re.compile(r"\\operatorname\*?\s*\{\s*([A-Za-z]+)\s*\}")
_TEXT_COMMANDS = re.compile(r"\\(?:text(?:bf|it|rm|normal|sf|tt|sc|up)?|math(?:rm|bf|it|sf|tt|up)|mbox|hbox)\s*(?=\{)")
_SIZING = re.compile(
    r"\\(?:left|right)\s*\.|\\(?:left|right|[bB]ig{1,2}[lrm]?|displaystyle|textstyle|limits|nolimits|mathstrut|strut)(?![A-Za-z])"
)
_TIGHT_SPACE = re.compile(r"(?<!\\)\\!|\\(?:phantom|hspace|vspace)\*?\{[^{}]*\}")
_WIDE_SPACE = re.compile(r"(?<!\\)\\[,;:> ]|~|\\(?:quad|qquad|thinspace|enspace)(?![A-Za-z])")
_FRACTION_COMMAND = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_SYNONYMS = (
    (re.compile(r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"\\leq(?:slant)?(?![A-Za-z])"), r"\\le "),
    (re.compile(r"\\geq(?:slant)?(?![A-Za-z])"), r"\\ge "),
    (re.compile(r"\\neq(?![A-Za-z])"), r"\\ne "),
    (re.compile(r"\\(?:lbrace|\{)"), r"\\{"),
    (re.compile(r"\\(?:rbrace|\})"), r"\\}"),
    (re.compile(r"\\(?:lvert|rvert|vert|mid)(?![A-Za-z])"), "|"),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"\\degrees?(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}"), r"^\\circ "),
    (re.compile(r"\\(?:lparen)(?![A-Za-z])"), "("),
    (re.compile(r"\\(?:rparen)(?![A-Za-z])"), ")"),
    (re.compile(r"\\div(?![A-Za-z])"), "/"),
    (re.compile(r"\\ast(?![A-Za-z])"), "*"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\#"), "#"),
    (re.compile(r"\\_"), "_"),
    (re.compile(r"\\dots|\\ldots|\\cdots"), "..."),
)
_MATH_DELIMITER = re.compile(r"\\[()\[\]]")
_BRACED_COMMA = re.compile(r"\{\s*,\s*\}")
_FRACTION_DIGITS = re.compile(r"\\frac\s*(\d)\s*(?=\d|\{)")
_FRACTION_SECOND = re.compile(r"(\\frac\s*\{[^{}]*\})\s*(\d)")
_SQRT_BARE = re.compile(r"\\sqrt\s*(\d+|[A-Za-z])(?!\w*\{)")
_SQRT_PAREN = re.compile(r"(?:\\sqrt|(?<![\\A-Za-z])sqrt)\s*\(([^()]*)\)")
_SCRIPT_BARE = re.compile(r"([\^_])\s*([A-Za-z0-9])")
_SPACE_BEFORE_WORD = re.compile(r"\\([A-Za-z]+)\s+")
_SPACES = re.compile(r"\s+")
_LEADING_PHRASE = re.compile(r"^(?:(?:the|my)\s+)?(?:final\s+)?answer\s*(?:is|:|=)\s*[:=]?\s*", re.IGNORECASE)
_CURRENCY = "\u00a4"  # stands for a dollar sign that is money, not the edge of a formula


def normalize(text: str) -> str:
    """Canonical spelling of an answer; idempotent on its own output in all that `equivalence.py` reads."""
    text = _SUPERSCRIPT_RUN.sub(lambda run: "^{" + run.group().translate(_SUPERSCRIPTS) + "}", text)
    text = _SUBSCRIPT_RUN.sub(lambda run: "_{" + run.group().translate(_SUBSCRIPTS) + "}", text)
    text = _VULGAR_FRACTION.sub(_spell_fraction, text)
    text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS)).translate(_CHARACTERS)
    text = text.replace("\\\\", "\\") if "\\begin" not in text else text  # doubled by one JSON escape too many
    text = _unwrap_dollars(text)
    text = _MATH_DELIMITER.sub(" ", text)
    text = _BRACED_COMMA.sub(",", text)
    text = _TIGHT_SPACE.sub("", text)
    text = _SIZING.sub("", text)
    text = _WIDE_SPACE.sub(" ", text)
    text = _FRACTION_COMMAND.sub(r"\\frac", text)
    text = _OPERATOR_NAME.sub(r"\\\1 ", text)
    text = _STYLED_LETTER.sub(lambda match: match.group(1) or "\\mathbb ", text)
    text = _TEXT_COMMANDS.sub(r"\\text", text)
    for pattern, replacement in _SYNONYMS:
        text = pattern.sub(replacement, text)
    text = _FRACTION_DIGITS.sub(r"\\frac{\1}", text)
    text = _FRACTION_SECOND.sub(r"\1{\2}", text)
    text = _SQRT_PAREN.sub(r"\\sqrt{\1}", text)
    text = _SQRT_BARE.sub(r"\\sqrt{\1}", text)
    text = _SPACES.sub(" ", text)
    return trim(_LEADING_PHRASE.sub("", text.strip()))


def trim(text: str) -> str:
    """Without Markdown, quotes and sentence punctuation around it, and without a pair of braces or `\\text` around all
    of it.
    """
    while True:
        before = text
        text = _unquote(text.strip())
        if text.endswith((".", ",", ";", ":")) and not text.endswith(".."):  # an ellipsis goes on, a full stop ends
            text = text[:-1].strip()
        if text.startswith("\\text{") and _closes_at_end(text, len("\\text")):
            text = text[len("\\text{") : -1]
            if any(char.isalpha() for char in text):
                return "\\text{" + text.strip() + "}"
        elif text.startswith("{") and _closes_at_end(text, 0):
            text = text[1:-1]
        if text == before:
            return text


def compact(text: str) -> str:
    """A key for spelling alone: no spaces but those between digits, braces around every script."""
    text = _SCRIPT_BARE.sub(r"\1{\2}", text)
    text = _SPACE_BEFORE_WORD.sub(r"\\\1 ", text)
    parts = text.split(" ")
    joined = parts[0]
    for part in parts[1:]:
        needs_space = joined[-1:].isalnum() and part[:1].isalnum() and (joined[-1:].isdigit() == part[:1].isdigit())
        joined += (" " if needs_space else "") + part
    return joined.removeprefix("+")


def split_top(text: str, separators: re.Pattern[str]) -> list[str]:
    """Split where a separator stands outside all brackets."""
    parts: list[str] = []
    start = 0
    depths = bracket_depths(text)
    for match in separators.finditer(text):
        if depths[match.start()] == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    parts.append(text[start:])
    return parts


def bracket_depths(text: str) -> list[int]:
    """Bracket depth of every character; a closing bracket without its opening one counts as depth 0 again."""
    depths: list[int] = []
    depth = 0
    for char in text:
        if char in ")]}":
            depth = max(0, depth - 1)
        depths.append(depth)
        if char in "([{":
            depth += 1
    return depths


def _spell_fraction(match: re.Match[str]) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", match.group()).partition("\u2044")
    return f"\\frac{{{numerator}}}{{{denominator}}}"


def _unwrap_dollars(text: str) -> str:
    text = text.replace("\\$", _CURRENCY)
    return text.replace("$", _CURRENCY if text.count("$") == 1 else "")


def _unquote(text: str) -> str:
    for mark in ("**", "__", "`", '"', "'"):
        if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
            return text[len(mark) : -len(mark)].strip()
    return text


def _closes_at_end(text: str, opening: int) -> bool:
    depth = 0
    for position in range(opening, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return position == len(text) - 1
    return False
