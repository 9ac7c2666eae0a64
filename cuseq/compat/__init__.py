"""Other projects' names and signatures on top of cuseq: code written for them runs unchanged.

`cuseq.compat.causal_conv1d` has the functions of causal-conv1d, `cuseq.compat.soft_dtw_cuda` the
module of pytorch-softdtw-cuda. Both need PyTorch, which this package imports when they are used.
"""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution

from cuseq.runtime import checks

VERSION = "1.7.0"  # of causal-conv1d, whose interface is given
_INTERFACE = ("causal_conv1d_fn", "causal_conv1d_update")
_FUNCTIONS = (
    "causal_conv1d_fwd_function",
    "causal_conv1d_bwd_function",
    "causal_conv1d_update_function",
)
_VARLEN = ("causal_conv1d_varlen_states", "causal_conv1d_varlen_fn")
_MODULES = {  # and their names, all of them functions of cuseq.compat.causal_conv1d
    "causal_conv1d": (*_INTERFACE, *_VARLEN),
    "causal_conv1d.causal_conv1d_interface": (*_INTERFACE, *_FUNCTIONS),
    "causal_conv1d.causal_conv1d_varlen": _VARLEN,
    "causal_conv1d.cpp_functions": _FUNCTIONS,
}


def provide(name):
    """Make ``import causal_conv1d`` give cuseq's functions, in this process.

    It comes before an installed causal-conv1d, and before what only asks whether there is one:
    `importlib.util.find_spec` and `importlib.metadata.version` answer for version 1.7.0. Call it
    before transformers or mamba_ssm is imported, which decide once what they use. Nothing is
    imported until somebody imports causal_conv1d. To call it again changes nothing.

    Args:
        name: "causal_conv1d", the only project whose place can be taken.

    Raises:
        ValueError: for another name.
        RuntimeError: where another causal_conv1d has been imported already: whoever has its
            functions would keep them.

    >>> import importlib.metadata, cuseq.compat
    >>> cuseq.compat.provide("causal_conv1d")
    >>> importlib.metadata.version("causal_conv1d")
    '1.7.0'
    """
    checks.one_of("name", name, ("causal_conv1d",))
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if name in sys.modules:
        place = getattr(sys.modules[name], "__file__", None)
        raise RuntimeError(
            checks.sentence(
                "name",
                f"a module that is not imported yet, {name}",
                f"one imported from {place}",
                "call provide before anything imports it",
            )
        )
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder, Loader):
    """Finds, makes and describes the modules of causal_conv1d."""

    def find_spec(self, name, path=None, target=None):
        if name not in _MODULES:
            return None
        is_package = name == "causal_conv1d"
        return ModuleSpec(name, self, origin="cuseq.compat.causal_conv1d", is_package=is_package)

    def create_module(self, spec):
        return None  # the usual kind

    def exec_module(self, module):
        functions = importlib.import_module("cuseq.compat.causal_conv1d")
        name = module.__name__
        for function in _MODULES[name]:
            setattr(module, function, getattr(functions, function))
        if name == "causal_conv1d":
            module.__version__ = VERSION
            for other in _MODULES:  # attributes of the package without an import of their own
                if other != name:
                    importlib.import_module(other)

    def find_distributions(self, context):
        asked = context.name
        if asked is None or asked.replace("_", "-").lower() == "causal-conv1d":
            yield _Metadata()


class _Metadata(Distribution):
    """What `importlib.metadata` reads of an installed project."""

    def read_text(self, filename):
        return {
            "METADATA": (
                f"Metadata-Version: 2.1\nName: causal-conv1d\nVersion: {VERSION}\n"
                "Summary: cuseq.compat.causal_conv1d under the name of causal-conv1d\n"
            ),
            "top_level.txt": "causal_conv1d\n",
        }.get(filename)

    def locate_file(self, path):
        raise FileNotFoundError(path)  # it has no files
