"""Plans as a page: to play with (`ithaca plan --web`), and to keep as one file (`ithaca plan ... --html`).

    asking      what a page or a link asks for, as words by name -> arguments of the planner
    answers     what the planner says to that, as the page shows it; every number is made here, none in the browser
    slow        what takes longer than typing, in a process that can be ended: advice, ladder, longest context, grid, dry runs
    server      pages and answers over HTTP, for this machine alone
    page        the page itself; its charts are those of the report

Light to import: no torch. Only these names are for use elsewhere.
"""

from .page import file_of, write_plans
from .server import serve

__all__ = ["file_of", "serve", "write_plans"]
