"""Weight versions count up, whatever dies or resumes in between. Called by the session at every update."""

from rlkit.types.errors import SyncError


def advanced(last: int | None, version: int) -> int:
    """`version`, if it may follow `last` (None: there was none). SyncError otherwise: staleness would turn negative."""
    if version < 0 or (last is not None and version <= last):
        raise SyncError(
            f"weights v{version} were to follow v{last}: versions only count up, or stale samples would look fresh"
        )
    return version
