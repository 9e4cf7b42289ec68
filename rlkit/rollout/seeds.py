"""Generation seeds of samples: the same in every process, on every machine and after every resume."""

import hashlib

TRAIN_STREAM = "train"


def sample_seed(run_seed: int, group_id: int, index: int, *, stream: str = TRAIN_STREAM) -> int:
    """Seed of sample `index` of group `group_id`, in [0, 2**63).

    Streams keep evaluation apart from training where group numbers coincide. Not Python's `hash`, which changes with
    the interpreter.
    """
    name = f"{stream}/{run_seed}/{group_id}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1
