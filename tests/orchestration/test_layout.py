"""The layout as a table: flags in, slots out."""

from dataclasses import replace

import pytest

from rlkit.config.schema import ClusterConfig, DebugConfig, EngineConfig, RunConfig
from rlkit.orchestration.cluster import order_slots
from rlkit.orchestration.engine_servers import slots_by_node
from rlkit.orchestration.layout import plan_layout
from rlkit.types.errors import PlacementError


def config(debug: DebugConfig | None = None, **cluster) -> RunConfig:
    return replace(RunConfig(), cluster=ClusterConfig(**cluster), debug=debug or DebugConfig())


@pytest.mark.parametrize(
    "cluster, ranks, engines",
    [
        ({"actor_num_gpus_per_node": 1, "colocate": True}, (0,), [(0,)]),
        ({"actor_num_gpus_per_node": 2, "colocate": True}, (0, 1), [(0,), (1,)]),
        ({"actor_num_gpus_per_node": 2, "colocate": True, "rollout_num_gpus": 1}, (0, 1), [(0,)]),
        ({"actor_num_gpus_per_node": 2, "colocate": True, "rollout_num_gpus_per_engine": 2}, (0, 1), [(0, 1)]),
        ({"actor_num_gpus_per_node": 1, "rollout_num_gpus": 1}, (0,), [(1,)]),
        ({"actor_num_gpus_per_node": 2, "rollout_num_gpus": 2}, (0, 1), [(2,), (3,)]),
        ({"actor_num_gpus_per_node": 1, "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2},
         (0,), [(1, 2), (3, 4)]),
        ({"actor_num_gpus_per_node": 8, "actor_num_nodes": 2, "colocate": True, "rollout_num_gpus_per_engine": 8},
         tuple(range(16)), [tuple(range(8)), tuple(range(8, 16))]),
    ],
    ids=["one of each", "two of each", "one engine on two ranks", "TP-2 over both", "split", "split 2+2", "split TP-2",
         "two nodes"],
)  # fmt: skip
def test_layout(cluster, ranks, engines):
    layout = plan_layout(config(**cluster))
    assert layout.rank_slots == ranks
    assert [engine.slots for engine in layout.engines] == engines
    assert layout.num_slots == max([*ranks, *[slot for slots in engines for slot in slots]]) + 1


def test_half_runs_ask_for_their_half():
    train_only = plan_layout(config(DebugConfig(debug_train_only=True), actor_num_gpus_per_node=2, rollout_num_gpus=2))
    assert (train_only.num_slots, train_only.engines) == (2, ())
    rollout_only = plan_layout(
        config(DebugConfig(debug_rollout_only=True), actor_num_gpus_per_node=2, rollout_num_gpus=2)
    )
    assert (rollout_only.num_slots, rollout_only.rank_slots) == (2, ())
    assert [engine.slots for engine in rollout_only.engines] == [(0,), (1,)]


def test_colocated_ranks():
    layout = plan_layout(config(actor_num_gpus_per_node=4, colocate=True, rollout_num_gpus_per_engine=2))
    assert [layout.colocated_ranks(engine) for engine in layout.engines] == [(0, 1), (2, 3)]
    split = plan_layout(config(actor_num_gpus_per_node=1, rollout_num_gpus=1))
    assert split.colocated_ranks(split.engines[0]) == ()


def test_slots_are_ordered_by_node_and_gpu():
    slots = order_slots([("b", "10.0.0.10", 1), ("a", "10.0.0.9", 1), ("b", "10.0.0.10", 0), ("a", "10.0.0.9", 0)])
    assert [(slot.node_ip, slot.gpu_id, slot.bundle) for slot in slots] == [
        ("10.0.0.9", 0, 3),
        ("10.0.0.9", 1, 1),
        ("10.0.0.10", 0, 2),
        ("10.0.0.10", 1, 0),
    ]


@pytest.mark.parametrize(
    "slots, parts",
    [((0, 1), [(0, 1)]), (tuple(range(8)), [(0, 1, 2, 3), (4, 5, 6, 7)]), ((4, 5), [(4, 5)])],
    ids=["on one node", "over two", "on the second"],
)
def test_an_engine_has_one_part_on_each_of_its_nodes(slots, parts):
    assert slots_by_node(slots, ["a"] * 4 + ["b"] * 4) == parts


def test_the_parts_of_an_engine_are_equal():
    with pytest.raises(PlacementError, match=r"an engine of 4 GPUs would have 1 \+ 3 of them on its nodes"):
        slots_by_node((3, 4, 5, 6), ["a"] * 4 + ["b"] * 4)


def test_external_engines_take_no_slots():
    cfg = replace(
        config(actor_num_gpus_per_node=2), engine=EngineConfig(rollout_external_engine_addrs=("10.0.0.5:30000",))
    )
    layout = plan_layout(cfg)
    assert (layout.num_slots, layout.engines) == (2, ())


def test_without_gpus_the_position_on_the_node_counts():
    slots = order_slots([("a", "10.0.0.9", -1), ("a", "10.0.0.9", -1), ("b", "10.0.0.10", -1)])
    assert [slot.gpu_id for slot in slots] == [0, 1, 0]
