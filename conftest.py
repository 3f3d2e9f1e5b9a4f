"""What every test run of this repository shares."""

import os

import pytest
from hypothesis import settings

pytest_plugins = ["kvferry.testing.fixtures", "pytester"]

# The conformance suites use plain asserts; this lets them show both sides, as in a test file.
pytest.register_assert_rewrite("kvferry.testing")

# Time limits per example only measure how busy the machine is. In CI a run must depend on nothing
# but the commit, so there the examples are the same each time; elsewhere they are new ones.
settings.register_profile("local", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
