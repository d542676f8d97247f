"""Keeps Transformers from GPU kernels where there is no GPU."""

from __future__ import annotations

import importlib.util
import sys

import torch


def guard_triton() -> None:
    """Keep Transformers from fla's GPU kernels on a machine without a GPU.

    Transformers takes them whenever `fla` can be imported, which it can if triton is there, and
    then fails at the first forward ("0 active drivers"). Call it before the model's class is
    imported; afterwards it is too late. Does nothing if there is an accelerator or no triton.
    Else no code of this process can import `fla` any more.
    """
    if torch.accelerator.is_available() or not _importable("triton"):
        return
    sys.modules["fla"] = None  # type: ignore[assignment] # how Python marks "not importable"


def _importable(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None
