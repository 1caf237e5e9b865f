"""`ithaca export RUN OUT`: a checkpoint becomes a folder that transformers loads."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_HELP = """\
Writes the model of a run's newest checkpoint, or of the checkpoint you name, as a Hugging Face folder: safetensors, config,
generation settings and tokenizer. A LoRA run becomes a PEFT adapter folder, or with --merge a whole model.

Needs no GPU, and memory for one parameter. The checkpoint is verified first, and a tensor with numbers that are not finite, in the
checkpoint or in the dtype written, is refused. OUT must not exist. With --push the folder then goes to the Hub, as your model.

examples:
  ithaca export runs/mine exported
  ithaca export runs/mine/checkpoints/step-400 exported --dtype fp32
  ithaca export runs/mine exported --checkpoint best
  ithaca export runs/lora merged --merge --base models/llama
  ithaca export runs/mine exported --push my-name/my-model --private
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
        "--checkpoint", default="latest", metavar="latest|best|step-N",
        help="of a run folder: the newest (default), the best by its evaluations (eval.keep_best), or this one",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), default="bf16", help="of the weights; fp32 keeps every bit (default: bf16)"
    )
    parser.add_argument(
        "--merge",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="LoRA: the base with adapters added in, not an adapter folder (default: as the run's config says)",
    )
    parser.add_argument(
        "--base", help="LoRA with --merge: folder of the base model, or owner/name (default: the run's)"
    )
    parser.add_argument("--tokenizer", help="folder with the tokenizer, or owner/name (default: the run's)")
    parser.add_argument("--shard-size", default="5GB", help="largest file (default: 5GB)")
    parser.add_argument(
        "--push", metavar="OWNER/NAME", help="upload the folder to the Hub, where its old weights are replaced"
    )
    parser.add_argument("--private", action="store_true", help="with --push: a new repository is for you alone")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")


def _export(options: argparse.Namespace) -> int:
    from ..base.exits import Failed
    from ..storage.export import find_checkpoint
    from ..storage.files import CheckpointError, newest
    from ..storage.push import check_push

    if options.private and options.push is None:
        raise ValueError("--private says how to --push, and nothing is pushed; give --push OWNER/NAME too")
    if options.push is not None:
        check_push(options.push, private=options.private)  # before the work
    try:
        return newest(
            lambda: find_checkpoint(options.source, options.checkpoint),
            lambda path: _carry_out(options, path),
            named=options.source,
        )
    except CheckpointError as error:
        raise Failed(error.exit_code, str(error)) from error


def _carry_out(options: argparse.Namespace, checkpoint: Path) -> int:
    import torch

    from ..base.hub import find_name
    from ..base.hub import folder as folder_of
    from ..base.units import parse_room
    from ..storage.export import export_checkpoint
    from ..storage.files import read_state
    from ..storage.push import push

    record = read_state(checkpoint)
    config = _run_config(checkpoint)
    lora = None if config is None else config.model.lora
    merge = options.merge if options.merge is not None else lora is not None and lora.merge_on_export
    named = {"tokenizer": options.tokenizer, "base": options.base}
    parts = {"tokenizer": "tokenizer", "base": "model" if merge else "config"}
    given = {name: folder_of(text, parts[name]) for name, text in named.items() if text is not None}
    for name, folder in given.items():
        if not folder.is_dir():
            raise ValueError(f"--{name} {named[name]} is not a folder; name that of a local model, or owner/name")
    tokenizer, base = given.get("tokenizer"), given.get("base")
    if tokenizer is not None and not any(tokenizer.glob("tokenizer*")):
        raise ValueError(f"--tokenizer {options.tokenizer} has no tokenizer in it; name a folder with tokenizer.json")
    tokenizer = tokenizer or _tokenizer(config, record["model"]["name_or_path"])
    if base is None and config is not None and lora is not None:
        named_base = find_name(config.model.folder)
        fetched = (
            merge and named_base is not None and named_base.is_pinned
        )  # else a path, which may have been elsewhere then
        base = folder_of(config.model.folder, "model") if fetched else config.model.path
        base = base if base.is_dir() else None
    template = _template(config, checkpoint)
    export_checkpoint(
        checkpoint,
        options.out,
        tokenizer,
        dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype],
        max_shard_bytes=parse_room(options.shard_size),
        merge_lora=merge,
        base_folder=base,
        chat_template=template,
    )
    what = "adapters" if record["model"]["adapters"] and not merge else record["model"]["class"]
    print(f"wrote {what} of step {record['step']} to {options.out} in {options.dtype}")
    if not any(options.out.glob("*token*")):
        print("no tokenizer was found beside the model; copy its files, or export again with --tokenizer FOLDER")
    elif template is not None:
        print("its tokenizer has the chat template that the run was trained with")
    if options.push is not None:
        message = f"{what} of step {record['step']}, by ithaca export"
        print(f"pushed to {push(options.out, options.push, private=options.private, message=message)}")
    return 0


def _run_config(checkpoint: Path) -> Any:
    """The config of the run a checkpoint lies in, if it is there."""
    from ..config import load

    path = checkpoint.parent.parent / "config.yaml"
    try:
        return load(path).config if path.is_file() else None
    except ValueError:
        return None  # written by another version; what it would have said can be said by options


def _template(config: Any, checkpoint: Path) -> str | None:
    """The chat template of the run, where it was given beside the tokenizer's. One that has gone costs it, and not the export."""
    from ..data.samples import trained_template

    try:
        return None if config is None else trained_template(config, checkpoint.parent.parent)
    except ValueError as error:
        print(f"the chat template of the run was not found: {error}")
        return None


def _tokenizer(config: Any, model: str) -> Path | None:
    """Of the run. One on the Hub that has gone, or is out of reach, costs the tokenizer and not the export."""
    from ..base.hub import find_name, local
    from ..base.hub import folder as folder_of

    named = [config.data.tokenizer, config.model.folder] if config is not None else []
    for name in filter(None, (*named, model)):
        pinned = find_name(name)
        folder = local(name)
        if pinned is not None and pinned.is_pinned:
            try:
                folder = folder_of(name, "tokenizer")
            except ValueError as error:
                print(f"its tokenizer was not fetched: {error}")
        if any(folder.glob("tokenizer*")):
            return folder
    return None
