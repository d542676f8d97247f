"""Prompts that were prefilled once for each file of tests."""

import pytest
import torch
from hf_prefix import Prefix
from tiny_models import FAMILIES


@pytest.fixture(scope="module")
def prefix():
    return Prefix()


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES)
def any_prefix(request):
    """One of each family."""
    return Prefix(make=request.param)


@pytest.fixture(scope="module")
def bf16_prefix():
    return Prefix(torch.bfloat16)
