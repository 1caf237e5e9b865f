from __future__ import annotations

from collections.abc import Iterator

import pytest

from .report.browser import Browser, find


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if find() is None:
        pytest.skip("needs chromium")
    started = Browser(tmp_path_factory.mktemp("browser"))
    yield started
    started.close()
