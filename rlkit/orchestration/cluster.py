"""Ray: start it or join it, and turn a layout into a placement group whose slots are ordered by node and GPU.

Without CUDA a slot is a unit of the custom resource `rank_slot`; its bundle takes a hundredth of a CPU, because the
cores are shared by hand (`threads_per_slot`) and not by Ray.
"""

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlkit.config.schema import RunConfig
from rlkit.orchestration.layout import Layout
from rlkit.types.errors import PlacementError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
"""Host of every server of a private cluster: nobody joins it, so nothing of it is to be reached from outside."""
SLOT_RESOURCE = "rank_slot"
TRAINER_SHARE = 0.4
ENGINE_SHARE = 0.2
"""Shares of one slot: a trainer and an engine fit on the same one, two trainers do not."""

WORKER_ENV = {
    # Every process sees every GPU under its plain index, so that one index means one device in trainer and engine
    # alike.
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

NOTHING_MORE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One placed slot."""

    bundle: int
    """Index of its bundle in the placement group."""
    node_id: str
    node_ip: str
    gpu_id: int
    """CUDA index on the node; on a CPU the position among the node's slots."""


class SlotProbe:
    """Says where its bundle landed."""

    def where(self) -> tuple[str, str, int]:
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), int(ray.get_gpu_ids()[0])


RemoteSlotProbe: Any = ray.remote(num_cpus=0)(SlotProbe)


class Cluster:
    """A joined or private Ray cluster and the run's placement group in it."""

    def __init__(self, cfg: RunConfig, layout: Layout, *, device: str) -> None:
        self.device = device
        self._owns_ray = not ray.is_initialized()
        self._is_private = cluster_address(cfg) is None
        self._group: PlacementGroup | None = None
        if self._owns_ray:
            start_ray(cfg, layout, device=device)
        try:
            self.slots = self._place(layout, timeout_s=cfg.cluster.placement_timeout_s)
        except BaseException:
            self.close()
            raise

    def _place(self, layout: Layout, *, timeout_s: float) -> list[Slot]:
        if layout.num_slots == 0:
            return []
        resource, cpus = ("GPU", 1.0) if self.device == "cuda" else (SLOT_RESOURCE, 0.01)
        bundle = {resource: 1.0, "CPU": cpus}
        available = int(ray.cluster_resources().get(resource, 0))
        if available < layout.num_slots and self._is_private:
            # A private cluster never grows; a shared one may.
            raise PlacementError(shortage(layout, available, resource))
        self._group = placement_group([bundle] * layout.num_slots, strategy="PACK")
        self._wait(self._group, layout, resource, timeout_s)
        slots = order_slots(self._gpu_places(layout) if self.device == "cuda" else node_places(self._group))
        return [replace(slot, node_ip=LOOPBACK) for slot in slots] if self._is_private else slots

    def _gpu_places(self, layout: Layout) -> list[tuple[str, str, int]]:
        """Only a process inside a bundle learns which GPU the bundle has."""
        probes = [
            RemoteSlotProbe.options(num_gpus=0.01, scheduling_strategy=self._in_bundle(index)).remote()
            for index in range(layout.num_slots)
        ]
        places = ray.get([probe.where.remote() for probe in probes])
        for probe in probes:
            ray.kill(probe)
        return places

    def _wait(self, group: PlacementGroup, layout: Layout, resource: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not group.wait(timeout_seconds=10):
            available = int(ray.cluster_resources().get(resource, 0))
            message = shortage(layout, available, resource)
            if time.monotonic() > deadline:
                raise PlacementError(f"{message}; gave up after {timeout_s:.0f} s (--placement-timeout-s)")
            logger.warning("%s; waiting", message)

    def _in_bundle(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        assert self._group is not None
        return PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=bundle)

    def actor_options(
        self, slot: int, *, share: float, num_threads: int, env_vars: Mapping[str, str] = NOTHING_MORE
    ) -> dict[str, Any]:
        """Ray options of an actor on `slot` that takes `share` of it; `env_vars` win over ours."""
        threads = {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
        if self.device == "cpu":
            # Threads that spin while they wait take the cores from engine, graders and router: 1.5 x on a busy machine.
            threads["OMP_WAIT_POLICY"] = "passive"
        options: dict[str, Any] = {
            "num_cpus": 0,
            "scheduling_strategy": self._in_bundle(self.slots[slot].bundle),
            "runtime_env": {"env_vars": {**WORKER_ENV, **threads, **env_vars}},
        }
        if self.device == "cuda":
            options["num_gpus"] = share
        else:
            options["resources"] = {SLOT_RESOURCE: share}
        return options

    def threads_per_slot(self, slots_in_use: int) -> int:
        """Intra-op threads of each of `slots_in_use` processes that compute at the same time on this machine."""
        return max(1, len(os.sched_getaffinity(0)) // max(1, slots_in_use))

    def driver_address(self) -> str:
        """Address of this process's node, as the others reach it."""
        if self._is_private:
            return LOOPBACK
        here = ray.get_runtime_context().get_node_id()
        return next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here)

    def close(self) -> None:
        if self._group is not None and ray.is_initialized():
            remove_placement_group(self._group)
        if self._owns_ray:
            ray.shutdown()


def start_ray(cfg: RunConfig, layout: Layout, *, device: str) -> None:
    """Join `--ray-address`, or start a private cluster on this machine that ends with this process."""
    common = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = cluster_address(cfg)
    if address is not None:
        ray.init(address=address, **common)
        return
    # Ray runs its workers at nice 15: on a shared machine anything else would push the whole run aside.
    os.environ.setdefault("RAY_worker_niceness", "0")
    resources = {} if device == "cuda" else {SLOT_RESOURCE: float(max(1, layout.num_slots))}
    ray.init(include_dashboard=False, resources=resources, **common)


def cluster_address(cfg: RunConfig) -> str | None:
    """Address of the Ray cluster to join; None starts a private one. `ray job submit` sets RAY_ADDRESS."""
    return cfg.cluster.ray_address or os.environ.get("RAY_ADDRESS") or None


def node_places(group: PlacementGroup) -> list[tuple[str, str, int]]:
    """(node id, node address, -1) of each bundle."""
    address_of = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    node_of = placement_group_table(group)["bundles_to_node_id"]
    return [(node_of[bundle], address_of[node_of[bundle]], -1) for bundle in range(group.bundle_count)]


def order_slots(places: list[tuple[str, str, int]]) -> list[Slot]:
    """Slots by (node, GPU), so that neighbouring ranks are neighbours on the machine."""
    ordered = sorted(range(len(places)), key=lambda bundle: (ip_key(places[bundle][1]), places[bundle][2], bundle))
    slots, seen = [], dict[str, int]()
    for bundle in ordered:
        node_id, node_ip, gpu = places[bundle]
        position = seen.get(node_id, 0)
        seen[node_id] = position + 1
        slots.append(Slot(bundle=bundle, node_id=node_id, node_ip=node_ip, gpu_id=gpu if gpu >= 0 else position))
    return slots


def ip_key(address: str) -> tuple[int, ...] | tuple[str]:
    parts = address.split(".")
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else (address,)


def shortage(layout: Layout, available: int, resource: str) -> str:
    """What was asked and what is there."""
    what = "GPUs" if resource == "GPU" else "rank slots"
    ranks, engines = len(layout.rank_slots), len(layout.engines)
    return (
        f"the run needs {layout.num_slots} {what} ({ranks} training ranks, {engines} engines), the cluster has "
        f"{available}; lower --actor-num-gpus-per-node, --actor-num-nodes or --rollout-num-gpus, or add nodes"
    )
