"""The process groups over which a trainer broadcasts weights to this engine. Runs on the engine thread."""

from torch.distributed import ProcessGroup

from rlkit.dist.update_group import join_update_group, leave_update_group
from rlkit.types.errors import EngineError

JOIN_TIMEOUT_S = 300.0


class UpdateGroups:
    """Groups by name."""

    def __init__(self) -> None:
        self._groups: dict[str, ProcessGroup] = {}

    def join(self, *, name: str, address: str, port: int, rank: int, world_size: int, backend: str) -> None:
        """Returns once all members have joined; EngineError when they do not within 300 s."""
        if not name:
            raise EngineError("Group name cannot be empty")
        if name in self._groups:
            raise EngineError(f"the group {name} exists already; destroy it first")
        try:
            self._groups[name] = join_update_group(
                backend=backend,
                address=address,
                port=port,
                rank=rank,
                world_size=world_size,
                name=name,
                timeout_s=JOIN_TIMEOUT_S,
            )
        except (RuntimeError, ValueError) as error:
            raise EngineError(f"Failed to initialize custom process group: {error}.") from error

    def leave(self, name: str) -> None:
        group = self._groups.pop(name, None)
        if group is None:
            raise EngineError("The group to be destroyed does not exist.")
        leave_update_group(group)

    def get(self, name: str) -> ProcessGroup:
        group = self._groups.get(name)
        if group is None:
            raise EngineError(
                f"Group {name} not in {list(self._groups)}. Please call `init_weights_update_group` first."
            )
        return group
