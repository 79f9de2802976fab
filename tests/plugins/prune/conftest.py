"""The bench of `tests/e2e`, for plugins with commands."""

from tests.e2e.conftest import _cache, _run, bench, cached, distilled, forks, made

__all__ = ["_cache", "_run", "bench", "cached", "distilled", "forks", "made"]
