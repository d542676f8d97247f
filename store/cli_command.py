"""Commands that ask a store: their options in common, and the one way to ask, and to answer.

A command is a function of an `Asked` and of what it takes beside that:

    @command(app)
    def ping(asked: Asked) -> None:
        asked.write(plain(asked.store("Describe", pb.DescribeRequest())), cli_tables.facts)
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tailreplay.proto import store_pb2 as pb
from tailreplay.proto import store_pb2_grpc as rpc
from tailreplay.store.address import checked_address
from tailreplay.store.cli_io import (
    CREDENTIALS,
    QUIET,
    Format,
    as_text,
    fail,
    from_hex,
    misused,
    write,
)
from tailreplay.store.config import default_socket
from tailreplay.store.errors import (
    InvalidRequest,
    StoreUnavailable,
    TailReplayError,
    from_rpc_error,
)
from tailreplay.store.namespace import NAMESPACE_BYTES
from tailreplay.store.tls_probe import tls_fault

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from google.protobuf.message import Message
    from rich.console import Console

    Table = Callable[[Console, dict[str, Any]], None]

TIMEOUT_S = 5.0
ADMIN_TIMEOUT_S = 300.0
"""An erasure scans all of Redis."""
_MOST_LISTED = 20


@dataclass(frozen=True, slots=True)
class Asked:
    """What every command that asks a store is given.

    Attributes:
        url: the store's address; empty = the sidecar's socket.
        admin_url: its address for operators; empty = beside its socket.
        output_format: how the answer is written.
        output: file that it goes to; None = standard output.
        quiet: whether nothing is written, and the exit code alone tells.
    """

    url: str
    admin_url: str
    output_format: Format
    output: Path | None
    quiet: bool

    @property
    def address(self) -> str:
        """The store's address."""
        return self.url or default_socket()

    @property
    def admin_address(self) -> str:
        """Where the store listens for operators; ends the command if that is not known."""
        if not self.admin_url and not self.address.startswith("unix:"):
            fail(f"operators' address of {self.address} is not known, wanted --admin-url")
        return self.admin_url or f"{self.address}.admin"

    def store(self, rpc_name: str, request: Message) -> Any:  # noqa: ANN401 - as the RPC says
        """Calls the Store service; an error ends the command with a message and code 1."""
        return _or_fail(self.address, rpc.StoreStub, rpc_name, request, TIMEOUT_S)

    def called(self, rpc_name: str, request: Message) -> Any:  # noqa: ANN401 - as the RPC says
        """As `store`, but an error is raised, as `called` raises it."""
        return called(self.address, rpc.StoreStub, rpc_name, request, TIMEOUT_S)

    def admin(self, rpc_name: str, request: Message) -> Any:  # noqa: ANN401 - as the RPC says
        """As `store`, of the Admin service."""
        return _or_fail(self.admin_address, rpc.AdminStub, rpc_name, request, ADMIN_TIMEOUT_S)

    def is_serving(self) -> bool:
        """Whether the store takes calls, which it tells everybody; an error ends the command."""
        asked = health_pb2.HealthCheckRequest()
        stub = health_pb2_grpc.HealthStub
        answer = _or_fail(self.address, stub, "Check", asked, TIMEOUT_S)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def write(self, facts: dict[str, Any], table: Table) -> None:
        """Writes an answer where and as it is wanted."""
        if not self.quiet:
            write(as_text(facts, table, self.output_format), self.output)

    def write_look(self, facts: dict[str, Any], table: Table, number: int) -> bool:
        """Writes one of several answers, and when it came; False when nobody reads them any more.

        Args:
            facts: the answer.
            table: draws it.
            number: how many came before; a file has all of them.
        """
        if self.quiet:
            return True
        looked = {"at": datetime.now(UTC).isoformat(timespec="milliseconds"), **facts}
        text = as_text(looked, table, self.output_format, is_look=True)
        return write(text, self.output, behind=number > 0)

    def namespace(self, given: str, tenant: bytes = b"") -> bytes:
        """A namespace as the store lists it: the one given, or the only one, of a tenant or all."""
        return self._named(given, lambda space: space.namespace, tenant)

    def sent_namespace(self, given: str, tenant: bytes = b"") -> bytes:
        """A namespace as engines call it, among those that the caller's token reads."""
        return self._named(given, _readable, tenant)

    def only_namespace(self) -> bytes:
        """The only namespace that the caller's token reads, as engines call it.

        Raises:
            InvalidRequest: there is none, or more than one.
            TailReplayError: as `called`.
        """
        answer = self.called("Describe", pb.DescribeRequest())
        found = _candidates(answer, _readable)
        if len(found) != 1:
            raise InvalidRequest(_which(found, answer))
        return next(iter(found))

    def public_namespace(self, given: str) -> bytes:
        """A namespace of the public scope; ends the command where the store can have none."""
        if not given and not _asks_tokens(self.store("Describe", pb.DescribeRequest())):
            fail("the store asks for no tokens (token_file), so nothing in it can be public")
        return self._named(given, lambda space: space.namespace if space.is_public else b"")

    def _named(
        self, given: str, name: Callable[[pb.NamespaceInfo], bytes], tenant: bytes = b""
    ) -> bytes:
        if given and tenant:
            misused("--namespace and --tenant are both given, wanted one of them")
        if given:
            return self._meant(from_hex("--namespace", given, "describe", NAMESPACE_BYTES), name)
        answer = self.store("Describe", pb.DescribeRequest())
        found = _candidates(answer, name, tenant)
        if len(found) != 1:
            fail("\n".join([_which(found, answer, tenant), *_listed(found)]))
        return next(iter(found))

    def _meant(self, given: bytes, name: Callable[[pb.NamespaceInfo], bytes]) -> bytes:
        """What is meant by a namespace, whether it is given as the store or as engines call it."""
        try:
            answer = self.called("Describe", pb.DescribeRequest())
        except TailReplayError:
            return given
        spaces = [s for s in answer.namespaces if given in (s.namespace, s.sent_namespace)]
        found = {name(space) for space in spaces} - {b""}
        if len(found) > 1:
            fail(
                f"engines call {len(found)} of the store's namespaces {given.hex()}, wanted one of "
                "them as `describe` lists it"
            )
        return found.pop() if found else given


_OPTIONS: dict[str, tuple[Any, Any]] = {
    "url": (
        Annotated[
            str,
            typer.Option(
                "--url", help="store address", envvar="TAILREPLAY_LISTEN", show_default=False
            ),
        ],
        "",
    ),
    "admin_url": (
        Annotated[
            str,
            typer.Option(
                "--admin-url",
                help="where the store listens for operators; default: beside its socket",
                envvar="TAILREPLAY_ADMIN_LISTEN",
                show_default=False,
            ),
        ],
        "",
    ),
    "output_format": (
        Annotated[Format, typer.Option("--format", help="how to write the answer")],
        Format.TERMINAL,
    ),
    "output": (
        Annotated[
            Path | None,
            typer.Option("--output", help="write the answer to this file", show_default=False),
        ],
        None,
    ),
    "quiet": (
        Annotated[
            bool,
            typer.Option(
                "-q", "--quiet", help="write neither answer nor errors; the exit code alone tells"
            ),
        ],
        False,
    ),
}


def command(
    app: typer.Typer, name: str | None = None, *, operators: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function a command with the options that all have.

    Args:
        app: the group that it joins.
        name: of the command; the function's if None.
        operators: whether it asks the Admin service, and so takes `--admin-url`.
    """
    shared = {k: v for k, v in _OPTIONS.items() if operators or k != "admin_url"}

    def register(function: Callable[..., None]) -> Callable[..., None]:
        own = [*inspect.signature(function, eval_str=True).parameters.values()][1:]

        def run(**given: Any) -> None:  # noqa: ANN401 - as the function takes them
            options = {key: given.pop(key, "") for key in _OPTIONS}
            asked = Asked(**options)
            _check(asked)
            was = QUIET.set(asked.quiet)
            try:
                function(asked, **given)
            finally:
                QUIET.reset(was)

        options = [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for key, (kind, default) in shared.items()
        ]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + options
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__name__, run.__doc__ = function.__name__, paragraphs(function.__doc__)
        app.command(name)(run)
        return function

    return register


def paragraphs(doc: str | None) -> str:
    """A docstring with each of its paragraphs in one line: a terminal wraps them as it is wide."""
    return "\n\n".join(" ".join(part.split()) for part in (doc or "").split("\n\n"))


def _check(asked: Asked) -> None:
    """Ends a command of which it can be seen at once that it is wrong."""
    if asked.quiet and asked.output is not None:
        misused("-q writes nothing, and --output names a file to write: wanted one of them")
    for flag, address in (("--url", asked.url), ("--admin-url", asked.admin_url)):
        try:
            if address:
                checked_address(address)
        except ValueError as error:
            misused(f"{flag}: {error}")


def called(
    url: str, stub: Callable[[grpc.Channel], Any], rpc_name: str, request: Message, timeout_s: float
) -> Any:  # noqa: ANN401 - as the RPC says
    """Calls an RPC with the credentials of the command line.

    Args:
        url: of the store.
        stub: makes the service's stub.
        rpc_name: as the service has it.
        request: what is asked.
        timeout_s: how long it may take.

    Raises:
        InvalidRequest: the address, or a file of the credentials, is of no use.
        TailReplayError: as the store says, or why it is not reached.
    """
    credentials = CREDENTIALS.get()
    try:
        address = checked_address(url)
        credentials.metadata()  # or it is the store that says that no token came
        channel = credentials.channel(address, [("grpc.enable_http_proxy", 0)])
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    with channel:
        try:
            return getattr(stub(channel), rpc_name)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            failure = from_rpc_error(error, address)
            if isinstance(failure, StoreUnavailable):
                failure = StoreUnavailable(tls_fault(address, credentials) or str(failure))
            raise failure from None


def _or_fail(
    url: str, stub: Callable[[grpc.Channel], Any], rpc_name: str, request: Message, timeout_s: float
) -> Any:  # noqa: ANN401 - as the RPC says
    try:
        return called(url, stub, rpc_name, request, timeout_s)
    except TailReplayError as error:
        fail(str(error))


def _readable(space: pb.NamespaceInfo) -> bytes:
    """What Match takes for a namespace, if the caller's token reads it; nothing if not."""
    own = space.namespace == space.sent_namespace
    return space.sent_namespace if own or space.is_public else b""


def _candidates(
    answer: pb.DescribeResponse, name: Callable[[pb.NamespaceInfo], bytes], tenant: bytes = b""
) -> dict[bytes, pb.NamespaceInfo]:
    """Namespaces that can be meant, by what `name` calls them."""
    spaces = [s for s in answer.namespaces if not tenant or s.tenant == tenant]
    return {name(space): space for space in spaces if name(space)}


def _asks_tokens(answer: pb.DescribeResponse) -> bool:
    """Whether a store asks for tokens; where it does not, everybody sees its settings."""
    return answer.settings.get("token_file", "unknown") not in ("", "None")


def _which(
    found: Mapping[bytes, pb.NamespaceInfo], answer: pb.DescribeResponse, tenant: bytes = b""
) -> str:
    """Why a store's namespaces do not say which is meant, and what does."""
    if found:
        whose, more = ("of this tenant", "") if tenant else ("", " or --tenant")
        count = " ".join(filter(None, (f"{len(found)} namespaces", whose)))
        return f"the store has {count}, wanted --namespace{more} to name one (see `describe`)"
    if tenant and answer.namespaces:
        return (
            f"of {len(answer.namespaces)} namespaces none is of the tenant {tenant.hex()}, wanted "
            "--tenant with a name that engines have, or --namespace (see `describe`)"
        )
    if answer.namespaces:
        return (
            f"of {len(answer.namespaces)} namespaces none is known to be readable with your token: "
            "a store learns what engines call one when they use it; wanted --namespace, as engines "
            "call it"
        )
    if not _asks_tokens(answer):
        why = "nothing is stored yet, or nothing any more"
    else:
        why = "nothing is stored yet, or nothing with your token since the store's start"
    return f"the store names no namespace: {why}; wanted --namespace, as engines call it"


def _listed(found: Mapping[bytes, pb.NamespaceInfo]) -> list[str]:
    """A line for each of the first of them."""
    lines = [
        f"  {name.hex()}  {space.tokens} tokens of tenant {space.tenant.hex() or '-'}"
        for name, space in sorted(found.items(), key=lambda item: -item[1].tokens)
    ]
    return lines[:_MOST_LISTED]
