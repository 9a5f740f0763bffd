"""Lets PyPI's torchvision be imported beside a CPU build of torch, which its binary does not fit.

Python runs this at its start if this folder is on PYTHONPATH. open_clip imports torchvision and
needs none of its compiled operators, but torchvision wants to find two of them declared.
"""

import sys
from importlib.abc import MetaPathFinder

_OPERATORS = ("nms", "qnms")
_libs = []  # the declarations live as long as this list


class _DeclareOperators(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            _libs.append(torch.library.Library("torchvision", "DEF"))
            for name in _OPERATORS:
                _libs[0].define(f"{name}(Tensor dets, Tensor scores, float threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _DeclareOperators())
