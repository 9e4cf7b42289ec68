"""Waits until a Ray cluster answers and has so many nodes.

python scripts/slurm/wait_for_nodes.py ADDRESS NUM_NODES TIMEOUT_S
"""

import subprocess
import sys
import time

ASK = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"
PAUSE_S = 2.0


def main() -> int:
    address, wanted, timeout_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    deadline = time.monotonic() + timeout_s
    while True:
        # A process of its own: ray.init gives up for good when the head is not there yet.
        asked = subprocess.run([sys.executable, "-c", ASK, address], capture_output=True, text=True, check=False)
        found = int(asked.stdout.split()[-1]) if asked.returncode == 0 else 0
        if found >= wanted:
            return 0
        if time.monotonic() > deadline:
            print(f"{found} of {wanted} nodes joined {address} within {timeout_s:g} s", file=sys.stderr)
            print(asked.stderr[-2000:], file=sys.stderr)
            return 1
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    sys.exit(main())
