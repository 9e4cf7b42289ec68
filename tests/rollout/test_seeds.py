import subprocess
import sys

from rlkit.rollout.seeds import sample_seed


def test_seeds_are_stable_across_interpreters():
    code = "from rlkit.rollout.seeds import sample_seed; print(sample_seed(42, 1234567, 3))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(out) == sample_seed(42, 1234567, 3) == 1_891_338_666_636_741_956


def test_every_part_changes_the_seed():
    seeds = [sample_seed(run, group, index) for run in range(4) for group in range(40) for index in range(8)]
    seeds += [sample_seed(0, group, 0, stream="eval/gsm8k") for group in range(40)]
    seeds += [sample_seed(1, 23, 0), sample_seed(12, 3, 0)]
    assert len(set(seeds)) == len(seeds) - 1  # (1, 23, 0) is in the first list already
    assert all(0 <= seed < 2**63 for seed in seeds)
