"""Tasks with verifiable answers. A new one is one file and one line here."""

from quads_jax.tasks.base import Item, Task
from quads_jax.tasks.chain_sum import ChainSum
from quads_jax.tasks.tokenizer import CharTokenizer

TASKS = {"chain_sum": ChainSum}

__all__ = ["TASKS", "CharTokenizer", "ChainSum", "Item", "Task"]
