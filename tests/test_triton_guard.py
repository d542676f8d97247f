"""Transformers is kept from fla's kernels where there is no GPU, and only there."""

import sys
import types

import pytest
import torch

from tailreplay.connector.triton_guard import guard_triton

pytestmark = pytest.mark.model


@pytest.fixture
def modules(monkeypatch):
    """`sys.modules` without fla, and with a triton; restored afterwards."""
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "fla", types.ModuleType("fla"))
    del sys.modules["fla"]
    return sys.modules


def test_fla_cannot_be_imported_with_triton_but_no_gpu(modules, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    guard_triton()
    with pytest.raises(ModuleNotFoundError):
        import fla  # noqa: F401


def test_fla_is_left_alone_with_a_gpu(modules, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    guard_triton()
    assert "fla" not in modules


def test_fla_is_left_alone_without_triton(modules, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr("tailreplay.connector.triton_guard._importable", lambda name: False)
    guard_triton()
    assert "fla" not in modules
