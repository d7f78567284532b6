"""Zips as torch.save writes them, made without torch; each part can be wrong."""

import io
import os
import pickle
import struct
import zipfile
from typing import ClassVar

import numpy as np


class _Parts:
    def __init__(self, *parts):
        self.parts = parts


class Named(_Parts):
    """Pickles as a call of a name (module, name) with arguments, whatever it is."""


class Id(_Parts):
    """Pickles as a persistent id."""


class Global(_Parts):
    """Pickles as a name: its module and itself."""


class Object(_Parts):
    """Pickles as an object of a class (module, name) with a state."""


class Attack:
    """Runs a command when Python unpickles it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


class _Pickler(pickle._Pickler):
    # The pickler in Python: names need not exist. Arrays become tensors.
    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def __init__(self, file, entries):
        super().__init__(file, protocol=2)
        self.entries = entries

    def save_named(self, value):
        module, name, *arguments = value.parts
        self.save(Global(module, name))
        self.save(tuple(arguments))
        self.write(pickle.REDUCE)

    def save_global_name(self, value):
        module, name = value.parts
        self.write(b"c" + module.encode() + b"\n" + name.encode() + b"\n")

    def save_object(self, value):
        module, name, state = value.parts
        self.save(Global(module, name))
        self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        self.save(state)
        self.write(pickle.BUILD)

    def persistent_id(self, obj):
        return obj.parts if isinstance(obj, Id) else None

    def save_array(self, array):
        key, size = f"a{len(self.entries)}", array.dtype.itemsize
        self.entries[f"data/{key}"] = array.tobytes()
        kind = {2: "BFloat16Storage", 4: "FloatStorage"}[size]
        strides = tuple(stride // size for stride in array.strides)
        place = {"kind": kind, "key": key, "elements": array.size}
        self.save(tensor(array.shape, strides, **place))

    dispatch[np.ndarray] = save_array
    dispatch[Named] = save_named
    dispatch[Global] = save_global_name
    dispatch[Object] = save_object


def pickled(value, entries=None):
    """The pickle of a value; the bytes of its arrays are added to `entries`."""
    file = io.BytesIO()
    _Pickler(file, {} if entries is None else entries).dump(value)
    return file.getvalue()


def storage(key="0", elements=4, kind="FloatStorage"):
    return Id("storage", Global("torch", kind), key, "cpu", elements)


def tensor(shape=(2, 2), strides=(2, 1), offset=0, **parts):
    hooks = Named("collections", "OrderedDict")
    arguments = storage(**parts), offset, shape, strides, False, hooks
    return Named("torch._utils", "_rebuild_tensor_v2", *arguments)


def lazy(value, *bits):
    """A tensor with these bits, `conj` or `neg`."""
    return Named(*value.parts, dict.fromkeys(bits, True))


def with_attributes(value):
    """A tensor with attributes, made by what `value` is made by."""
    maker, name, *arguments = value.parts
    parts = Global(maker, name), Global("torch", "Tensor"), tuple(arguments)
    return Named("torch._tensor", "_rebuild_from_type_v2", *parts, {"ds_id": 1})


def write(path, value, *, entries=None, compression=zipfile.ZIP_STORED, content=None):
    """A file of torch.save that holds `value`, and 4 floats as the storage 0.

    NumPy's arrays in the value are tensors there.
    """
    if entries is None:
        entries = {"data/0": struct.pack("<4f", 1, 2, 3, 4)}
    held = dict(entries)
    content = content or pickled(value, held)
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/byteorder", "little")
        for name, values in held.items():
            archive.writestr(f"archive/{name}", values)
        archive.writestr("archive/version", "3\n")
    return path
