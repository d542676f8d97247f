import pytest

from tailreplay.replay.groups import ReplayGroup, replay_groups

L, F = "linear_attention", "full_attention"


@pytest.mark.parametrize(
    ("layer_types", "groups"),
    [
        pytest.param(
            [L, L, L, F] * 2, [(None, (0, 1, 2)), (3, (4, 5, 6))], id="last FA layer feeds nothing"
        ),
        pytest.param([F, L, L, F], [(0, (1, 2))], id="no leading group behind a first FA layer"),
        pytest.param([L, F, F, L], [(None, (0,)), (2, (3,))], id="FA behind FA feeds nothing"),
        pytest.param([L, L], [(None, (0, 1))], id="no FA layer at all"),
        pytest.param([L, F, L], [(None, (0,)), (1, (2,))], id="last group ends with the model"),
    ],
)
def test_groups_follow_the_layer_types(layer_types, groups):
    assert replay_groups(layer_types) == tuple(ReplayGroup(*group) for group in groups)


def test_every_linear_layer_is_in_exactly_one_group():
    layer_types = [L, L, F, F, L, F, L, L, L, F]
    held = [layer for group in replay_groups(layer_types) for layer in group.linear_layers]
    assert held == [layer for layer, name in enumerate(layer_types) if name == L]


def test_an_unknown_layer_type_is_named():
    with pytest.raises(ValueError, match="layer 1 has type 'sliding_attention', wanted"):
        replay_groups([L, "sliding_attention"])


@pytest.mark.parametrize("layer_types", [[], [F, F]])
def test_a_model_without_linear_layers_is_refused(layer_types):
    with pytest.raises(ValueError, match=f"none of {len(layer_types)} layers"):
        replay_groups(layer_types)
