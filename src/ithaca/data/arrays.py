"""Token ids in .npy files, read a piece at a time.

The header says how many numbers follow, and is believed only if the file has that many. Numbers are read, not mapped: of a file
that is cut short meanwhile, a map would end the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from .find import offsets_of
from .record import first_line
from .stamps import Stamp, changed, open_steady

_CHUNK = 1 << 18  # tokens


def read_arrays(path: str, stamp: Stamp | None = None) -> Iterator[tuple[Iterator[np.ndarray], int]]:
    """Documents of a .npy file: each its ids in pieces, and its number."""
    with open_steady(path, stamp) as file:
        shape, fortran, dtype, start = _header(path, file)
        count = int(np.prod(shape, dtype=object))

        def ids(first: int, stop: int) -> np.ndarray:
            file.seek(start + first * dtype.itemsize)
            array = np.frombuffer(file.read((stop - first) * dtype.itemsize), dtype)
            if len(array) != stop - first:
                raise changed(path, "it was cut short")
            return array

        if len(shape) == 2:
            whole = (
                ids(0, count).reshape(shape, order="F") if fortran else None
            )  # stored by columns: no row lies together
            for number in range(shape[0]):
                if whole is not None:
                    yield iter([np.ascontiguousarray(whole[number])]), number
                else:
                    yield _pieces(ids, number * shape[1], (number + 1) * shape[1]), number
            return
        bounds = _bounds(path, count)
        for number in range(len(bounds) - 1):
            yield _pieces(ids, int(bounds[number]), int(bounds[number + 1])), number


def _pieces(ids: Callable[[int, int], np.ndarray], start: int, stop: int) -> Iterator[np.ndarray]:
    return (ids(at, min(at + _CHUNK, stop)) for at in range(start, stop, _CHUNK))


def _bounds(path: str, count: int) -> np.ndarray:
    """Where documents begin and end."""
    beside = str(offsets_of(Path(path)))
    if not os.path.exists(beside):
        return np.array([0, count])
    with open_steady(beside, None) as file:
        shape, _, dtype, _ = _header(beside, file)
        bounds = np.frombuffer(file.read(), dtype)
    if (
        len(shape) == 1
        and len(bounds) >= 2
        and bounds[0] == 0
        and bounds[-1] == count
        and (bounds[1:] >= bounds[:-1]).all()
    ):
        return bounds
    raise ValueError(
        f"{beside} must rise from 0 to the {count:,} tokens of {path}, one number per document and one more; it has "
        f"{len(bounds):,} numbers{f' from {int(bounds[0]):,} to {int(bounds[-1]):,}' if bounds.size else ''}"
    )


def _header(path: str, file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Shape, order, type, and where the numbers begin."""
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in read:
            raise ValueError(f"version {version} of the format holds no plain numbers")
        shape, fortran, dtype = read[version](file)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(
            f"{path} cannot be read: {first_line(error)}; save an array of whole numbers with numpy.save"
        ) from None
    if dtype.hasobject:
        raise ValueError(
            f"{path} cannot be read: it holds Python objects; save an array of whole numbers with numpy.save"
        )
    if dtype.kind not in "iu" or len(shape) not in (1, 2) or shape[1:] == (0,):
        raise ValueError(f"{path} is {dtype} of shape {shape}; token ids are whole numbers in one or two dimensions")
    start, size = file.tell(), os.fstat(file.fileno()).st_size
    said = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if min(shape) < 0 or size - start != said:
        raise ValueError(f"{path} has {size - start:,} bytes of numbers, its header says {said:,}; copy it again")
    return shape, fortran, dtype, start
