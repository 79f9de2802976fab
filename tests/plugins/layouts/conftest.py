"""The workbench of the tests that start the real command."""

from tests.e2e.conftest import bench as bench
from tests.e2e.conftest import made as made
