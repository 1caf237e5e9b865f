"""`ithaca export RUN OUT`: a checkpoint becomes a folder that transformers loads."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_HELP = """\
Writes the model of a run's newest checkpoint, or of the checkpoint you name, as a Hugging Face folder: safetensors, config,
generation settings and tokenizer. A LoRA run becomes a PEFT adapter folder, or with --merge a whole model.

Needs no GPU, and memory for one parameter. The checkpoint is verified first, and a tensor with numbers that are not finite, in the
checkpoint or in the dtype written, is refused. OUT must not exist.

examples:
  ithaca export runs/mine exported
  ithaca export runs/mine/checkpoints/step-400 exported --dtype fp32
  ithaca export runs/lora merged --merge --base models/llama
"""


def add_export(verbs: Any) -> None:
    parser = verbs.add_parser(
        "export",
        help="write a checkpoint as a folder that transformers loads",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_export)
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT", type=Path, help="a run folder, or a checkpoint (step-N)")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write; must not exist")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), default="bf16", help="of the weights; fp32 keeps every bit (default: bf16)"
    )
    parser.add_argument(
        "--merge",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="LoRA: the base with adapters added in, not an adapter folder (default: as the run's config says)",
    )
    parser.add_argument("--base", type=Path, help="LoRA with --merge: folder of the base model (default: the run's)")
    parser.add_argument("--tokenizer", type=Path, help="folder with the tokenizer (default: the run's)")
    parser.add_argument("--shard-size", default="5GB", help="largest file (default: 5GB)")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")


def _export(options: argparse.Namespace) -> int:
    from ..base.exits import Failed
    from ..storage.export import find_checkpoint
    from ..storage.files import CheckpointError, newest

    try:
        return newest(
            lambda: find_checkpoint(options.source), lambda path: _carry_out(options, path), named=options.source
        )
    except CheckpointError as error:
        raise Failed(error.exit_code, str(error)) from error


def _carry_out(options: argparse.Namespace, checkpoint: Path) -> int:
    import torch

    from ..base.units import parse_room
    from ..storage.export import export_checkpoint
    from ..storage.files import read_state

    for name, folder in (("tokenizer", options.tokenizer), ("base", options.base)):
        if folder is not None and not folder.is_dir():
            raise ValueError(f"--{name} {folder} is not a folder; name that of a local model")
    if options.tokenizer is not None and not any(options.tokenizer.glob("tokenizer*")):
        raise ValueError(f"--tokenizer {options.tokenizer} has no tokenizer in it; name a folder with tokenizer.json")
    record = read_state(checkpoint)
    config = _run_config(checkpoint)
    lora = None if config is None else config.model.lora
    merge = options.merge if options.merge is not None else lora is not None and lora.merge_on_export
    tokenizer = options.tokenizer or _tokenizer(config, record["model"]["name_or_path"])
    base = options.base
    if base is None and config is not None and lora is not None and Path(config.model.folder).is_dir():
        base = Path(config.model.folder)
    export_checkpoint(
        checkpoint,
        options.out,
        tokenizer,
        dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype],
        max_shard_bytes=parse_room(options.shard_size),
        merge_lora=merge,
        base_folder=base,
    )
    what = "adapters" if record["model"]["adapters"] and not merge else record["model"]["class"]
    print(f"wrote {what} of step {record['step']} to {options.out} in {options.dtype}")
    if not any(options.out.glob("*token*")):
        print("no tokenizer was found beside the model; copy its files, or export again with --tokenizer FOLDER")
    return 0


def _run_config(checkpoint: Path) -> Any:
    """The config of the run a checkpoint lies in, if it is there."""
    from ..config import load

    path = checkpoint.parent.parent / "config.yaml"
    try:
        return load(path).config if path.is_file() else None
    except ValueError:
        return None  # written by another version; what it would have said can be said by options


def _tokenizer(config: Any, model: str) -> Path | None:
    named = [config.data.tokenizer, config.model.folder] if config is not None else []
    folders = [Path(name) for name in (*named, model) if name]
    return next((folder for folder in folders if any(folder.glob("tokenizer*"))), None)
