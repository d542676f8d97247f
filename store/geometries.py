"""The shape that every namespace's objects have: that of the first one of their kind.

Nothing here locks: the catalog calls it under its own lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from tailreplay.store.geometry import Geometry
    from tailreplay.store.objects import Kind


class Geometries:
    """Geometries by namespace and kind. Not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, Kind], Geometry] = {}

    def hold(self, namespace: bytes, geometry: Geometry) -> Geometry:
        """The geometry of a namespace's objects of that kind; this one if it is the first."""
        return self._known.setdefault((namespace, geometry.kind), geometry)

    def forget_all_but(self, namespaces: AbstractSet[bytes]) -> None:
        """Forgets those of namespaces that have nothing and get nothing."""
        for key in [key for key in self._known if key[0] not in namespaces]:
            del self._known[key]

    def by_namespace(self) -> dict[bytes, dict[Kind, Geometry]]:
        """What is known of each namespace, by kind."""
        found: dict[bytes, dict[Kind, Geometry]] = {}
        for (namespace, kind), geometry in self._known.items():
            found.setdefault(namespace, {})[kind] = geometry
        return found
