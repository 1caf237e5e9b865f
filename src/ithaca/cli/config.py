"""`ithaca config schema`: the YAML of a run for editors, as a JSON Schema."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_config(verbs: Any) -> None:
    parser = verbs.add_parser(
        "config",
        help="the settings of a run, for editors",
        description="What may stand in the YAML of a run, as a file that editors read; ithaca docs config has it for people.",
    )
    actions = parser.add_subparsers(dest="action", metavar="schema", required=True)
    schema = actions.add_parser(
        "schema",
        help="print a JSON Schema",
        description="Print a JSON Schema of the YAML of a run. Put it beside your files (ithaca config schema > "
        "ithaca.schema.json) and begin them with the line: # yaml-language-server: $schema=ithaca.schema.json",
    )
    schema.set_defaults(run=_schema, traceback=False)


def _schema(options: argparse.Namespace) -> int:
    from ..config.json_schema import json_schema

    print(json.dumps(json_schema(), indent=1, ensure_ascii=False))
    return 0
