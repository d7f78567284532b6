"""PyTorch's distributed checkpoints, made without torch; each part can be wrong."""

import dataclasses
import io

from tests.universal.formats import torch_files
from tests.universal.formats.torch_files import Global, Named, Object

MODULE = "torch.distributed.checkpoint.metadata"
TENSOR = torch_files.tensor()
STORAGE = "torch.distributed.checkpoint.filesystem", "_StorageInfo"
FILE = "__0_0.distcp"


def size(dims):
    return Named("torch", "Size", tuple(dims))


def item(value=TENSOR, content=None):
    """The bytes of an item: a file of torch.save with a tensor of 2 x 2 floats."""
    file = io.BytesIO()
    torch_files.write(file, value, content=content)
    return file.getvalue()


def entry(shape, chunks):
    """The metadata of a tensor; `chunks` are pairs of offsets and sizes."""
    properties = (
        Global("torch", "float32"),
        Named("torch.serialization", "_get_layout", "torch.strided"),
        False,
        Named(MODULE, "_MEM_FORMAT_ENCODING", 0),
        False,
    )
    parts = [
        {"offsets": size(offsets), "sizes": size(sizes)} for offsets, sizes in chunks
    ]
    state = {
        "properties": Object(MODULE, "TensorProperties", properties),
        "size": size(shape),
        "chunks": [Object(MODULE, "ChunkStorageMetadata", part) for part in parts],
    }
    return Object(MODULE, "TensorStorageMetadata", state)


@dataclasses.dataclass
class Parts:
    """The parts of a checkpoint that has `w`, 4 x 2 floats, in two items."""

    entries: dict
    stored: list
    items: list
    paths: dict = dataclasses.field(default_factory=dict)

    def write(self, directory, content=None):
        """Writes the files into a new directory."""
        directory.mkdir()
        (directory / FILE).write_bytes(b"".join(self.items))
        data = {}
        for (name, first), (file, start, length) in self.stored:
            state = {"fqn": name, "index": 0}
            state |= {} if first is None else {"offset": size(first)}
            info = {"relative_path": file, "offset": start, "length": length}
            data[Object(MODULE, "MetadataIndex", state)] = Object(*STORAGE, info)
        state = {"state_dict_metadata": self.entries, "storage_data": data}
        state["planner_data"] = self.paths
        made = torch_files.pickled(Object(MODULE, "Metadata", state))
        (directory / ".metadata").write_bytes(made if content is None else content)
        return directory


def parts(second=None):
    """Good parts, but for the second item."""
    items = [item(), second or item()]
    sizes = [len(each) for each in items]
    first, last = (("w", (0, 0)), (FILE, 0, sizes[0])), (("w", (2, 0)), (FILE, *sizes))
    chunks = [((0, 0), (2, 2)), ((2, 0), (2, 2))]
    return Parts(
        entries={"w": entry((4, 2), chunks)}, stored=[first, last], items=items
    )
