"""A Hugging Face checkpoint -> a trainer's checkpoint in torch's distributed format, by any number of processes on any
number of nodes:

    python tools/convert_hf_to_torch_dist.py --hf-checkpoint /models/DeepSeek-R1 --save /ckpt/deepseek-r1
    torchrun --nnodes 4 --nproc-per-node 8 ... tools/convert_hf_to_torch_dist.py --hf-checkpoint ... --save ...

A run does not need it: both backends read Hugging Face checkpoints themselves. It is for a file system on which many
ranks read one file each faster than all of them a few: start with `--load /ckpt/deepseek-r1 --finetune` and any layout
of any backend. Tensors keep their Hugging Face names and dtypes; fp8 in blocks becomes bfloat16. A process holds one
tensor at a time. The result has a manifest with digests (`rlkit ckpt verify`), and appears when it is complete.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_files import DTYPES, ConversionError, Place, read_places, run_tool
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from rlkit.backends.fsdp.stored import SHARDS
from rlkit.backends.loading import CheckpointReader
from rlkit.config.errors import ConfigError
from rlkit.config.quantization import SCALE_SUFFIX, read_quantization
from rlkit.orchestration.checkpoints import CheckpointMeta, commit, staging_dir
from rlkit.types.errors import CheckpointError
from rlkit.types.fingerprints import WEIGHTS

STEP = 0
FORMAT = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-checkpoint", type=Path, required=True, metavar="FOLDER")
    parser.add_argument(
        "--save", type=Path, required=True, metavar="FOLDER", help="folder of checkpoints to write into"
    )
    args = parser.parse_args()
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks > 1:
        dist.init_process_group("gloo")
    try:
        convert(args.hf_checkpoint, args.save, rank=rank, num_ranks=num_ranks)
    finally:
        if num_ranks > 1:
            dist.destroy_process_group()


def convert(source: Path, target: Path, *, rank: int = 0, num_ranks: int = 1) -> None:
    """Write `target/iter_0000000`. Collective over the processes."""
    read_quantization(str(source))  # refuses what is quantised in another way
    places = {name: place for name, place in read_places(source).items() if not name.endswith(SCALE_SUFFIX)}
    final = target / f"iter_{STEP:07d}"
    if final.exists():
        raise ConversionError(f"{final} is there already; choose another --save or remove it")
    staging = target / f".iter_{STEP:07d}.tmp"
    if rank == 0:
        staging_dir(target, STEP)
    _wait_for_all(num_ranks)
    mine = dealt(list(places.values()), num_ranks)[rank]
    planner = _LazyTensors(CheckpointReader(source), mine)
    directory = staging / "trainer"
    directory.mkdir(exist_ok=True)
    writer = FileSystemWriter(directory / SHARDS, sync_files=True)
    save({}, storage_writer=writer, planner=planner, no_dist=num_ranks == 1)
    _wait_for_all(num_ranks)
    if rank == 0:
        meta = {"step": STEP, "optimizer_steps": 0, "world_size": num_ranks, "format": FORMAT}
        (directory / "trainer.json").write_text(json.dumps(meta, indent=2))
        commit(staging, CheckpointMeta(step=STEP, weight_version=STEP + 1, world_size=num_ranks), {})
        num_bytes = sum(place.num_bytes for place in places.values())
        print(f"{len(places)} tensors, {num_bytes / 1e9:.3f} GB in the source, into {final}", file=sys.stderr)
    _wait_for_all(num_ranks)


def dealt(places: Sequence[Place], num_ranks: int) -> list[list[Place]]:
    """The tensors of each process: the largest first, each to whoever has the fewest bytes."""
    shares: list[list[Place]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for place in sorted(places, key=lambda place: (-place.num_bytes, place.name)):
        rank = loads.index(min(loads))
        shares[rank].append(place)
        loads[rank] += place.num_bytes
    return shares


class _LazyTensors(DefaultSavePlanner):
    """Plans from shapes and reads each tensor when it is written."""

    def __init__(self, reader: CheckpointReader, places: Sequence[Place]) -> None:
        super().__init__(flatten_state_dict=False)
        self._reader = reader
        self._places = {f"{WEIGHTS}{place.name}": place for place in places}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([self._item(name, place) for name, place in self._places.items()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        place = self._places[write_item.index.fqn]
        rows = place.shape[0] if place.shape else 1
        return self._reader.read_rows(place.name, place.shape, 0, rows).to(self._dtype(place)).contiguous()

    def _item(self, name: str, place: Place) -> WriteItem:
        if place.dtype not in DTYPES:
            raise ConversionError(f"{place.name} is stored as {place.dtype}, which no backend trains")
        offsets, shape = torch.Size([0] * len(place.shape)), torch.Size(place.shape)
        return WriteItem(
            index=MetadataIndex(name, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offsets, sizes=shape),
                properties=TensorProperties(dtype=self._dtype(place)),
                size=shape,
            ),
        )

    def _dtype(self, place: Place) -> torch.dtype:
        return self._reader.dtype(place.name)


def _wait_for_all(num_ranks: int) -> None:
    if num_ranks > 1:
        dist.barrier()


if __name__ == "__main__":
    run_tool(main, ConfigError, CheckpointError)
