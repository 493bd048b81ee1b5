from __future__ import annotations

from tests.portable.conftest import zygote  # noqa: F401 - a fixture of these tests, too
