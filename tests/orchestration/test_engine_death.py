"""What the end of a dead engine's log says to the user."""

import pytest

from rlkit.orchestration.engine_death import advice_on_death, telling_part

OUT_OF_MEMORY = """
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.81 GiB of \
which 1.25 GiB is free. Process 77 has 138 GiB memory in use.
"""
NO_POOL = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. available_size=-1"


def test_a_full_gpu_is_told_with_its_numbers_and_the_flag():
    advice = advice_on_death(OUT_OF_MEMORY)
    for part in ("wanted 2.50 GiB", "1.25 GiB of 139.81 GiB were free", "--sglang-mem-fraction-static"):
        assert part in advice


@pytest.mark.parametrize(
    "log, flag",
    [
        ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.", "Lower --sglang-mem"),
        (NO_POOL, "raise --sglang-mem-fraction-static"),
        ("OSError: [Errno 98] Address already in use", "start the run again"),
    ],
)
def test_known_causes_have_a_remedy(log: str, flag: str):
    assert flag in advice_on_death(log)


def test_an_error_far_above_the_last_lines_is_shown_too():
    chatter = [f"line {i}" for i in range(60)]
    log = "\n".join(
        ["Traceback (most recent call last):", '  File "x.py", line 1', "ValueError: no such model", *chatter]
    )
    shown = telling_part(log).splitlines()
    assert shown == ["ValueError: no such model", "...", *chatter[-20:]]
    assert telling_part("\n".join(chatter)).splitlines() == chatter[-20:]
    near = "\n".join([*chatter, "Traceback (most recent call last):", "  frame", "ValueError: bad"])
    assert telling_part(near).splitlines()[-1] == "ValueError: bad" and "..." not in telling_part(near)


def test_an_unknown_cause_adds_nothing():
    assert advice_on_death("Segmentation fault") == ""
