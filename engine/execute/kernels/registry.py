"""Which backend carries out an op on which device: the reference everywhere, Triton on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from engine.execute.kernels import reference


@dataclass(frozen=True, slots=True)
class Kernels:
    """The page ops of one backend; signatures and meaning as in kernels/reference.py."""

    backend: str
    write_pages: Callable[..., None]
    verify_tags: Callable[..., Tensor]


def of_module(backend: str, module: ModuleType) -> Kernels:
    return Kernels(backend, module.write_pages, module.verify_tags)


def kernels_for(device: torch.device) -> Kernels:
    if device.type == "cuda":
        # Imported late: a CPU node needs no Triton.
        from engine.execute.kernels import triton

        return of_module("triton", triton)
    return of_module("reference", reference)
