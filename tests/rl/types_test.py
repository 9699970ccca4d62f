"""RolloutBatch and TrainState are pytrees whose every field survives jit."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest

from quads_jax.rl.types import RolloutBatch, TrainState


def _values(cls):
    """One distinct array a field, so that a swapped or dropped field shows."""
    return cls(**{field.name: jnp.full((2, 3), i) for i, field in enumerate(dataclasses.fields(cls))})


@pytest.mark.parametrize("cls", [RolloutBatch, TrainState])
def test_every_field_is_a_leaf_and_survives_jit(cls):
    value = _values(cls)
    assert len(jax.tree.leaves(value)) == len(dataclasses.fields(cls))
    chex.assert_trees_all_equal(jax.jit(lambda v: v)(value), value)


@pytest.mark.parametrize("cls", [RolloutBatch, TrainState])
def test_tree_map_accepts_leaves_that_are_no_arrays(cls):
    # Constructor validation would break this: shardings and shapes are mapped over the same trees.
    shapes = jax.tree.map(lambda x: x.shape, _values(cls), is_leaf=lambda x: isinstance(x, jax.Array))
    assert all(getattr(shapes, field.name) == (2, 3) for field in dataclasses.fields(cls))


def test_values_are_frozen_and_replace_copies():
    state = _values(TrainState)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.step = 1
    assert state.replace(step=9).step == 9
    assert state.step.shape == (2, 3)


def test_unused_quant_adds_no_leaf():
    assert len(jax.tree.leaves(_values(TrainState).replace(quant={}))) == 4
