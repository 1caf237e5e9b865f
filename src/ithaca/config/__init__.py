"""What the user asked for: `schema` says what there is, `load` reads it, `check` says what cannot work, `dump` writes it down.

Light to import: no torch, and yaml only when something is read or written (`ithaca doctor` has to work without it).
Only these names are for use elsewhere.
"""

from .check import missing, violations
from .dump import dump
from .load import Loaded, load, recipe_names, recipe_text, split_overrides
from .schema import Config, StackOptions
from .stack_options import add_stack_options, read_fields, read_stack, split_words

__all__ = [
    "Config",
    "Loaded",
    "StackOptions",
    "add_stack_options",
    "dump",
    "load",
    "missing",
    "read_fields",
    "read_stack",
    "recipe_names",
    "recipe_text",
    "split_overrides",
    "split_words",
    "violations",
]
