"""`size`: how much room a workload needs, from a model's config or from a running store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from tailreplay.proto import store_pb2 as pb
from tailreplay.store import cli_tables
from tailreplay.store.cli_command import Asked, command
from tailreplay.store.cli_io import Namespace, fail, misused
from tailreplay.store.errors import InvalidRequest
from tailreplay.store.geometry import Dtype, checkpoint_geometry, hidden_geometry, kv_geometry
from tailreplay.store.json_file import read_json

app = typer.Typer()

_DTYPES = ("float32", "bfloat16", "float16")


class Costs(NamedTuple):
    """Bytes of a token's keys and values, of its hiddens, and of one checkpoint."""

    kv: int
    hidden: int
    checkpoint: int


@command(app)
def size(
    asked: Asked,
    tokens: Annotated[int, typer.Option(help="tokens of a prompt", min=1)],
    sessions: Annotated[int, typer.Option(help="prompts to be kept at a time", min=1)] = 1,
    shared: Annotated[int, typer.Option(help="first tokens that all of them share", min=0)] = 0,
    chunk: Annotated[int, typer.Option(help="tokens between checkpoints", min=64)] = 1024,
    config: Annotated[
        Path | None,
        typer.Option(help="a model's config.json; without, a store is asked", show_default=False),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16; default: the config's, or bfloat16")
    ] = "",
    namespace: Namespace = "",
) -> None:
    """How much room prompts need: keys and values, checkpoints, and hiddens where stored.

    vLLM engines store hiddens only in modes that use them (`store_hiddens`), HybridEngine always.
    """
    if shared > tokens:
        misused(f"--shared is {shared}, wanted at most --tokens, {tokens}")
    if dtype and dtype not in _DTYPES:
        misused(f"--dtype is {dtype!r}, wanted one of {', '.join(_DTYPES)}")
    try:
        costs = _of_config(config, dtype) if config is not None else _of_store(asked, namespace)
    except InvalidRequest as error:
        fail(str(error))
    stored = shared + sessions * (tokens - shared)
    # One at each chunk's end, and one before each prompt's.
    states = shared // chunk + sessions * (tokens // chunk - shared // chunk + 1)
    kv, hidden, checkpoints = stored * costs.kv, stored * costs.hidden, states * costs.checkpoint
    least = stored * costs.kv + sessions * costs.checkpoint
    facts = {
        "kv_bytes_per_token": costs.kv,
        "hidden_bytes_per_token": costs.hidden,
        "checkpoint_bytes": costs.checkpoint,
        "stored_tokens": stored,
        "checkpoints": states,
        "kv_bytes": kv,
        "hidden_bytes": hidden,
        "all_checkpoints_bytes": checkpoints,
        "total_without_hiddens_bytes": kv + checkpoints,
        "total_with_hiddens_bytes": kv + hidden + checkpoints,
        "least_for_exact_bytes": least,
    }
    asked.write(facts, cli_tables.facts)


def _of_store(asked: Asked, namespace: str) -> Costs:
    wanted = asked.namespace(namespace)
    answer = asked.store("Describe", pb.DescribeRequest())
    for space in answer.namespaces:
        if space.namespace == wanted and space.kv_bytes_per_token:
            return Costs(
                space.kv_bytes_per_token, space.hidden_bytes_per_token, space.checkpoint_bytes
            )
    raise InvalidRequest(
        f"namespace {wanted.hex()} has stored nothing since the store's start, wanted --config"
    )


def _of_config(file: Path, given_dtype: str) -> Costs:
    """What a hybrid model's config.json says.

    Raises:
        InvalidRequest: it can not be read, or is no hybrid model's.
    """
    config = read_json(file)
    if not isinstance(config, dict):
        raise InvalidRequest(f"{file} holds a JSON {type(config).__name__}, wanted an object")
    text = config.get("text_config", config)
    dtype = (
        given_dtype
        or text.get("dtype")
        or text.get("torch_dtype")
        or config.get("dtype")
        or "bfloat16"
    )
    if dtype not in _DTYPES:
        raise InvalidRequest(f"{file}: dtype is {dtype!r}, wanted one of {', '.join(_DTYPES)}")
    try:
        return _costs(text, str(dtype))
    except KeyError as error:
        kind = text.get("model_type")
        raise InvalidRequest(
            f"{file}: model_type is {kind!r}, with no {error}: wanted a hybrid model's, such as "
            "qwen3_next, qwen3_5_text or olmo_hybrid"
        ) from None


def _costs(config: dict[str, Any], dtype_name: str) -> Costs:
    types = config.get("layer_types") or [
        "full_attention" if (i + 1) % config["full_attention_interval"] == 0 else "linear_attention"
        for i in range(config["num_hidden_layers"])
    ]
    full = [i for i, kind in enumerate(types) if kind == "full_attention"]
    # The last FA layer is a source only where a linear layer comes after it.
    sources = len(full) - (full[-1] == len(types) - 1) if full else 0
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    dtype = Dtype[dtype_name.upper()]
    per_key = config["linear_num_value_heads"] // config["linear_num_key_heads"]
    dims = (config["linear_key_head_dim"], config["linear_value_head_dim"])
    shape = (
        len(types) - len(full),
        config["linear_num_key_heads"],
        per_key,
        *dims,
        config["linear_conv_kernel_dim"] - 1,
    )
    kv = kv_geometry(fa_layers=len(full), kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    hidden = hidden_geometry(sources=sources, hidden_size=config["hidden_size"], dtype=dtype)
    states = checkpoint_geometry(shape=shape, dtype=dtype, state_dtype=Dtype.FLOAT32)
    return Costs(*(geometry.payload_bytes(1) for geometry in (kv, hidden, states)))
