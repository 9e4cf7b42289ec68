"""Custom reward functions for the tests of the grader pool. Run inside grader processes."""

import asyncio
import os
import subprocess
import sys
import time

calls = 0


def length(response, label, metadata):
    return float(len(response))


def process_id(response, label, metadata):
    return os.getpid()


def detailed(response, label, metadata):
    return {"score": len(response), "eval_score": 10 * len(response), "label": label, "seen": metadata}


def odd(response, label, metadata):
    return {
        "none": None,
        "nan": float("nan"),
        "inf": float("inf"),
        "text": "high",
        "list": [1.0],
        "true": True,
        "integer": 3,
        "huge": 10**400,
        "empty": {},
    }[response]


def numpy_scalar(response, label, metadata):
    import numpy

    return {"score": numpy.float32(0.5), "array": numpy.arange(2), "where": {"deep": (1, numpy.int64(2))}}


def raises(response, label, metadata):
    raise KeyError(response)


def exits(response, label, metadata):
    os._exit(7) if response == "exit" else sys.exit(
        3
    ) if response == "sys.exit" else os.abort() if response == "abort" else None
    return 1.0


def sleeps(response, label, metadata):
    time.sleep(float(response))
    return 1.0


def starts_a_process(response, label, metadata):
    """Writes both process ids to the file named by the response, then hangs."""
    child = subprocess.Popen(["sleep", "300"])
    with open(response + ".part", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    os.rename(response + ".part", response)
    time.sleep(300)


def spins(response, label, metadata):
    if response == "spin":
        9**9**9
    return 1.0


def talks(response, label, metadata):
    print("to standard output")
    os.write(1, b"raw bytes\n")
    sys.stdin.read()
    return 1.0


async def waits(response, label, metadata):
    await asyncio.sleep(float(response))
    return float(response)


async def blocks(response, label, metadata):
    if response == "block":
        time.sleep(60)
    await asyncio.sleep(0)
    return 1.0


async def counts_calls(response, label, metadata):
    global calls
    calls += 1
    return float(calls)


class Judge:
    async def __call__(self, response, label, metadata):
        return 0.25


judge = Judge()


def two_arguments(response, label):
    return 1.0


def keyword_only(response, label, metadata, *, threshold):
    return 1.0


a_number = 3.0
