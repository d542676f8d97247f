"""Tensors only: which layers a hidden feeds, and the states that rows of it lead to.

`groups` splits a model into replay groups, `conv` and `gated_delta` hold the formulas of a Gated
DeltaNet layer, `state_only` runs such a layer for its states alone, `linear_state` and
`hidden_rows` are what goes into and comes out of a replay.
"""
