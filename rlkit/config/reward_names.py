"""Names of the built-in graders, as `--rm-type` and a row's `metadata["rm_type"]` spell them.

They live here, not in `rewards/`, so that the command line can check them without importing a grader.
`boxed_` in front of a name grades only the content of the last `\\boxed{}`.
"""

BOXED_PREFIX = "boxed_"

PLAIN_GRADERS = ("math", "exact", "deepscaler", "dapo", "f1", "gpqa", "ifbench", "random")
"""Graders by their own name; `docs/rewards.md` says what each looks at."""

BOXABLE_GRADERS = ("math", "exact", "deepscaler", "dapo", "f1", "gpqa")
"""Graders that read the response, so that `boxed_` in front of them means something."""

RUN_GRADERS = ("remote_rm", "reward_model", "code")
"""Graders that wait for others, a server or a process: only runs have them."""

REWARD_NAMES = PLAIN_GRADERS + RUN_GRADERS + tuple(BOXED_PREFIX + name for name in BOXABLE_GRADERS)
"""Every accepted value of `--rm-type`."""
