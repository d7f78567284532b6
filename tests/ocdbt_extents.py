"""Where the values of an OCDBT store lie, as TensorStore reads its index."""

import os

import tensorstore as ts


def read(directory):
    """By key, the file of a value, its first byte there and its size."""
    path = os.path.abspath(directory) + "/"
    base = ts.KvStore.open({"driver": "file", "path": path}).result()
    versions = ts.ocdbt.dump(base).result()["versions"]
    values = {}
    pending = [("", versions[-1]["root"]["location"])]
    while pending:
        prefix, location = pending.pop()
        node = ts.ocdbt.dump(base, location).result()
        for entry in node["entries"]:
            key = prefix + entry["key"].decode()
            if "location" in entry:
                common = entry["subtree_common_prefix"].decode()
                pending.append((prefix + common, entry["location"]))
            elif "indirect_value" in entry:
                # Such as `value::d/0123:16:4`.
                _, above, name, *numbers = entry["indirect_value"].split(":")
                values[key] = above + name, *map(int, numbers)
    return values
