"""A prompt on its way through the engine: what goes with it everywhere, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailreplay.connector.device_load import DeviceLoad
    from tailreplay.connector.fetch_plan import FetchPlan
    from tailreplay.connector.hf_run import Prefilled
    from tailreplay.connector.load import Load
    from tailreplay.connector.policy import CachePolicy
    from tailreplay.connector.report import Report
    from tailreplay.connector.stored import StoredPrefix
    from tailreplay.store.chain import PrefixChain
    from tailreplay.store.tokens import ExtendedTokens


@dataclass(slots=True)
class Request:
    """A prompt, and how it is to be served.

    Attributes:
        tokens: the prompt.
        chain: names its prefixes.
        policy: its mode is the store's once that has answered, if nobody else has said one.
        report: gathers what happens.
    """

    tokens: ExtendedTokens
    chain: PrefixChain
    policy: CachePolicy
    report: Report


@dataclass(frozen=True, slots=True)
class Outcome:
    """A prompt that has run.

    Attributes:
        done: what it left.
        plan: what was carried out.
        stored: what the store had of it.
        load: what was loaded; None = nothing.
    """

    done: Prefilled
    plan: FetchPlan
    stored: StoredPrefix
    load: Load | DeviceLoad | None
