from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.zygote import Zygote

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Commands without their seconds of imports."""
    process = Zygote(tmp_path_factory.mktemp("bin"))
    yield process
    process.close()
