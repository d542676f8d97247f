"""UCM PR 1130: a state of a later token was loaded, and those inside a block were garbage."""

import pytest
from case_helpers import WAIT_S, ask, prompt
from tiny_models import tiny_qwen

from tailreplay.connector.client import StoreClient
from tailreplay.connector.hf_model import HybridModel
from tailreplay.connector.load import Load, LoadFailed
from tailreplay.connector.payload import PayloadCodec
from tailreplay.proto import store_pb2 as pb
from tailreplay.store.chain import PrefixChain
from tailreplay.store.lane_wire import RecordKind
from tailreplay.store.tokens import extended_tokens

pytestmark = pytest.mark.model

TOKENS = prompt(400)


class Steps(list):
    """What a store has sent, to be read again."""

    def cancel(self):
        pass


@pytest.mark.parametrize("kind", [pb.KIND_CHECKPOINT, pb.KIND_HIDDEN])
@pytest.mark.parametrize("shift", [-64, -1, 1, 64])
def test_frames_say_their_position_and_another_one_is_refused(store, engine, kind, shift):
    ask(engine, TOKENS)
    ids = extended_tokens(TOKENS)
    with StoreClient(store.address, lanes=False) as client:
        answer = client.match(engine.namespace, ids, timeout_s=WAIT_S)
        state = answer.checkpoints[-1]
        first = state.token - 1 if kind == pb.KIND_CHECKPOINT else 128
        wanted = pb.Range(
            kind=kind,
            first_token=first,
            end_token=first + 1 if kind == pb.KIND_CHECKPOINT else 192,
            prefix_hash=state.prefix_hash if kind == pb.KIND_CHECKPOINT else b"",
        )
        stream = client.fetch(engine.namespace, answer.leaf, [wanted], timeout_s=WAIT_S)
        steps = Steps(stream)
    (at,) = (i for i, step in enumerate(steps) if step.record.kind is RecordKind.ROWS)
    record = steps[at].record
    assert record.first_token == first

    def load():
        load = Load(
            [wanted],
            PayloadCodec(HybridModel(tiny_qwen()).dims).geometry,
            PrefixChain(engine.namespace, ids),
            stall_timeout_s=WAIT_S,
            on_event=lambda name, _: None,
        )
        load.run(steps)
        return load.wait(0)

    assert load().any()
    steps[at] = steps[at]._replace(record=record._replace(first_token=first + shift))
    with pytest.raises(LoadFailed) as failure:
        load()
    assert failure.value.reason == "integrity"
