"""Loads of the Transformers engine: from its GPU tier where it has one, and from the store."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from tailreplay.connector.device_load import DeviceLoad
from tailreplay.connector.load import Load, LoadFailed
from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.objects import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from tailreplay.connector.client import StoreClient
    from tailreplay.connector.device_pool import DevicePool
    from tailreplay.connector.fetch_plan import FetchPlan
    from tailreplay.connector.hf_request import Request
    from tailreplay.connector.payload import PayloadCodec
    from tailreplay.connector.stored import StoredPrefix
    from tailreplay.proto import store_pb2 as pb

_LOAD_TIMEOUT_S = 120.0


class Loads:
    """Makes loads, and sets them going on threads of their own.

    Args:
        client: asks the store.
        codec: knows the payloads.
        device_pool: the GPU tier; None = there is none.
    """

    def __init__(
        self, client: StoreClient, codec: PayloadCodec, device_pool: DevicePool | None
    ) -> None:
        self._client = client
        self._codec = codec
        self._device_pool = device_pool

    def of(self, plan: FetchPlan, request: Request) -> Load | DeviceLoad:
        """What a plan has to load; nothing is on its way yet."""
        make: Callable[..., Load | DeviceLoad] = Load
        if self._device_pool is not None:
            make = partial(DeviceLoad, pool=self._device_pool)
        return make(
            plan.ranges,
            self._codec.geometry,
            request.chain,
            stall_timeout_s=request.policy.stall_timeout_s,
            on_event=lambda name, wanted: request.report.event(_event_name(name, wanted)),
        )

    def start(self, load: Load | DeviceLoad, stored: StoredPrefix, request: Request) -> None:
        """Fetches what a load lacks, if it lacks anything.

        Raises:
            LoadFailed: the store does not take the call.
        """
        if not load.ranges:
            return
        try:
            stream = self._client.fetch(
                request.chain.namespace, stored.leaf, load.ranges, timeout_s=_LOAD_TIMEOUT_S
            )
        except StoreUnavailable as error:
            raise LoadFailed("store_down", str(error)) from error
        threading.Thread(
            target=load.run, args=(stream,), name="tailreplay-load", daemon=True
        ).start()
        request.report.round_trip()


def _event_name(name: str, wanted: pb.Range) -> str:
    kind = Kind(wanted.kind).name.lower()
    return f"{name}:{kind}:{wanted.first_unit}"
