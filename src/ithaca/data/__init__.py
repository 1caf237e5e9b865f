"""Data: from files to the tokens a rank holds.

In the order in which data walks through:

- `source`, `find` and `inputs` what the user points at, `look` what is in it, `stamps` whether it stays the same meanwhile;
- `readers`, `parquet` and `arrays` its records, `formats` what they say, `chat`, `templates`, `quotes` and `render` what in them is
  learned;
- `tokenizer` and `encode` text to token ids, exactly and in bounded memory;
- `pack` all of this in parallel, with `work`, `shard`, `parallel`, `progress` and `publish`, into a packed `folder`, whose
  `manifest` is read as a stranger's;
- `split` which documents are held out, `fit` and `plan` which share a row, `order` which row comes when, `rows` reading them by
  slice;
- `batch` from rows to this rank's `ithaca.Batch`;
- `recall` and `needles` synthetic tasks that need no files; `report` numbers about it all.

Training looks like this:

    packed = Packed("packed")
    stream = Stream(open_rows(packed, context=1 << 20), weights=[0.7, 0.3], seed=0)
    batch = batch_from_rows(stream, range(cursor, cursor + 8), run.mesh, run.stack, vocabulary)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batch import batch_from_rows
    from .folder import Packed
    from .needles import Needles
    from .order import Order
    from .pack import pack
    from .plan import RowPlan, open_plan
    from .recall import Recall, recall_score
    from .rows import Rows, RowSource, Stream, open_rows
    from .source import Source, sources_of
    from .tokenizer import check_tokenizer, load_tokenizer

_WHERE = {
    "Source": "source",
    "sources_of": "source",
    "pack": "pack",
    "Packed": "folder",
    "load_tokenizer": "tokenizer",
    "check_tokenizer": "tokenizer",
    "RowPlan": "plan",
    "open_plan": "plan",
    "RowSource": "rows",
    "Rows": "rows",
    "open_rows": "rows",
    "Stream": "rows",
    "Order": "order",
    "Recall": "recall",
    "recall_score": "recall",
    "Needles": "needles",
    "batch_from_rows": "batch",
}
__all__ = [
    "Source",
    "sources_of",
    "pack",
    "Packed",
    "load_tokenizer",
    "check_tokenizer",
    "RowPlan",
    "open_plan",
    "RowSource",
    "Rows",
    "open_rows",
    "Stream",
    "Order",
    "Recall",
    "recall_score",
    "Needles",
    "batch_from_rows",
]


def __getattr__(name: str) -> Any:
    # packing needs no torch, and the command line none of all this
    if name in _WHERE:
        from importlib import import_module

        return getattr(import_module(f".{_WHERE[name]}", __name__), name)
    raise AttributeError(f"module 'ithaca.data' has no attribute {name!r}")
