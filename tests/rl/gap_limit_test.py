"""The alarm's limit in the update: two programs, with and without it, whose bits agree when compiled as usual."""

import functools

import jax
import numpy as np

from quads_jax.rl.update import update
from tests.rl.update_options_test import case
from tests.rl.update_test import CFG, MAX_LEN, SGD, run, score


def test_a_gap_above_the_limit_applies_nothing_but_counts_the_step():
    state, batch = case()
    plain, metrics = run(CFG, state, batch, SGD)
    gap = float(metrics["gap/mean"])
    assert "gap/held" not in metrics
    for limit, held in ((gap, 0.0), (np.nextafter(np.float32(gap), np.float32(0)), 1.0)):
        program = functools.partial(update, score=score, optimizer=SGD, cfg=CFG, max_len=MAX_LEN)
        new, shown = jax.jit(functools.partial(program, gap_limit=float(limit)))(state, batch)
        assert shown.pop("gap/held") == held and new.step == state.step + 1
        jax.tree.map(np.testing.assert_array_equal, shown, metrics)
        kept = state if held else plain
        jax.tree.map(np.testing.assert_array_equal, (new.params, new.opt_state), (kept.params, kept.opt_state))
