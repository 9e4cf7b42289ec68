"""Reads torch's distributed checkpoints without running what their pickled index may ask for.

`FileSystemReader` loads the file `.metadata` by pickle: a folder from somebody else could run anything. Here only the
classes are let in that such an index consists of; tensors themselves are read with `weights_only`.
"""

import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from rlkit.types.errors import CheckpointError

_DATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},  # Python 3.13
    "collections": {"OrderedDict"},
}


class _IndexUnpickler(pickle.Unpickler):
    """Builds what an index consists of and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _DATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in the index of a checkpoint")


class ShardedFiles(FileSystemReader):
    """The files of one checkpoint, for `torch.distributed.checkpoint.load(..., storage_reader=...)`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """CheckpointError for an index that is damaged or wants more than data."""
        path = self._get_metadata_path(kwargs.get("rank"))
        try:
            with self.fs.create_stream(path, "rb") as file:
                metadata = _IndexUnpickler(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, IndexError) as error:
            raise CheckpointError(f"{path} is not the index of a checkpoint: {error}") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path} holds a {type(metadata).__name__}, not the index of a checkpoint")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
