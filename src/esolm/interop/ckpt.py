"""Read a PyTorch .ckpt file as data: tensors and plain containers. Nothing in it is imported or executed.

`torch.save` writes a zip file with one pickle and the bytes of its tensors. A pickle is a program. This unpickler maps
each name in it to one of the few constructors below, and every other name to an inert class that stores its arguments.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip
_BROKEN = "it is damaged or not a checkpoint of torch.save"


class Inert:
    """Stands for an object of an unknown class: its name and the arguments it was built with."""

    module = name = ""
    given: tuple[Any, ...]
    state: Any
    items: dict[Any, Any]
    elements: list[Any]

    def __new__(cls, *given: Any, **named: Any) -> Inert:
        self = object.__new__(cls)
        self.__dict__.update(given=given, state=None, items={}, elements=[])
        return self

    def __init__(self, *given: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__["items"][key] = value

    def append(self, value: Any) -> None:
        """Called for objects that are pickled as lists."""
        self.__dict__["elements"].append(value)

    def extend(self, values: list[Any]) -> None:
        """Called for objects that are pickled as lists."""
        self.__dict__["elements"].extend(values)


class _Constructor:
    """A function that a pickle may call and cannot change."""

    __slots__ = ("make",)

    def __init__(self, make: Any) -> None:
        self.make = make

    def __call__(self, *given: Any) -> Any:
        return self.make(*given)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it tries to change a constructor")


@dataclass(frozen=True)
class Storage:
    """The record of a tensor's bytes."""

    dtype: torch.dtype
    record: str
    elements: int


@dataclass(frozen=True)
class Stored:
    """A tensor that was not loaded yet."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *more: Any) -> Stored:
    numbers = (offset, *shape, *stride)
    if not isinstance(storage, Storage) or len(shape) != len(stride):
        raise pickle.UnpicklingError("a tensor has no storage")
    if not all(type(n) is int and n >= 0 for n in numbers) or math.prod(shape) > storage.elements:
        raise pickle.UnpicklingError("the shape of a tensor is not that of its storage")
    return Stored(storage, offset, tuple(shape), tuple(stride))


CONSTRUCTORS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _Constructor(lambda *pairs: OrderedDict(*pairs)),
    ("_codecs", "encode"): _Constructor(lambda text, code="latin1": text.encode("latin1")),  # bytes, in protocol 2
    ("torch._utils", "_rebuild_tensor"): _Constructor(_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): _Constructor(_tensor),
    ("torch._utils", "_rebuild_parameter"): _Constructor(lambda tensor, *more: tensor),
    ("torch", "Size"): _Constructor(lambda *sizes: tuple(*sizes)),
}


class _Reader(pickle.Unpickler):
    """An unpickler that imports nothing."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self.classes: dict[tuple[str, str], type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in CONSTRUCTORS:
            return CONSTRUCTORS[module, name]
        made = self.classes.get((module, name)) or type("Inert", (Inert,), {"module": module, "name": name})
        return self.classes.setdefault((module, name), made)

    def persistent_load(self, reference: Any) -> Storage:
        kind, cls, record, _, elements = reference
        name = cls.name if isinstance(cls, type) and issubclass(cls, Inert) else ""
        wrong = kind != "storage" or name not in DTYPES or type(elements) is not int
        if wrong or not re.fullmatch(r"\d+", str(record)):
            raise pickle.UnpicklingError(f"a storage of type {name or cls!r} is not one of {', '.join(DTYPES)}")
        return Storage(DTYPES[name], str(record), elements)


class Checkpoint:
    """An open .ckpt file: its tree of plain values, and its tensors one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.file = zipfile.ZipFile(path)
            (pickled,) = (name for name in self.file.namelist() if re.fullmatch(r"[^/]+/data\.pkl", name))
            self.folder = pickled.removesuffix("data.pkl")
            order = f"{self.folder}byteorder"
            if order in self.file.namelist() and self.file.read(order) != b"little":
                raise ValueError("it was saved on a big-endian machine: save it again on a little-endian one")
            # torch.save never compresses, and a small file could expand without limit.
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in self.file.infolist()):
                raise ValueError("it is compressed")
            tree = _Reader(self.file.read(pickled)).load()
        except zipfile.BadZipFile as error:
            raise ValueError(f"{path} cannot be read: {_BROKEN}, or it was saved before PyTorch 1.6") from error
        except ValueError as error:
            raise ValueError(f"{path} cannot be read: {error}; {_BROKEN}") from error
        except Exception as error:  # a damaged pickle can raise anything
            raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}; {_BROKEN}") from error
        if not isinstance(tree, Mapping):
            raise ValueError(f"{path} holds {type(tree).__name__} instead of a dictionary: {_BROKEN}")
        self.tree: Mapping[str, Any] = tree

    def load(self, stored: Stored) -> Tensor:
        """Load one tensor."""
        storage = stored.storage
        name = f"{self.folder}data/{storage.record}"
        size = storage.elements * storage.dtype.itemsize
        try:
            if self.file.getinfo(name).file_size != size:
                raise ValueError(f"{name} does not have {size} bytes")
            flat = torch.frombuffer(bytearray(self.file.read(name)), dtype=storage.dtype) if size else torch.empty(0)
            return torch.as_strided(flat, stored.shape, stored.stride, stored.offset).contiguous()
        except (KeyError, ValueError, RuntimeError, zipfile.BadZipFile, EOFError) as error:
            raise ValueError(f"{self.path} cannot be read: {str(error).splitlines()[0]}; {_BROKEN}") from error


def plain(value: Any) -> Any:
    """The tree of dicts, lists and scalars in omegaconf's containers.

    Other objects become None; interpolations stay strings.
    """
    return _plain(value, {}, 0)


def _plain(value: Any, done: dict[int, Any], depth: int) -> Any:
    if isinstance(value, (str, int, float, bytes)) or value is None or depth > 64:
        return None if depth > 64 else value
    if id(value) in done:  # shared parts are read once, so that a small file cannot expand into a huge tree
        return done[id(value)]
    done[id(value)], inner = None, value
    if isinstance(value, Inert):
        state = value.state if isinstance(value.state, Mapping) else {}
        keys = [key for key in ("_content", "_val") if key in state]  # omegaconf's containers and leaves
        inner = state[keys[0]] if keys else value.items or value.elements
    if inner is not value and not isinstance(inner, (dict, list)):
        found = _plain(inner, done, depth + 1)
    elif isinstance(inner, Mapping):
        found = {str(key): _plain(entry, done, depth + 1) for key, entry in inner.items()}
    else:
        found = [_plain(entry, done, depth + 1) for entry in inner] if isinstance(inner, (list, tuple)) else None
    done[id(value)] = found
    return found
