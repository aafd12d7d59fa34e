"""A Transformer Engine as it is on a machine without a GPU: everything can be imported, and nothing can be used.

Any module and any name below this package exists, as a class that raises when it is made; the functions that the real
package runs on a CPU are the exception.
"""

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types

import torch

__version__ = "2.8.0"
__path__ = []


class _AnyAttribute(type):
    def __getattr__(cls, name):
        return _stand_in(name)


def _refuse(self, *args, **kwargs):
    raise RuntimeError("TransformerEngine needs CUDA")


class _SplitAlongDim:
    @staticmethod
    def apply(tensor, dim, sizes, squeeze=False):
        return torch.split(tensor, sizes, dim)


def _get_cpu_offload_context(*args, **kwargs):
    return contextlib.nullcontext(), lambda tensor: tensor


def _get_dummy_wgrad(shape, dtype, zero=False):
    return torch.zeros(shape, dtype=dtype)


_RUN_ON_A_CPU = {"_SplitAlongDim": _SplitAlongDim, "get_cpu_offload_context": _get_cpu_offload_context, "get_dummy_wgrad": _get_dummy_wgrad}


def _stand_in(name):
    if name.startswith("__"):
        raise AttributeError(name)
    if name in _RUN_ON_A_CPU:
        return _RUN_ON_A_CPU[name]
    return _AnyAttribute(name, (torch.nn.Module,), {"__init__": _refuse, "__module__": "transformer_engine.fake"})


class _AnyModule(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        return _stand_in(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("transformer_engine."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _AnyModule(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Finder())


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return importlib.import_module(f"transformer_engine.{name}")
