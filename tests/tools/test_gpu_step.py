"""The arithmetic of the GPU benchmark, its command lines, and its watch over processes; its runs are measurements."""

import os
import subprocess
import sys
import time
from pathlib import Path

import gpu_floor
import gpu_report
import gpu_step
import gpu_watch
import gpu_workloads
import orjson
import pytest
from gpu_watch import Reading

from rlkit.config.load import load_config

ROOT = Path(__file__).parents[2]


def row(step: int, total: float) -> dict[str, float]:
    return {
        "step": step,
        "time/step_s": total,
        "time/generate_s": 1.0,
        "time/train_s": 0.5,
        "time/log_prob_s": 0.2,
        "time/trainer_sleep_s": 0.25,
        "rollout/response_length": 10.0,
        "rollout/prompt_length": 5.0,
        "rollout/num_samples": 4.0,
        "sync/num_bytes": 8.0,
        "memory/train_peak_gib": 1.0 + step,
        "train/train_rollout_logprob_abs_diff": 0.01,
        "train/train_rollout_logprob_abs_diff_max": 0.1 * step,
    }


ROWS = [row(0, 90.0), row(1, 9.0), row(2, 2.0), row(3, 4.0)]
GENERATE = {"rounds": [{"seconds": 2.0, "response_tokens": 80.0}], "sleeps": []}
TRAIN = {"rounds": [{"seconds": 1.0}], "total_tokens": 120.0}


def test_two_steps_do_not_count_and_other_is_what_no_phase_explains():
    loop = gpu_report.summarise_loop(ROWS)
    assert (loop["num_counted"], loop["step"], loop["first_steps"]) == (2, 3.0, [90.0, 9.0])
    assert loop["phases"]["other"] == pytest.approx(3.0 - 1.0 - 0.5 - 0.25), "log_prob lies inside train"
    assert (loop["response_tokens"], loop["total_tokens"], loop["logprob_diff_max"]) == (40.0, 60.0, pytest.approx(0.3))


def test_too_few_steps_are_an_error():
    with pytest.raises(SystemExit, match="2 steps were run, none beyond the 2"):
        gpu_report.summarise_loop(ROWS[:2])


def test_floors_are_scaled_to_the_tokens_of_the_run():
    loop = gpu_report.summarise_loop(ROWS)
    assert gpu_report.floors(loop, GENERATE, TRAIN) == {"generate": 1.0, "train": 0.5}
    sleeps = [{"engine_sleep": 0.1, "engine_wake": 0.2, "kv_wake": 0.3}]
    copies = {"sleep_bytes": 4 * 1024**3, "weight_bytes": 1024**3}
    speeds = {"to_host_gib_s": 40.0, "to_device_gib_s": 20.0, "copy_gib_s": 1000.0}
    found = gpu_report.floors(loop, {**GENERATE, "sleeps": sleeps}, {**TRAIN, **copies, **speeds})
    assert (found["trainer_sleep"], found["trainer_wake"], found["sync"]) == (0.1, 0.2, 0.001)
    assert (found["engine_sleep"], found["engine_wake"], found["kv_wake"]) == (0.1, 0.2, 0.3)


@pytest.mark.parametrize(
    ("step", "floor", "passes"), [(22.0, 20.0, True), (22.1, 20.0, False), (3.0, 2.0, True), (3.1, 2.0, False)]
)
def test_verdict_allows_a_tenth_or_a_second(step, floor, passes):
    passed, sentence = gpu_report.verdict(step, floor)
    assert passed is passes and sentence.startswith("PASS" if passes else "FAIL")


def test_table_adds_up():
    loop = gpu_report.summarise_loop(ROWS)
    lines = {
        line.split("  ")[0]: line.split() for line in gpu_report.phase_table(loop, {"generate": 0.75, "train": 0.5})
    }
    assert lines["generate"][1:] == ["1.000", "0.750", "0.250"] and lines["step"][1:] == ["3.000", "1.250", "1.750"]
    assert "sync" not in lines and "weight update" not in lines, "phases without time are left out"


def write_ledger(run_dir: Path, steps: int) -> None:
    events = []
    for step in range(steps):
        began = 100.0 + 10.0 * step
        events += [
            {"event": "issued", "time": began, "step": step, "group": 0},
            {"event": "issued", "time": began + 0.1, "step": step, "group": 1},
            {"event": "generated", "time": began + 3.0, "step": step, "group": 1},
            {"event": "generated", "time": began + 4.0, "step": step, "group": 0},
            {"event": "trained", "time": began + 8.0, "step": step, "rank": 0, "groups": [0, 1]},
        ]
    (run_dir / "ledger.jsonl").write_bytes(b"".join(orjson.dumps(e, option=orjson.OPT_APPEND_NEWLINE) for e in events))


def test_memory_peaks_belong_to_phases(tmp_path):
    write_ledger(tmp_path, 3)
    rows = [{"step": step, "time/step_s": 9.0, "time/train_s": 2.0} for step in range(3)]
    at = {103.0: 99.0, 121.0: 50.0, 125.0: 3.0, 127.0: 20.0, 128.5: 5.0, 129.5: 70.0}
    readings = [Reading(time=when, name="0", gib=gib) for when, gib in at.items()]
    assert gpu_report.memory_peaks(tmp_path, rows, readings) == {
        "generate": {"0": 50.0},
        "train": {"0": 20.0},
        "between": {"0": 5.0},
    }, "step 0 is warm-up, and 129.5 lies between two steps"


def test_leaks_are_named_with_both_values(tmp_path):
    write_ledger(tmp_path, 8)
    rows = [{"step": step, "time/step_s": 9.0} for step in range(8)]
    gpu = [Reading(time=142.0, name="0", gib=10.0), Reading(time=172.0, name="0", gib=10.1)]
    host = [Reading(time=142.0, name=role, gib=2.0) for role in ("driver", "rank")]
    host += [Reading(time=173.0, name="driver", gib=2.0), Reading(time=173.0, name="rank", gib=2.5)]
    found = gpu_report.leaks(tmp_path, rows, gpu, host)
    assert found["steps"] == [5, 8] and found["grew"] == ["host rank: 2.00 -> 2.50 GiB"]
    assert gpu_report.leak_table(found)[-1] == "FAIL: grew: host rank: 2.00 -> 2.50 GiB"


def test_watch_sees_a_process_and_its_children():
    child = [sys.executable, "-c", "import time; x = bytearray(64 << 20); time.sleep(30)", "ray::TrainWorker"]
    starter = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    parent = subprocess.Popen([sys.executable, "-c", starter, *child])
    try:
        with gpu_watch.Watch(parent.pid) as watch:
            deadline = time.monotonic() + 20.0
            while time.monotonic() < deadline and not any(r.name == "rank" and r.gib > 0.06 for r in watch.host):
                time.sleep(0.1)
        assert {"driver", "rank"} <= {reading.name for reading in watch.host}
        assert max(reading.gib for reading in watch.host if reading.name == "rank") > 0.06
    finally:
        for process in gpu_watch.psutil.Process(parent.pid).children(recursive=True):
            process.kill()
        parent.kill()
        parent.wait()


@pytest.mark.parametrize("name", gpu_workloads.WORKLOADS)
def test_flags_of_every_workload_are_a_consistent_configuration(name):
    load = gpu_workloads.WORKLOADS[name]
    flags = gpu_workloads.train_flags(
        load, model=Path("m"), prompts=Path("p.jsonl"), device="cuda", rm=("--rm-type", "math")
    )
    cfg = load_config([*flags, "--num-rollout", "8"]).config
    assert (cfg.rollout.rollout_batch_size, cfg.rollout.n_samples_per_prompt) == (32, 8)
    assert cfg.rollout.rollout_max_response_len == 1024 and cfg.steps_per_rollout == 1
    assert cfg.rollout.rollout_ignore_eos is (not name.endswith("p"))
    assert cfg.cluster.num_engines == load.num_engines and cfg.cluster.actor_num_gpus == load.num_ranks
    assert cfg.train.max_tokens_per_gpu == (8192 if "4B" in load.shape else 16_384)


def test_workloads_are_what_they_are_called():
    loads = gpu_workloads.WORKLOADS
    assert [loads[name].vocab_size for name in ("W1", "W1p", "W3", "W3p")] == [151_936, 49_152, 151_936, 49_152]
    assert [load.num_gpus for load in loads.values()] == [1, 1, 2, 1, 1, 2]
    assert loads["W4"].is_split and not loads["W2"].is_split


def test_dry_run_needs_nothing():
    words = ["--workload", "W4", "--tokenizer", "t", "--prompts", "p.jsonl", "--dry-run", "--", "--lr", "3e-6"]
    done = subprocess.run(
        [sys.executable, "tools/bench/gpu_step.py", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The configuration is consistent." in done.stdout and "3e-06" in done.stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "cpu"], "add --tiny"),
        (["--tokenizer", "t"], "--prompts FILE is needed"),
        (["--prompts", "p"], "--tokenizer DIR"),
        (["--tiny", "--steps", "2"], "leaves nothing after"),
        (["--tiny", "--parts", "loop,roof"], "parts are loop and floor"),
    ],
)
def test_what_cannot_be_measured_is_said(argv, message, capsys):
    with pytest.raises(SystemExit):
        gpu_step.parse(argv)
    assert message in capsys.readouterr().err


def test_counting_tokens():
    class Sample:
        response_length, total_length = 3, 5

    class Group:
        samples = (Sample(), Sample())

    assert gpu_floor.count_tokens([Group()]) == {"response_tokens": 6.0, "total_tokens": 10.0}  # pyright: ignore
