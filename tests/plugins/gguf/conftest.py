"""The bench of tests/e2e, without the package gguf too: each test file skips itself then."""

from tests.e2e.conftest import bench, made

__all__ = ["bench", "made"]
