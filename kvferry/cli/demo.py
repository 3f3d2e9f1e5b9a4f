"""``kvferry demo``: runs ``examples/demo``, which declares the options.

A checkout has the folder beside the package, and a wheel has the folder inside the package.
"""

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import kvferry
from kvferry.errors import HostError

MODULE = "kvferry_demo"
"""Name under which the example is imported."""


@functools.cache
def load_example() -> ModuleType:
    """Imports the example.

    Raises:
        HostError: the example's folder is missing.
    """
    package = Path(kvferry.__file__).parent
    places = [root / "examples" / "demo" / "__init__.py" for root in (package, package.parent)]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise HostError(f"demo: {places[0].parent} is missing; install kvferry once more")
    spec = importlib.util.spec_from_file_location(MODULE, found)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[MODULE] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


demo = load_example().demo
