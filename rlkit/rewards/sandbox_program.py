"""The program around a program of a model: takes away network, privileges and resources, then runs it.

Started by `sandbox.py` as a script of an isolated interpreter, `python -I -S sandbox_program.py JSON`; never imported.
Standard library only. The kernel enforces what it can (resource limits, an empty network namespace, another user);
an audit hook refuses the rest to ordinary Python. It is no defence against code written to break out.
"""

import json
import os
import resource
import sys

_NOBODY = 65534
_NEW_NETWORK, _NEW_USER = 0x40000000, 0x10000000
_REFUSED = (
    "socket.",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "os.kill",
    "os.startfile",
    "ctypes.",
    "pty.",
)
_CHANGES_FILES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "shutil.")
_CHANGES_FILES += ("os.chmod", "os.chown", "os.utime", "os.mkfifo", "os.mknod", "os.setxattr")


def main() -> None:
    options = json.loads(sys.argv[1])
    has_no_network = leave_network()
    become_nobody()
    limit_resources(options)
    report = os.fdopen(options["report_fd"], "w")
    report.write("isolated\n" if has_no_network else "network\n")
    report.flush()
    folder = os.getcwd()
    with open("program.py", encoding="utf-8") as file:
        program = file.read()
    with open("checks.py", encoding="utf-8") as file:
        checks = file.read()
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    compiled = [compile(program, "program.py", "exec"), compile(checks, "checks.py", "exec")]
    sys.argv = ["program.py"]
    sys.addaudithook(refuse(folder))
    for code in compiled:
        exec(code, names)
    sys.stdout.flush()
    report.write(f"{os.read(options['word_fd'], 100).decode()}\n")  # read last: a program that exits early has no word
    report.flush()


def leave_network() -> bool:
    """Enter a network namespace that has no interface up. False where the kernel does not allow it."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare"):
        return False
    return libc.unshare(_NEW_NETWORK) == 0 or libc.unshare(_NEW_NETWORK | _NEW_USER) == 0


def become_nobody() -> None:
    """Root gives its rights away, if the interpreter's own files can be read without them."""
    if os.geteuid() != 0:
        return
    try:
        os.seteuid(_NOBODY)
        readable = os.access(os.__file__, os.R_OK, effective_ids=True) and os.access(".", os.W_OK, effective_ids=True)
        os.seteuid(0)
        if readable:
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
    except OSError:  # a user namespace that knows no other user
        if os.geteuid() != 0:
            os.seteuid(0)


def limit_resources(options: dict) -> None:
    limits = {
        resource.RLIMIT_CPU: options["cpu_s"],
        resource.RLIMIT_AS: options["memory_bytes"],
        resource.RLIMIT_FSIZE: options["file_bytes"],
        resource.RLIMIT_NPROC: 1,
        resource.RLIMIT_NOFILE: 32,
        resource.RLIMIT_CORE: 0,
    }
    for kind, wanted in limits.items():
        _, hard = resource.getrlimit(kind)
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (limit, limit))


def refuse(folder: str):
    """An audit hook: no network, no processes, no change of files outside of the folder."""
    inside = os.path.realpath(folder) + os.sep

    def is_inside(path: object) -> bool:
        if isinstance(path, int):
            return True  # a descriptor that was opened before
        return isinstance(path, str | bytes) and (os.path.realpath(os.fsdecode(path)) + os.sep).startswith(inside)

    def hook(event: str, arguments: tuple) -> None:
        if event.startswith(_REFUSED):
            raise PermissionError(f"{event} is not allowed here")
        if event == "open":
            path, mode, flags = arguments
            writes = (isinstance(mode, str) and any(c in mode for c in "wax+")) or (
                isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            )
            if writes and not is_inside(path):
                raise PermissionError(f"writing {path!r} is not allowed here")
        elif event.startswith(_CHANGES_FILES) and not is_inside(arguments[0] if arguments else ""):
            raise PermissionError(f"{event} is not allowed outside of the working folder")

    return hook


if __name__ == "__main__":
    main()
