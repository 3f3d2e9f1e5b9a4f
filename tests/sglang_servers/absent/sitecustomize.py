"""Stand-ins for packages that SGLang imports and that a CPU does not need.

Python runs this module at the start of a process whose ``PYTHONPATH`` has its folder. The packages
exist for GPUs alone, or as builds that CPU builds of torch cannot load. Without them SGLang takes
torch's own operations, but for gated delta nets: of these it has kernels alone, so
``delta_nets.py`` takes their place.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

ABSENT = {"cutlass", "torchaudio", "soundfile", "sgl_kernel", "torchvision"}


class _Any(type):
    """Every attribute of a class of this kind is the class itself; so is ``cls | other``."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __or__(cls, other):
        return cls

    __ror__ = __or__


class Nothing(metaclass=_Any):
    def __init__(self, *args, **kwargs):
        raise NotImplementedError("a stand-in of a package that is not installed was called")


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = _Module(spec.name)
        module.__path__ = []
        module.__file__ = f"/absent/{spec.name}"
        return module

    def exec_module(self, module):
        if module.__name__ == "sgl_kernel.mamba":
            delta_nets = importlib.import_module("delta_nets")
            vars(module).update(vars(delta_nets), library=delta_nets.install())


_find_spec = importlib.util.find_spec


def find_spec(name, package=None):
    """Libraries that ask whether a package is there are told that it is not."""
    return None if name.partition(".")[0] in ABSENT else _find_spec(name, package)


sys.meta_path.append(_Finder())
importlib.util.find_spec = find_spec
