"""What one of eight ranks reads of a row of five million tokens: bytes asked for, bytes from the disk, seconds.

    python benchmarks/read_slice.py [--context 5M --ranks 8]

Makes a packed folder with one document of the context length (every third token not supervised, so there is a mask too). For each
layout of the ranks, a fresh process with the files out of the page cache builds rank 1's batch. What came from the disk is
read_bytes of /proc/self/io, in pages. Its memory is what building the batch added to the peak of the resident set.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from ithaca.base.units import parse_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", default="5M")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--folder", help="where the temporary folder goes; must be on a disk, not in memory")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    context = parse_tokens(options.context)
    if options.child:
        folder, ulysses, ring = options.child
        print(json.dumps(read(Path(folder), context, int(ulysses), int(ring))))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        make(Path(name), context)
        for ulysses in (each for each in range(options.ranks, 0, -1) if options.ranks % each == 0):
            command = [*sys.argv, "--child", name, str(ulysses), str(options.ranks // ulysses)]
            done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
            print(done.stdout.strip(), flush=True)


def make(folder: Path, context: int) -> None:
    from ithaca.data.pack import pack
    from ithaca.data.plan import open_plan
    from ithaca.data.source import Source

    ids = np.random.default_rng(0).integers(0, 128_256, context)
    labels = np.where(np.arange(context) % 3 == 0, -100, ids)
    with open(folder / "ids.jsonl", "w") as file:
        json.dump({"input_ids": ids.tolist(), "labels": labels.tolist()}, file)
    open_plan(pack([Source(str(folder / "ids.jsonl"))], folder / "packed", vocabulary=128_256, quiet=True), context)


def read(folder: Path, context: int, ulysses: int, ring: int) -> dict:
    import torch

    from ithaca.data import Packed, Rows, batch_from_rows, open_plan
    from ithaca.engine.mesh import Group, Mesh
    from ithaca.stack import Stack

    ranks = ulysses * ring
    axes = (
        Group(ranks, 1, None),
        Group(ulysses, 1 % ulysses, None),
        Group(ring, 1 // ulysses, None),
        Group(1, 0, None),
    )
    mesh = Mesh(torch.device("cpu"), *axes, parameters=None)
    packed = Packed(folder / "packed")
    rows = Rows(packed, open_plan(packed, context))
    batch_from_rows(
        Recall(context), [0], mesh, Stack(ulysses=ulysses, ring=ring), 128_256
    )  # imports and allocator warm
    size = 0
    for path in (folder / "packed").glob("*-00000.bin"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size += path.stat().st_size if not path.name.startswith("sums") else 0
    before, peak = counters(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    batch = batch_from_rows(rows, [0], mesh, Stack(ulysses=ulysses, ring=ring), 128_256)
    seconds = time.perf_counter() - started
    after = counters()
    assert batch.input_ids.shape[1] == -(-context // ranks)
    return {
        "ulysses": ulysses,
        "ring": ring,
        "row": size,
        "its share": size // ranks,
        "asked for": packed.bytes_read,
        "from the disk": after["read_bytes"] - before["read_bytes"],
        "seconds": round(seconds, 4),
        "peak grew by MB": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024, 1),
    }


def Recall(context: int):
    from ithaca.data import Recall

    return Recall(context, 128_256)


def counters() -> dict[str, int]:
    text = Path("/proc/self/io").read_text()
    return {name: int(value) for name, value in (line.split(": ") for line in text.splitlines())}


if __name__ == "__main__":
    main()
