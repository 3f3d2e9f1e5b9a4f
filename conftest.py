"""What every test run of this repository shares."""

import importlib.util

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

pytest_plugins = ["kvferry.testing.fixtures", "pytester"]

# The conformance suites use plain asserts; this lets them show both sides, as in a test file.
pytest.register_assert_rewrite("kvferry.testing")

# Hypothesis mixes constants of the modules that are loaded into what it draws, and which modules
# those are depends on the tests before. Without them a property test draws the same examples
# wherever it runs. The function is private, so Hypothesis is pinned and a test holds this.
providers._get_local_constants = Constants  # noqa: SLF001

# `make test` draws the same examples every time: a run depends on nothing but the commit.
# `--hypothesis-profile anew` draws new ones. Time limits of an example would measure the machine.
settings.register_profile("same", deadline=None, print_blob=True, derandomize=True)
settings.register_profile("anew", deadline=None, print_blob=True)
settings.load_profile("same")

# What `make test-python` leaves out on a Python for which no torch is installed.
if importlib.util.find_spec("torch") is None:
    collect_ignore = [
        f"tests/topology/test_{name}.py"
        for name in ("conversion", "geometry", "locate_memory", "repacks", "run")
    ]
