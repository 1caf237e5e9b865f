"""Where an evaluation goes: a JSON file in the run folder, a line of metrics, curves and a picture for trackers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from ..base.files import write_atomically
from ..base.run_folder import RunFolder
from ..observe.metrics import Metrics
from .heatmap import pixels
from .suite import headline

log = logging.getLogger("ithaca")


def publish(record: dict[str, Any], folder: RunFolder, metrics: Metrics, rank: int) -> None:
    if rank != 0:
        return
    try:
        write_record(folder.evaluations / f"step-{record['step']}.json", record)
    except OSError as error:  # its numbers are in the metrics too, and training goes on
        log.warning("the evaluation after step %s could not be written (%s)", record["step"], error)
    pictures = {"needles": pixels(record["needle"])} if "needle" in record else {}
    metrics.evaluation(record["step"], headline(record), pictures)


def write_record(path: Path, record: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(record, indent=1, allow_nan=False) + "\n")
    return path
