"""The pool of a run: custom functions, limits, counting, throughput."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlkit.config.schema import RewardConfig
from rlkit.rewards.pool import UNSCORED_REASONS, GradeResult, GraderPool
from rlkit.types.errors import ConfigError, RewardError
from rlkit.types.samples import Sample

FUNCTIONS = Path(__file__).parent / "reward_functions.py"


def sample_of(response: str, label: object = None, **metadata) -> Sample:
    return Sample(
        group_id=4, index=2, seed=0, tokens=[1, 2], prompt_length=1, response=response, label=label, metadata=metadata
    )


def run(cfg: RewardConfig, *samples: Sample, evaluation: bool = False) -> tuple[list[GradeResult], dict[str, int]]:
    """Grade all samples at once in a fresh pool."""

    async def main() -> tuple[list[GradeResult], dict[str, int]]:
        pool = GraderPool(cfg)
        try:
            results = await asyncio.gather(*(pool.grade(sample, evaluation=evaluation) for sample in samples))
            return list(results), pool.counters()
        finally:
            pool.close()

    return asyncio.run(main())


def custom(name: str, **kwargs) -> RewardConfig:
    return RewardConfig(custom_rm_path=f"{FUNCTIONS}:{name}", **{"rm_num_workers": 1, **kwargs})


# ---- built-in graders ----------------------------------------------------------------------------------------------


def test_built_in_graders_agree_with_grade_and_use_algebra():
    samples = [
        sample_of(r"\boxed{72}", "72"),
        sample_of(r"\boxed{\sqrt{8}}", r"2\sqrt{2}"),
        sample_of(r"\boxed{\sqrt{7}}", r"2\sqrt{2}"),
        sample_of("72", "72", rm_type="exact"),
        sample_of("long " * 20_000 + r"\boxed{7}", 7),
    ]
    results, counts = run(RewardConfig(rm_type="math", rm_num_workers=1), *samples)
    assert [result.reward for result in results] == [1.0, 1.0, 0.0, 1.0, 1.0]
    assert counts == {"graded": 5, "algebra_limit": 0, "processes_replaced": 0, **dict.fromkeys(UNSCORED_REASONS, 0)}
    assert all(result.error is None and result.detail is None and result.seconds >= 0 for result in results)
    assert samples[0].reward is None, "the sample is the caller's to change"


def test_an_expression_that_algebra_gives_up_on_scores_zero_and_is_counted():
    samples = [sample_of(r"\boxed{x^{7^{9^{9}}}}", "x"), sample_of(r"\boxed{\sqrt{8}}", r"2\sqrt{2}")]
    results, counts = run(RewardConfig(rm_type="math", rm_num_workers=1, rm_timeout_s=1.5), *samples)
    assert [result.reward for result in results] == [0.0, 1.0]
    assert counts["algebra_limit"] == 1 and counts["graded"] == 2


def test_an_unknown_grader_stops_the_run():
    with pytest.raises(RewardError, match="did you mean 'math'"):
        run(RewardConfig(rm_type="math"), sample_of("1", "1", rm_type="mathh"))


def test_simple_gradings_are_cheap():
    """256 of them in under 0.1 s on an idle core; asserted with room for a busy one."""
    samples = [sample_of(f"Some reasoning, then \\boxed{{{n}}}.", str(n)) for n in range(256)]

    async def main() -> float:
        pool = GraderPool(RewardConfig(rm_type="math"))
        began = time.process_time()
        results = await asyncio.gather(*(pool.grade(sample) for sample in samples))
        assert all(result.reward == 1.0 for result in results)
        pool.close()
        return time.process_time() - began

    assert min(asyncio.run(main()) for _ in range(3)) < 0.1


# ---- custom functions ----------------------------------------------------------------------------------------------


def test_a_function_is_found_by_file_and_by_module(monkeypatch):
    assert run(custom("length"), sample_of("four"))[0][0].reward == 4.0
    monkeypatch.syspath_prepend(str(FUNCTIONS.parent))
    cfg = RewardConfig(custom_rm_path="reward_functions.length", rm_num_workers=1)
    assert run(cfg, sample_of("seven77"))[0][0].reward == 7.0


def test_dicts_carry_details_and_their_reward_key_decides():
    (result,), _ = run(custom("detailed", reward_key="score"), sample_of("abc", ["x"], level=3))
    assert result.reward == 3.0
    assert result.detail == {"score": 3, "eval_score": 30, "label": ["x"], "seen": {"level": 3}}
    both = custom("detailed", reward_key="score", eval_reward_key="eval_score")
    assert run(both, sample_of("abc"))[0][0].reward == 3.0
    assert run(both, sample_of("abc"), evaluation=True)[0][0].reward == 30.0
    assert run(custom("detailed", reward_key="score"), sample_of("abc"), evaluation=True)[0][0].reward == 3.0


@pytest.mark.parametrize(
    "keys, message",
    [
        ({}, r"returned a dict \('score', 'eval_score', 'label', 'seen'\); set --reward-key"),
        ({"reward_key": "acc"}, r"no 'acc' \(--reward-key\); it returned 'score'"),
        ({"reward_key": "label"}, r"returned 'x' of type str; return a number"),
    ],
)
def test_a_dict_without_a_usable_key_stops_the_run(keys, message):
    with pytest.raises(RewardError, match=message):
        run(custom("detailed", **keys), sample_of("abc", "x"))


def test_numbers_of_other_libraries_become_plain():
    (result,), _ = run(custom("numpy_scalar", reward_key="score"), sample_of(""))
    assert result.reward == 0.5
    assert result.detail == {"score": 0.5, "array": "array([0, 1])", "where": {"deep": [1, 2.0]}}


def test_what_is_no_finite_number_leaves_the_sample_unscored():
    results, counts = run(
        custom("odd"), *(sample_of(name) for name in ("none", "nan", "inf", "true", "integer", "huge"))
    )
    assert [result.reward for result in results] == [None, None, None, 1.0, 3.0, None]
    assert [result.error and result.error.split(":")[0] for result in results] == [
        "none",
        "not_finite",
        "not_finite",
        None,
        None,
        "not_finite",
    ]
    assert (counts["none"], counts["not_finite"], counts["graded"]) == (1, 3, 2)


@pytest.mark.parametrize("name", ["text", "list"])
def test_a_result_of_another_type_stops_the_run(name):
    with pytest.raises(RewardError, match="return a number, a dict or None"):
        run(custom("odd"), sample_of(name))


def test_an_exception_is_one_unscored_sample_with_its_traceback(caplog):
    results, counts = run(custom("raises"), *(sample_of(f"key {n}") for n in range(9)))
    assert all(result.reward is None for result in results)
    assert (
        results[3].error is not None
        and "KeyError: 'key 3'" in results[3].error
        and "reward_functions.py" in results[3].error
    )
    assert counts["error"] == 9
    assert len(caplog.records) == 5, "the others are only counted"
    assert "sample 2 of group 4" in caplog.text


def test_a_label_that_cannot_be_sent_is_one_unscored_sample():
    results, counts = run(custom("length"), sample_of("abc", lambda: None), sample_of("abc"))
    assert [result.reward for result in results] == [None, 3.0]
    assert counts["error"] == 1


def test_a_slow_function_is_cut_off_and_its_process_goes_on():
    responses = ["0", "60", "0"]
    began = time.monotonic()
    results, counts = run(custom("sleeps", rm_timeout_s=0.5), *map(sample_of, responses))
    assert [result.reward for result in results] == [1.0, None, 1.0]
    assert results[1].error is not None and results[1].error.startswith("timeout")
    assert counts["timeout"] == 1
    assert time.monotonic() - began < 20


def test_code_that_never_returns_to_python_is_cut_off():
    results, counts = run(custom("spins", rm_timeout_s=0.5), *map(sample_of, ["spin", "no", "no"]))
    assert [result.reward for result in results] == [None, 1.0, 1.0]
    assert counts["timeout"] == 1


@pytest.mark.parametrize("how", ["exit", "sys.exit", "abort"])
def test_a_crash_is_one_unscored_sample(how):
    results, counts = run(custom("exits"), *map(sample_of, [how, "no", "no"]))
    assert [result.reward for result in results] == [None, 1.0, 1.0]
    assert counts["crash"] == 1


def test_output_of_a_function_does_not_disturb_the_protocol(capfd):
    results, _ = run(custom("talks"), sample_of(""), sample_of(""))
    assert [result.reward for result in results] == [1.0, 1.0]
    captured = capfd.readouterr()
    assert captured.err.count("raw bytes\n") == captured.err.count("to standard output\n") == 2
    assert captured.out == ""


def test_gradings_spread_over_the_processes():
    results, _ = run(custom("process_id", rm_num_workers=2), *(sample_of("") for _ in range(12)))
    assert len({result.reward for result in results}) == 2
    assert os.getpid() not in {result.reward for result in results}


def test_a_cancelled_grading_does_not_spoil_the_next_one():
    async def main() -> GradeResult:
        pool = GraderPool(custom("sleeps", rm_timeout_s=1.0))
        try:
            await pool.start()
            abandoned = asyncio.create_task(pool.grade(sample_of("60")))
            await asyncio.sleep(0.3)
            abandoned.cancel()
            return await pool.grade(sample_of("0.9"))
        finally:
            pool.close()

    assert asyncio.run(main()).reward == 1.0


# ---- coroutines ----------------------------------------------------------------------------------------------------


def test_coroutines_wait_side_by_side_in_one_process():
    began = time.monotonic()
    results, _ = run(custom("waits"), *(sample_of("0.5") for _ in range(30)))
    assert [result.reward for result in results] == [0.5] * 30
    assert time.monotonic() - began < 10, "one after the other would be 15 s"


def test_a_slow_coroutine_is_cancelled_and_its_neighbours_are_not():
    results, counts = run(custom("waits", rm_timeout_s=1.0), *map(sample_of, ["0.1", "60", "0.2"]))
    assert [result.reward for result in results] == [0.1, None, 0.2]
    assert counts["timeout"] == 1 and counts["processes_replaced"] == 0


def test_a_coroutine_that_blocks_its_loop_is_told_apart_and_its_process_replaced():
    async def main() -> tuple[GradeResult, GradeResult, dict[str, int]]:
        pool = GraderPool(custom("blocks", rm_timeout_s=0.3))
        try:
            return await pool.grade(sample_of("block")), await pool.grade(sample_of("no")), pool.counters()
        finally:
            pool.close()

    blocked, after, counts = asyncio.run(main())
    assert blocked.reward is None and blocked.error is not None and "must not block" in blocked.error
    assert after.reward == 1.0
    assert counts["timeout"] == 1 and counts["processes_replaced"] == 1


def test_coroutines_share_one_loop_and_module():
    results, _ = run(custom("counts_calls"), *(sample_of("") for _ in range(5)))
    assert sorted(result.reward or 0 for result in results) == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_an_object_with_an_async_call_works():
    assert run(custom("judge"), sample_of(""))[0][0].reward == 0.25


def test_a_killed_parent_leaves_neither_its_graders_nor_what_they_started(tmp_path):
    program = f"""
import asyncio, sys
from rlkit.config.schema import RewardConfig
from rlkit.rewards.pool import GraderPool
from rlkit.types.samples import Sample
async def main():
    path = {str(FUNCTIONS)!r} + ":starts_a_process"
    pool = GraderPool(RewardConfig(custom_rm_path=path, rm_num_workers=1, rm_timeout_s=300))
    response = {str(tmp_path / "pids")!r}
    await pool.grade(Sample(group_id=0, index=0, seed=0, tokens=[1], prompt_length=1, response=response))
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 30
    while not (tmp_path / "pids").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert all(psutil.pid_exists(pid) for pid in pids)
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=5)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


# ---- start and end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path, message",
    [
        ("no_such_module.f", "no module 'no_such_module'; put its folder on PYTHONPATH"),
        ("json.no_such_function", "json has no 'no_such_function'; it has .*loads"),
        ("nowhere.py:f", "there is no file /.*nowhere.py"),
        (f"{FUNCTIONS}:two_arguments", "cannot be called with three arguments"),
        (f"{FUNCTIONS}:keyword_only", "cannot be called with three arguments .*threshold"),
        (f"{FUNCTIONS}:a_number", "a_number is a float, not a function"),
        (f"{FUNCTIONS}", "takes `package.module.function` or `file.py:function`"),
        ("length", "takes `package.module.function` or `file.py:function`"),
    ],
)
def test_a_function_that_cannot_be_used_is_told_at_the_start(path, message):
    async def main() -> None:
        pool = GraderPool(RewardConfig(custom_rm_path=path, rm_num_workers=2))
        try:
            await pool.start()
        finally:
            pool.close()

    with pytest.raises(ConfigError, match=message) as caught:
        asyncio.run(main())
    assert path in str(caught.value)


@pytest.mark.parametrize(
    "line, message",
    [
        ("import no_such_thing", "No module named 'no_such_thing'"),
        ("1 / 0", "ZeroDivisionError"),
        ("def", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import os; os.abort()", "crashed while it started"),
    ],
)
def test_a_module_that_fails_to_load_is_told_at_the_start(tmp_path, line, message):
    (tmp_path / "broken.py").write_text(f"{line}\ndef f(response, label, metadata): return 1.0\n")
    with pytest.raises(ConfigError, match=message):
        run(RewardConfig(custom_rm_path=f"{tmp_path}/broken.py:f", rm_num_workers=1), sample_of(""))


def test_a_closed_pool_leaves_no_process_and_scores_nothing():
    async def main() -> tuple[list[int], GradeResult]:
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        pool = GraderPool(custom("process_id", rm_num_workers=2))
        await pool.start()
        children = [child.pid for child in psutil.Process().children(recursive=True) if child.pid not in before]
        pool.close()
        return children, await pool.grade(sample_of(""))

    children, result = asyncio.run(main())
    assert len(children) == 4, "two supervisors with their executors"
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in children)
    assert result.reward is None and result.error is not None and "closed" in result.error
