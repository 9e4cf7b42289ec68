"""Updates through a folder that trainer and engines both see: for engines that share neither device nor network group
with the trainer.

Rank 0 writes `weights_v000007/` as a Hugging Face checkpoint, the engines load it, and it is removed.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file

from rlkit.sync.base import PushReport, push_buckets
from rlkit.sync.engine_calls import EngineCalls
from rlkit.types.ranks import EngineEndpoint, RankInfo
from rlkit.types.weights import WeightBucket, WeightSource


class DiskChannel:
    """One folder a version; removed once every engine has loaded it."""

    def __init__(
        self,
        rank: RankInfo,
        endpoints: Sequence[EngineEndpoint],
        *,
        directory: Path,
        model_dir: Path,
        max_bytes: int,
        timeout_s: float,
        with_checksums: bool,
    ) -> None:
        self._rank = rank
        self._directory = directory
        self._has_made_directory = False
        self._model_dir = model_dir
        self._max_bytes = max_bytes
        self._with_checksums = with_checksums
        self._calls = EngineCalls(endpoints if rank.is_main else [], timeout_s=timeout_s)

    def push(self, source: WeightSource, version: int) -> PushReport:
        target = self._directory / f"weights_v{version:06d}"
        if not self._rank.is_main:
            return push_buckets(
                source, lambda _: None, version=version, max_bytes=self._max_bytes, with_checksums=False
            )
        shutil.rmtree(target, ignore_errors=True)
        if not self._directory.exists():
            self._directory.mkdir(parents=True)
            self._has_made_directory = True
        target.mkdir()
        file_of: dict[str, str] = {}

        def write(bucket: WeightBucket) -> None:
            file_name = f"model-{len(list(target.iterdir())):05d}.safetensors"
            tensors = {name: tensor.clone().cpu() for name, tensor in bucket.tensors()}
            save_file(tensors, target / file_name, metadata={"format": "pt"})
            file_of.update(dict.fromkeys(tensors, file_name))

        report = push_buckets(
            source, write, version=version, max_bytes=self._max_bytes, with_checksums=self._with_checksums
        )
        self._publish(target, file_of, report)
        return report

    def _publish(self, target: Path, file_of: dict[str, str], report: PushReport) -> None:
        index = {"metadata": {"total_size": report.num_bytes}, "weight_map": file_of}
        (target / "model.safetensors.index.json").write_text(json.dumps(index))
        for asset in self._model_dir.glob("*.json"):
            if not asset.name.endswith(".index.json"):
                shutil.copy(asset, target / asset.name)
        self._calls.all(lambda client, _: client.update_from_disk(path=str(target), version=report.version))
        shutil.rmtree(target)

    def close(self) -> None:
        if self._has_made_directory and not any(self._directory.iterdir()):
            self._directory.rmdir()
        self._calls.close()
