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
    parser = argparse.ArgumentParser(prog=f"rlkit {args[0]}", description=about)
    module.add_arguments(parser)
    try:
        return module.main(parser.parse_args(args[1:]))
    except (RlkitError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
