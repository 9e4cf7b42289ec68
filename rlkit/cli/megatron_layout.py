"""Who works with whom under `--train-backend megatron`: the ranks of every group, and the layers of every stage. Pure;
the dry run prints it.

Ranks are numbered as Megatron-Core numbers them (`parallel_state.initialize_model_parallel`, order tp-cp-ep-dp-pp):
tensor parallelism innermost, then context, data, and pipeline stages outermost. Experts cut the same ranks of a stage
in another way: expert-tensor innermost, then expert, then expert-data.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlkit.config.schema import RunConfig
from rlkit.config.wording import count

MAX_GROUPS_SHOWN = 3

Group = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronLayout:
    """Sizes of all axes."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int
    expert_data: int
    layers: tuple[int, ...]
    """Of each pipeline stage."""

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.context * self.data * self.pipeline

    def groups(self) -> dict[str, list[Group]]:
        """Groups by axis; each axis' groups hold every rank once."""
        dense = (self.tensor, self.context, self.data, self.pipeline)
        sparse = (self.expert_tensor, self.expert, self.expert_data, self.pipeline)
        found = {
            "tensor": groups_along(dense, 0),
            "context": groups_along(dense, 1),
            "data": groups_along(dense, 2),
            "pipeline": groups_along(dense, 3),
        }
        if self.expert > 1 or self.expert_tensor != self.tensor:
            found["expert tensor"] = groups_along(sparse, 0)
            found["expert"] = groups_along(sparse, 1)
            found["expert data"] = groups_along(sparse, 2)
        return found


def megatron_layout(cfg: RunConfig, num_layers: int) -> MegatronLayout:
    """Of a configuration whose layout is possible (`config/rules/megatron_model.py`)."""
    sizes, cp = cfg.megatron, cfg.train.context_parallel_size
    tensor, pipeline = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size
    expert, expert_tensor = sizes.expert_model_parallel_size, sizes.expert_tensor_size
    per_stage = cfg.cluster.actor_num_gpus // pipeline
    return MegatronLayout(
        tensor=tensor,
        context=cp,
        data=per_stage // (tensor * cp),
        pipeline=pipeline,
        expert_tensor=expert_tensor,
        expert=expert,
        expert_data=per_stage // (expert * expert_tensor),
        layers=stage_layers(
            num_layers,
            pipeline,
            first=sizes.decoder_first_pipeline_num_layers,
            last=sizes.decoder_last_pipeline_num_layers,
        ),
    )


def stage_layers(num_layers: int, stages: int, *, first: int | None, last: int | None) -> tuple[int, ...]:
    """Layers of each stage: `first` and `last` where given, the others alike."""
    ends = [size for size in (first, last) if size is not None]
    middle = stages - len(ends)
    each = (num_layers - sum(ends)) // middle if middle else 0
    sizes = ([] if first is None else [first]) + [each] * middle + ([] if last is None else [last])
    assert sum(sizes) == num_layers, "a rule refuses it"
    return tuple(sizes)


def groups_along(sizes: Sequence[int], axis: int) -> list[Group]:
    """All groups along one axis of ranks that are numbered with the first axis innermost, in the order of their first
    rank."""
    stride = 1
    for size in sizes[:axis]:
        stride *= size
    total = stride * sizes[axis]
    for size in sizes[axis + 1 :]:
        total *= size
    span = stride * sizes[axis]
    return [
        tuple(range(outer + inner, outer + inner + span, stride))
        for outer in range(0, total, span)
        for inner in range(stride)
    ]


def layout_lines(layout: MegatronLayout) -> Iterator[str]:
    """One line an axis, then the stages."""
    for axis, groups in layout.groups().items():
        shown = [*groups[:MAX_GROUPS_SHOWN], *groups[MAX_GROUPS_SHOWN:][-1:]]
        words = [written(group) for group in shown]
        if len(groups) > len(shown):
            words.insert(MAX_GROUPS_SHOWN, "...")
        yield f"  {axis:<14}{count(len(groups), 'group')} of {len(groups[0])}: {', '.join(words)}"
    first = 0
    for stage, size in enumerate(layout.layers):
        ranks = layout.num_ranks // layout.pipeline
        also = " and the embedding" * (stage == 0) + " and the head" * (stage == layout.pipeline - 1)
        yield (
            f"  stage {stage:<8}{count(size, 'layer')} ({first} to {first + size - 1}){also},"
            f" ranks {stage * ranks} to {(stage + 1) * ranks - 1}"
        )
        first += size


def written(group: Group) -> str:
    """`0-7`, `0-24 by 8`, `5`."""
    if len(group) == 1:
        return str(group[0])
    step = group[1] - group[0]
    return f"{group[0]}-{group[-1]}" + (f" by {step}" if step > 1 else "")
