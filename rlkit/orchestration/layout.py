"""From a config to a layout: which slot holds which training rank and which engine. Pure; Ray comes later
(`placement.py`).

A slot is one GPU, or one rank slot on a machine without CUDA. Slots are numbered by (node, GPU); training ranks take
them from 0 on, engines from 0 on too when colocated and behind the ranks when split. The dry run draws what this module
returns.
"""

from dataclasses import dataclass

from rlkit.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePlace:
    """One engine and the slots it runs on, in engine-rank order."""

    index: int
    slots: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Every process of a run that needs a slot."""

    num_slots: int
    slots_per_node: int
    rank_slots: tuple[int, ...]
    """Slot of each training rank; empty when nothing trains."""
    engines: tuple[EnginePlace, ...]
    """Empty when nothing generates."""

    @property
    def num_nodes(self) -> int:
        return -(-self.num_slots // self.slots_per_node)

    def node_of(self, slot: int) -> int:
        return slot // self.slots_per_node

    def colocated_ranks(self, engine: EnginePlace) -> tuple[int, ...]:
        """Training ranks on the engine's own slots, in engine-rank order; empty unless every slot of it holds a
        rank."""
        rank_at = {slot: rank for rank, slot in enumerate(self.rank_slots)}
        if not all(slot in rank_at for slot in engine.slots):
            return ()
        return tuple(rank_at[slot] for slot in engine.slots)


def plan_layout(cfg: RunConfig) -> Layout:
    """Ranks first, then engines; colocated engines start again at slot 0."""
    cluster = cfg.cluster
    num_ranks = cluster.actor_num_gpus if cfg.starts_trainer else 0
    num_engines = cluster.num_engines if cfg.starts_engine_processes else 0
    width = cluster.rollout_num_gpus_per_engine
    first = 0 if cluster.colocate else num_ranks
    engines = tuple(
        EnginePlace(index=i, slots=tuple(range(first + i * width, first + (i + 1) * width))) for i in range(num_engines)
    )
    last_engine_slot = engines[-1].slots[-1] + 1 if engines else 0
    slots_per_node = cluster.actor_num_gpus_per_node if cluster.actor_num_nodes > 1 else cluster.num_gpus_per_node
    return Layout(
        num_slots=max(num_ranks, last_engine_slot),
        slots_per_node=slots_per_node,
        rank_slots=tuple(range(num_ranks)),
        engines=engines,
    )
