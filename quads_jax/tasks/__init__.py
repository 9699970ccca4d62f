"""Tasks with verifiable answers. A new one is one file and one line here."""

from quads_jax.tasks.base import Item, Task
from quads_jax.tasks.chain_sum import ChainSum
from quads_jax.tasks.jsonl import Jsonl
from quads_jax.tasks.mixture import Mixture, mean_by_task
from quads_jax.tasks.prefetch import Prefetch
from quads_jax.tasks.reasoning_gym import ReasoningGym
from quads_jax.tasks.tokenizer import CharTokenizer

TASKS = {"chain_sum": ChainSum, "reasoning_gym": ReasoningGym, "mixture": Mixture, "jsonl": Jsonl}

__all__ = [
    "TASKS",
    "CharTokenizer",
    "ChainSum",
    "Item",
    "Jsonl",
    "Mixture",
    "Prefetch",
    "ReasoningGym",
    "Task",
    "mean_by_task",
]
