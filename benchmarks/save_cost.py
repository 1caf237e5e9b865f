"""What verification adds to a save: the time of a checkpoint with SHA-256 and without, everything else the same.

    python benchmarks/save_cost.py [--ranks 2 --gigabytes 1.5 --repeats 3 --folder DIR]

Saves a model with AdamW states on gloo workers, to `--folder` (default: a temporary one; give one on the disk you mean), in turn
with hashing, with a hash that does nothing, and with torch's own writer (flushed to disk like ours, with nothing around it). Turns
are interleaved, because disks have moods; medians and the best turn are printed, of the slowest rank. `waits` is how long training
stands still: all of a synchronous save, of an asynchronous one the copy to host memory. `verify` reads it all again, every byte.
`core s` is the processor time of all ranks together: it hardly depends on what else the machine does, where the times do.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import ithaca
from ithaca.base.processes.pool import Workers
from ithaca.storage import checkpoint, dcp, stream

WAYS = ("hashed", "not hashed", "torch's writer")


class Nothing:
    """In place of SHA-256."""

    def __init__(self, data: Any) -> None:
        pass

    def digest(self) -> bytes:
        return bytes(32)


def model_of(gigabytes: float) -> Any:
    """A Llama shape whose parameters and states take about so much: 12 bytes a parameter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    wanted, hidden, vocabulary = gigabytes * 1e9 / 12, 1024, 16_384
    layer = hidden * hidden * (2 + 2 * 0.5 + 3 * 3)
    layers = max(1, round((wanted - 2 * vocabulary * hidden) / layer))
    config = AutoConfig.for_model(
        "llama", hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, vocab_size=vocabulary,
        num_attention_heads=16, num_key_value_heads=8, head_dim=64,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def measure(folder: str, gigabytes: float, repeats: int) -> list[dict[str, Any]]:
    run = ithaca.prepare(model_of(gigabytes), ithaca.Stack(), device="cpu")
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-4, foreach=False)
    for parameter in run.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    found, copies = [], checkpoint.HostCopies()
    for turn in range(repeats + 1):  # the first warms up
        for way in WAYS:
            for asynchronous in (False, True):
                where = Path(folder) / "checkpoints"
                with _as(way):
                    begin, cores = time.perf_counter(), time.process_time()
                    saving = checkpoint.save(
                        where, run, optimizer, {}, step=1, asynchronous=asynchronous, copies=copies
                    )
                    waited = time.perf_counter() - begin
                    path = saving.wait()
                    whole, cores = time.perf_counter() - begin, time.process_time() - cores
                size = sum(each.stat().st_size for each in path.iterdir())
                read = None
                if way == "hashed" and run.mesh.world.rank == 0 and not asynchronous:
                    begin = time.perf_counter()
                    assert not checkpoint.verify(path)
                    read = time.perf_counter() - begin
                checkpoint.on_all_ranks(run.mesh.world, lambda: None)
                if run.mesh.world.rank == 0:
                    shutil.rmtree(where)
                checkpoint.on_all_ranks(run.mesh.world, lambda: None)
                if turn:
                    about = {"way": way, "asynchronous": asynchronous, "waits": waited, "whole": whole, "cores": cores}
                    found.append({**about, "size": size, "verify": read})
    return found


class _as:
    """Save in one of the ways, inside the block."""

    def __init__(self, way: str) -> None:
        self.way = way

    def __enter__(self) -> None:
        self.before = stream.sha256, checkpoint.HashingWriter
        if self.way != "hashed":
            stream.sha256 = Nothing
        if self.way == "torch's writer":
            checkpoint.HashingWriter = Plain

    def __exit__(self, *_: object) -> None:
        stream.sha256, checkpoint.HashingWriter = self.before


class Plain(dcp.HashingWriter):
    """torch's own streams; of ours only what the manifest needs to be written."""

    def __init__(self, path: Path, step: int) -> None:
        super().__init__(path, step)
        self.fs, self.sync_files = torch.distributed.checkpoint.filesystem.FileSystem(), True

    @property
    def entries(self) -> dict[str, Any]:
        return {
            each.name: {"size": each.stat().st_size, "sha256": ""}
            for each in Path(self.path).iterdir()
            if each.name != "state.json"
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gigabytes", type=float, default=1.5, help="size of the checkpoint")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, Workers(options.ranks, timeout=3600) as workers:
        ranks = workers.run(measure, folder, options.gigabytes, options.repeats)
    size = ranks[0][0]["size"]
    about = f"{size / 1e9:.2f} GB, {options.repeats} turns, slowest rank each; torch {torch.__version__}"
    print(f"{options.ranks} rank(s), {about}")
    print(
        "| save | with | waits s | until published s, median | best | core s, all ranks | more than not hashed, median | best |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for asynchronous in (False, True):
        times: dict[str, tuple[float, float, float, float]] = {}
        for way in WAYS:
            turns = [
                (
                    max(each["waits"] for each in same),
                    max(each["whole"] for each in same),
                    sum(each["cores"] for each in same),
                )
                for same in zip(*ranks, strict=True)
                if same[0]["way"] == way and same[0]["asynchronous"] == asynchronous
            ]
            waits, whole, cores = zip(*turns, strict=True)
            times[way] = statistics.median(waits), statistics.median(whole), min(whole), statistics.median(cores)
        base = times["not hashed"]
        for way, (waits, median, best, cores) in times.items():
            more = f"{median / base[1] - 1:+.0%} | {best / base[2] - 1:+.0%}"
            kind = "asynchronous" if asynchronous else "synchronous"
            print(f"| {kind} | {way} | {waits:.2f} | {median:.2f} | {best:.2f} | {cores:.2f} | {more} |")
    reads = [each["verify"] for each in ranks[0] if each["verify"]]
    print(f"verify: {statistics.median(reads):.2f} s ({size / statistics.median(reads) / 1e9:.2f} GB/s)")


if __name__ == "__main__":
    main()
