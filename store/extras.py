"""What is missing where the package was installed without one of its extras."""

from __future__ import annotations

from importlib.util import find_spec

_MODULES = {
    "store": ("grpc_reflection", "lmcache", "prometheus_client", "redis", "torch"),
    "hf": ("torch", "transformers"),
}


def require(what: str, *extras: str) -> None:
    """Looks whether the packages of extras are there; loads none of them.

    Args:
        what: needs them, for the message.
        extras: as pyproject.toml names them.

    Raises:
        ImportError: one is not installed; says how to install it.
    """
    wanted = sorted({module for extra in extras for module in _MODULES[extra]})
    missing = [module for module in wanted if find_spec(module) is None]
    if missing:
        raise ImportError(
            f"{what} needs packages that are not installed ({', '.join(missing)}): "
            f"pip install 'tailreplay[{','.join(extras)}]'"
        )
