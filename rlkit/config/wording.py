"""Words for numbers, where people read them: the dry run and the console."""


def count(number: int, one: str, many: str | None = None) -> str:
    """`1 rank`, `2,048 ranks`; `many` where the plural is not `one` with an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
