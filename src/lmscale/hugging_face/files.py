"""The weight files of a Hugging Face model: one or several, read tensor by tensor and written as a stream."""

import json
import re
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.errors import CheckpointError
from ..checkpoint.find import PUBLISHED_WEIGHTS
from ..checkpoint.tensor_file import TensorFileReader, TensorFileWriter, num_bytes
from ..models.hugging_face import HuggingFaceModel
from .config import hf_model, read_hf_config, type_of_tensors

_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]+\.(safetensors|bin)")


class PickleFile(ExitStack):
    """A `pytorch_model.bin`, read only by torch's restricted unpickler, with `TensorFileReader`'s methods.

    It is mapped, unless it has the format before torch 1.6: such a file is in memory as a whole.

    Raises:
        CheckpointError: it holds anything but tensors in plain containers.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        try:
            self.entries = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except Exception as error:  # a hostile pickle can provoke errors of any kind
            reason = str(error).split("\n")[0].split(". ")[0][:160]
            raise CheckpointError(f"{path.name} is not read: {type(error).__name__}: {reason}") from None
        if not isinstance(self.entries, dict) or not all(isinstance(t, Tensor) for t in self.entries.values()):
            raise CheckpointError(f"{path.name} is not read: it is no dict of tensors")
        self.callback(self.entries.clear)  # lets go of the mapped file

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self.entries[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor."""
        return self.entries[name].dtype

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Rows [first, last) of a tensor, by default all; a part of the mapped file where it is contiguous."""
        return self.entries[name][first:last].contiguous()


class HuggingFaceReader(ExitStack):
    """Tensors of a Hugging Face folder under the names of the model with heads, whichever form the files have.

    It is a context manager, closed at the end.

    Names without the prefix (`bert.`, `transformer.`), LayerNorm's old names and constant buffers of old versions are
    understood. Of two tied tensors the file may have either or both. The tensors tell the model type, which a
    configuration of 2019 lacks. Files are `model.safetensors`, its index and shards, or the same as
    `pytorch_model.bin`.

    Args:
        key: of the folder in the configuration, for messages.
        model: that the folder holds; None: the one of its `model_type`, with heads of pretraining.

    Raises:
        CheckpointError: no such files, an index that contradicts them, two tensors of one name, a type that is not a
            float, a model that is not known here.
    """

    def __init__(self, folder: str | Path, key: str = "source", model: HuggingFaceModel | None = None) -> None:
        super().__init__()
        self.folder = Path(folder)
        values = read_hf_config(self.folder / "config.json")
        self.files: list[TensorFileReader | PickleFile] = []
        self._places: dict[str, tuple[TensorFileReader | PickleFile, str]] = {}
        with ExitStack() as opened:
            for path, expected in self._list_files().items():
                try:
                    reader = TensorFileReader if path.suffix == ".safetensors" else PickleFile
                    file = opened.enter_context(reader(path))
                except CheckpointError as error:
                    raise CheckpointError(f"`{key}` must have weights that can be read, but {error}") from None
                self.files.append(file)
                if not expected <= set(file.entries):
                    raise CheckpointError(
                        f"{path.name} has no tensor {min(expected - set(file.entries))}, but the index says so"
                    )
            if values.get("model_type") is None:
                values["model_type"] = type_of_tensors({name for file in self.files for name in file.entries})
            self.values, self.model = values, model or hf_model(values)
            for file in self.files:
                for name in file.entries:
                    self._add(file, name)
            for alias, name in self.model.aliases.items():
                if alias in self._places and name not in self._places:
                    self._places[name] = self._places.pop(alias)
            self.push(opened.pop_all())

    def _add(self, file: TensorFileReader | PickleFile, name: str) -> None:
        full = self.model.full_name(name)
        if self.model.ignored.fullmatch(full):
            return
        if full in self._places:
            raise CheckpointError(f"{self.folder}: tensor {full} is there twice, as {self._places[full][1]} and {name}")
        if not file.dtype(name).is_floating_point:
            raise CheckpointError(f"{self.folder}: tensor {name} must be of a float type, but is {file.dtype(name)}")
        self._places[full] = file, name

    def _list_files(self) -> dict[Path, set[str]]:
        """The files and the tensors that an index promises in each."""
        for single in PUBLISHED_WEIGHTS:
            index = self.folder / f"{single}.index.json"
            if (self.folder / single).is_file():
                return {self.folder / single: set()}
            if index.is_file():
                return self._read_index(index)
        raise CheckpointError(f"{self.folder} has a config.json but neither model.safetensors nor pytorch_model.bin")

    def _read_index(self, index: Path) -> dict[Path, set[str]]:
        try:
            places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            listed: dict[Path, set[str]] = {}
            for name, file in places.items():
                if not _FILE_NAME.fullmatch(file):
                    raise ValueError(f"file {file!r}")
                listed.setdefault(self.folder / file, set()).add(name)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{index.name} cannot be used ({type(error).__name__}: {error})"[:200]) from None
        for path in listed:
            if not path.is_file():
                raise CheckpointError(f"{self.folder} lacks {path.name}, which its index names")
        return listed

    def names(self) -> set[str]:
        """Full names of all tensors but constant buffers."""
        return set(self._places)

    def name_in_file(self, name: str) -> str:
        """How the file itself calls a tensor."""
        return self._places[name][1]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        file, own = self._places[name]
        return file.shape(own)

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor."""
        file, own = self._places[name]
        return file.dtype(own)

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Rows [first, last) of a tensor, by default all."""
        file, own = self._places[name]
        return file.read(own, first, last)

    def check_aliases(self) -> set[str]:
        """Names that are second copies of another tensor.

        Raises:
            CheckpointError: a copy differs from the tensor it must be tied to.
        """
        present = {alias: name for alias, name in self.model.aliases.items() if {alias, name} <= self.names()}
        for alias, name in present.items():
            if self.shape(alias) != self.shape(name) or not torch.equal(self.read(alias), self.read(name)):
                raise CheckpointError(f"tensor {self.name_in_file(alias)} must equal {self.name_in_file(name)} (tied)")
        return set(present)


def write_hf_files(
    folder: Path,
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    tensors: Iterable[tuple[str, Tensor]],
    max_file_bytes: int,
) -> None:
    """Write `model.safetensors`, or shards and an index; a tensor is never cut.

    Args:
        shapes: name -> (shape, dtype), in the order in which `tensors` come.
        max_file_bytes: limit on the data in a file, unless a single tensor has more.
    """
    sizes = {name: num_bytes(shape, dtype) for name, (shape, dtype) in shapes.items()}
    groups: list[list[str]] = [[]]
    for name, size in sizes.items():
        if groups[-1] and sum(sizes[other] for other in groups[-1]) + size > max_file_bytes:
            groups.append([])
        groups[-1].append(name)
    files = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    if len(groups) == 1:
        files = ["model.safetensors"]
    stream = iter(tensors)
    for file, names in zip(files, groups, strict=True):
        # transformers takes no file without this note of its framework.
        with TensorFileWriter(folder / file, {name: shapes[name] for name in names}, {"format": "pt"}) as writer:
            for _ in names:
                writer.write(*next(stream))
    if len(groups) > 1:
        places = {name: file for file, names in zip(files, groups, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
