"""`rlkit COMMAND ...`: what looks at runs and checkpoints. Each command is a module with `add_arguments` and `main`,
imported when it is called.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from rlkit.types.errors import RlkitError

COMMANDS = {
    "audit": ("rlkit.cli.audit", "prove that no prompt was skipped or trained twice"),
    "ckpt": ("rlkit.cli.ckpt", "verify, compare and list checkpoints"),
    "doctor": ("rlkit.cli.doctor", "would a run start here? Takes the flags of train.py"),
    "report": ("rlkit.cli.report", "write a run's report.html: curves, time, samples, what looks wrong"),
    "compare": ("rlkit.cli.compare", "two runs side by side: settings, and the first step that diverges"),
    "replay": ("rlkit.cli.replay", "train a recorded step again and compare it bit for bit"),
    "explain": ("rlkit.cli.explain", "why trainer and engine disagree on log-probs"),
}
EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 good, 1 something is wrong with what was looked at, 2 wrong use."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(
            "usage: rlkit COMMAND ...\n\n" + "\n".join(f"  {name:<8}{about}" for name, (_, about) in COMMANDS.items())
        )
        return 0 if args else EXIT_USAGE
    if args[0] not in COMMANDS:
        print(f"rlkit: no command {args[0]!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return EXIT_USAGE
    name, about = COMMANDS[args[0]]
    module = importlib.import_module(name)
    if args[0] == "doctor":  # its flags are those of a run, read by the configuration's own parser
        return module.run_doctor(args[1:])
    parser = argparse.ArgumentParser(prog=f"rlkit {args[0]}", description=about)
    module.add_arguments(parser)
    try:
        own, flags = split_flags(args[1:]) if args[0] == "replay" else (args[1:], [])
        return module.main(parser.parse_args(own, argparse.Namespace(flags=flags)))
    except (RlkitError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def split_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before `--`, and the flags of a run behind it, which argparse could not tell from its own."""
    place = list(words).index("--") if "--" in words else len(words)
    return list(words[:place]), list(words[place + 1 :])


if __name__ == "__main__":
    sys.exit(main())
