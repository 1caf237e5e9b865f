from __future__ import annotations

from pathlib import Path

import pytest

from ithaca.observe.report import write_report

from .samples import write_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with everything in it."""
    return write_run(tmp_path_factory.mktemp("runs") / "first")


@pytest.fixture(scope="session")
def page(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its page, in a folder of its own: nothing lies beside it."""
    return write_report(tmp_path_factory.mktemp("page") / "index.html", run=run)
