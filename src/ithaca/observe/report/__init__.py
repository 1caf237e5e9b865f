"""One HTML page about a run, or about a plan, a ladder or a profile: a file to open, send or keep, with nothing to install.

The data walks in one direction. `inputs` reads the run folder and the JSON files, and says in one sentence what is wrong with them.
`summary` and `charts` turn them into what the page shows: numbers that are checked, curves that are short enough. `page` puts that
as one block of JSON into a page whose style and scripts lie beside it. The browser draws it, offline: the page allows no request.

A field that is missing leaves a gap, never an error. docs/reference/report.md is the contract for what goes in.
Light to import: no torch. Only these names are for use elsewhere.
"""

from .inputs import Inputs, gather, read_inputs
from .page import asset, fill, page_of, render, view, write_page, write_report

__all__ = [
    "Inputs",
    "asset",
    "fill",
    "gather",
    "page_of",
    "read_inputs",
    "render",
    "view",
    "write_page",
    "write_report",
]
