"""What a flag name means: `find` answers for the schema's flags and for `--sglang-*` alike.

Names are compared with underscores: `--rollout-batch-size`, `--rollout_batch_size` and the key `rollout_batch_size` of
a recipe are one. There are no abbreviations.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlkit.config.fields import FieldInfo, all_fields, flag_of
from rlkit.config.sglang_flags import PREFIX, SglangFlag, sglang_table
from rlkit.config.slime_flags import SLIME_ONLY
from rlkit.config.values import from_toml, from_words, nearest

Takes = Literal["nothing", "one", "at most one", "some", "any"]
"""How many words follow a flag on the command line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """A flag that exists: a field of the schema or one of SGLang's."""

    key: str
    """Field name, or `sglang_NAME`: where the value and its provenance are kept."""
    source: FieldInfo | SglangFlag

    @property
    def spelled(self) -> str:
        return flag_of(self.key)

    @property
    def is_switch(self) -> bool:
        return self.source.is_switch if isinstance(self.source, SglangFlag) else self.source.inner is bool

    @property
    def is_unsettable_switch(self) -> bool:
        """On, off, or None: left to the run."""
        return self.is_switch and isinstance(self.source, FieldInfo) and self.source.is_optional

    @property
    def takes(self) -> Takes:
        if self.is_switch:
            return "nothing"
        if isinstance(self.source, FieldInfo):
            return "some" if self.source.is_list else "one"
        match self.source.nargs:
            case "+":
                return "some"
            case "*":
                return "any"
            case "?":
                return "at most one"
            case None:
                return "one"

    @property
    def can_be_emptied(self) -> bool:
        """`--no-NAME` switches a switch off and empties a list of the schema."""
        return self.is_switch or (isinstance(self.source, FieldInfo) and self.source.is_list)

    @property
    def emptied(self) -> Any:
        return False if self.is_switch else ()

    def from_words(self, words: Sequence[str]) -> Any:
        """Raises ValueError with what was expected."""
        if self.is_switch:
            return True
        if isinstance(self.source, SglangFlag):
            return self.source.from_words(words)
        return from_words(self.source, words)

    def from_toml(self, value: Any) -> Any:
        """Raises ValueError with what was expected."""
        if isinstance(self.source, SglangFlag):
            return self.source.from_toml(value)
        return from_toml(self.source, value)


def find(name: str) -> Flag | None:
    """The flag of that name with underscores and without dashes in front; None if there is none or it is refused."""
    field = all_fields().get(name)
    if field is not None:
        return Flag(key=name, source=field)
    if name.startswith(PREFIX):
        bare = name.removeprefix(PREFIX)
        passed = sglang_table().find(bare)
        if passed is not None and sglang_table().refusal(bare) is None:
            return Flag(key=PREFIX + passed.name, source=passed)
    return None


def find_negated(name: str) -> Flag | None:
    """The flag that `no_NAME` switches off or empties."""
    if not name.startswith("no_"):
        return None
    flag = find(name.removeprefix("no_"))
    return flag if flag is not None and flag.can_be_emptied else None


def why_unknown(name: str, *, noun: Literal["flag", "key"] = "flag", extra: Iterable[str] = ()) -> str:
    """One sentence about a name that `find` does not know, naming the nearest one.

    A flag of the command line is spelled `--rollout-batch-size`, a key of a recipe `rollout_batch_size`.
    `extra`: names that count too.
    """
    spell = flag_of if noun == "flag" else str
    if name in SLIME_ONLY:  # before SGLang's own: slime calls flags of its router --sglang-router-*
        return f"{spell(name)} does not exist in rlkit: {SLIME_ONLY[name]}"
    if name.startswith(PREFIX):
        refusal = sglang_table().refusal(name.removeprefix(PREFIX))
        if refusal is not None:
            return refusal
    close = nearest(name, [*all_fields(), *extra])
    hint = f"; did you mean {spell(close)}?" if close else "; --help lists all of them"
    return f"unknown {noun} {spell(name)}{hint}"
