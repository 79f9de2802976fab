"""The libraries these tests compare with are the extra `peers`; without it the tests are left out, not skipped."""

import importlib.util

if any(importlib.util.find_spec(name) is None for name in ("trl", "liger_kernel")):
    collect_ignore_glob = ["test_*.py"]
