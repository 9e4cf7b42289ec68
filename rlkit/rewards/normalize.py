"""One spelling for one answer: Unicode and LaTeX typography are mapped to a small canonical LaTeX. Called by
`equivalence.py`.

Only typography changes here. Nothing that carries a value is dropped: units, percent signs, order and brackets are
judged by `equivalence.py`.
"""

import re
import unicodedata

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SUBSCRIPT_RUN = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞↉]|[⁰¹²³⁴⁵⁶⁷⁸⁹]{1,9}[⁄/∕][₀₁₂₃₄₅₆₇₈₉]{1,9}")
_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega"
)
_GREEK_CAPITALS = "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
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
        **{letter: f"\\{name} " for letter, name in zip("αβγδεζηθικλμνξρστυφχψω", _GREEK.split(), strict=True)},
        **{letter: f"\\{name} " for letter, name in zip("ΓΔΘΛΞΠΣΦΨΩ", _GREEK_CAPITALS.split(), strict=True)},
        **{letter: f"\\mathbb{{{name}}}" for letter, name in zip("ℝℤℕℚℂ", "RZNQC", strict=True)},
        "⌊": "\\lfloor ",
        "⌋": "\\rfloor ",
        "⌈": "\\lceil ",
        "⌉": "\\rceil ",
        "∠": "\\angle ",
        "△": "\\triangle ",
        "¢": " cents",
        "％": "%",
        "，": ",",
        "、": ",",
        "。": ".",
    }
)
_STYLED_LETTER = re.compile(r"\\math(?:rm|bf|it|sf|tt|up)\s*\{\s*([A-Za-z])\s*\}")
_NUMBER_SET = re.compile(r"\\(?:mathbb|mathds|Bbb)\s*(?:\{\s*([A-Z])\s*\}|([A-Z]))|\\([RZNQC])(?![A-Za-z])")
_DECORATION = re.compile(
    r"\\(?:boldsymbol|bm|pmb|underline|emph|ensuremath)\s*(?=\{)|\\(?:text)?color\s*\{[^{}]*\}"
    r"|\\(?:tiny|small|large|Large|huge|rm|bf|it|sf|tt)(?![A-Za-z])|\\math(?:rm|bf|it|sf|tt)(?=\s*\d)"
)
_OPERATOR_NAME = re.compile(r"\\operatorname\*?\s*\{\s*([A-Za-z]+)\s*\}")
_TEXT_COMMANDS = re.compile(r"\\(?:text(?:bf|it|rm|normal|sf|tt|sc|up)?|math(?:rm|bf|it|sf|tt|up)|mbox|hbox)\s*(?=\{)")
_SIZING = re.compile(
    r"\\(?:left|right)\s*\.|\\(?:left|right|[bB]ig{1,2}[lrm]?|displaystyle|textstyle|limits|nolimits|mathstrut|strut)(?![A-Za-z])"
)
_TIGHT_SPACE = re.compile(r"(?<!\\)\\!|\\(?:phantom|hspace|vspace)\*?\{[^{}]*\}")
_WIDE_SPACE = re.compile(r"(?<!\\)\\[,;:> ]|~|\\(?:quad|qquad|thinspace|enspace)(?![A-Za-z])")
_ROW_GAP = re.compile(r"(?<=\\\\)\s*\[-?[\d.]+ ?(?:pt|ex|em|mm|cm)\]")
_FRACTION_COMMAND = re.compile(r"\\[dtc](frac|binom)(?![A-Za-z])")
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
    (re.compile(r"\\text\{\s*\^\\circ\s*([CFK]?)\s*\}"), r"^\\circ \1"),
    (re.compile(r"(?<=\d)\^\s*\{?\s*\\text\{\s*(st|nd|rd|th)\s*\}\s*\}?"), r"\1"),
    (re.compile(r"\\var(epsilon|theta|phi|rho|sigma|kappa)(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"\\text\{\s*[Ii]nfinity\s*\}|(?<![\\A-Za-z])(?:[Ii]nfinity|infty|oo)(?![A-Za-z])"), r"\\infty "),
    (re.compile(r"(?<=[\d.])\\(?:bar|dot)\s*(?:\{(\d+)\}|(\d))"), r"\\overline{\1\2}"),
    (re.compile(r"(\d\.\d*)\((\d{1,30})\)"), r"\1\\overline{\2}"),
    (re.compile(r"\\colon(?![A-Za-z])|\{:\}"), ":"),
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
_BRACED_COMMA = re.compile(r"(?<![A-Za-z])\{\s*,\s*\}")
_BARE = r"(\d|[A-Za-z]|\\(?!frac|sqrt|binom|text)[A-Za-z]+(?!\s*\{))"  # an argument that TeX accepts without braces
_GROUP = r"\{(?:[^{}]|\{[^{}]*\})*\}"
_FIRST_ARGUMENT = re.compile(rf"\\(frac|binom)(?![A-Za-z])\s*{_BARE}\s*(?=[\dA-Za-z\\{{])")
_SECOND_ARGUMENT = re.compile(rf"(\\(?:frac|binom)\s*{_GROUP})\s*{_BARE}")
_SQRT_FRACTION = re.compile(rf"\\sqrt\s*(\\frac\s*{_GROUP}\s*{_GROUP})")
_SQRT_BARE = re.compile(r"\\sqrt\s*(\d+|[A-Za-z])(?!\w*\{)")
_SQRT_PAREN = re.compile(r"(?:\\sqrt|(?<![\\A-Za-z])sqrt)\s*\(([^()]*)\)")
_SCRIPT_BARE = re.compile(r"([\^_])\s*([A-Za-z0-9])")
_SPACE_BEFORE_WORD = re.compile(r"\\([A-Za-z]+)\s+")
_SPACES = re.compile(r"\s+")
_PHRASE = r"(?:(?:the|my)\s+)?(?:final\s+)?answer\s*(?:is|:|=)\s*[:=]?\s*"
_LEADING_PHRASE = re.compile(
    rf"^(?:{_PHRASE}|\\text\{{\s*{_PHRASE}\}}\s*|(?:=|\\approx(?![A-Za-z]))\s*)", re.IGNORECASE
)
_FORMULA = re.compile(r"[\d\\=]")  # inside \text{}: more than words
_CURRENCY = "\u00a4"  # stands for a dollar sign that is money, not the edge of a formula


def normalize(text: str) -> str:
    """Canonical spelling of an answer; idempotent on its own output in all that `equivalence.py` reads."""
    text = _VULGAR_FRACTION.sub(_spell_fraction, text)
    text = _SUPERSCRIPT_RUN.sub(lambda run: "^{" + run.group().translate(_SUPERSCRIPTS) + "}", text)
    text = _SUBSCRIPT_RUN.sub(lambda run: "_{" + run.group().translate(_SUBSCRIPTS) + "}", text)
    text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS)).translate(_CHARACTERS)
    text = text.replace("\\\\", "\\") if "\\begin" not in text else text  # doubled by one JSON escape too many
    text = _unwrap_dollars(text)
    text = _ROW_GAP.sub(" ", text)
    text = _MATH_DELIMITER.sub(" ", text)
    text = _BRACED_COMMA.sub(",", text)
    text = _TIGHT_SPACE.sub("", text)
    text = _SIZING.sub("", text)
    text = _WIDE_SPACE.sub(" ", text)
    text = _FRACTION_COMMAND.sub(r"\\\1", text)
    text = _DECORATION.sub("", text)
    text = _OPERATOR_NAME.sub(r"\\\1 ", text)
    text = _STYLED_LETTER.sub(r"\1", text)
    text = _NUMBER_SET.sub(lambda match: f"\\mathbb{{{match[1] or match[2] or match[3]}}}", text)
    text = _TEXT_COMMANDS.sub(r"\\text", text)
    for pattern, replacement in _SYNONYMS:
        text = pattern.sub(replacement, text)
    text = _FIRST_ARGUMENT.sub(r"\\\1{\2}", text)
    text = _SECOND_ARGUMENT.sub(r"\1{\2}", text)
    text = _SQRT_FRACTION.sub(r"\\sqrt{\1}", text)
    text = _SQRT_PAREN.sub(r"\\sqrt{\1}", text)
    text = _SQRT_BARE.sub(r"\\sqrt{\1}", text)
    text = _SPACES.sub(" ", text)
    return trim(_LEADING_PHRASE.sub("", trim(text)))


def trim(text: str) -> str:
    """Without Markdown, quotes and sentence punctuation around it, and without a pair of braces or `\\text` around all
    of it.
    """
    while True:
        before = text
        text = _unquote(text.strip())
        if text.endswith((".", ",", ";", ":")) and not text.endswith(".."):  # an ellipsis goes on, a full stop ends
            text = text[:-1].strip()
        if text.endswith("\\"):  # a line break, or what is left of "\\ "
            text = text.rstrip("\\")
        if text.startswith("\\text{") and _closes_at_end(text, len("\\text")):
            text = text[len("\\text{") : -1]
            if any(char.isalpha() for char in text) and not _FORMULA.search(text):
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
    numerator, denominator = re.split("[/\u2044\u2215]", unicodedata.normalize("NFKC", match.group()))
    return f"\\frac{{{numerator}}}{{{denominator}}}"


def _unwrap_dollars(text: str) -> str:
    text = text.replace("\\$", _CURRENCY).replace("\\textdollar", _CURRENCY)
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
