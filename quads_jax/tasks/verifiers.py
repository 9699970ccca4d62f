"""How a response is judged by something else than equality of texts: in worker processes, never in this one."""

import collections
import threading
from collections.abc import Sequence
from pathlib import Path

from quads_jax.tasks.workers import StartError, Workers, cores

LONGEST = 2**20  # characters of a response; a longer one is wrong


class Verifier:
    """Judges [reference, response] by the job of a file (see `worker_process`), with `seconds` for each.

    A response whose worker runs out of time or dies is wrong, and counted. `requirement` is what pip needs to install.
    """

    def __init__(self, job: Path, requirement: str, *, seconds: float = 3.0, size: int | None = None):
        self.requirement = requirement
        self._workers = Workers(job, seconds=seconds, size=size or cores())
        self._counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def require(self) -> None:
        """Raises ValueError, with the command that helps, when the job cannot be loaded."""
        try:
            self._workers.start()
        except StartError as error:
            raise ValueError(
                f"cannot be started ({error}): pip install '{self.requirement}', in this environment"
            ) from error

    def are_right(self, references: Sequence[str], responses: Sequence[str]) -> list[bool]:
        """Whether each response is right. Raises ValueError as `require` does."""
        right = [False] * len(responses)
        asked = []
        for i, (reference, response) in enumerate(zip(references, responses, strict=True)):
            right[i] = reference == response
            if not right[i] and 0 < len(response) <= LONGEST:
                asked.append(i)
        if not asked:
            return right
        self.require()
        outcomes = self._workers.run([[references[i], responses[i]] for i in asked])
        for i, outcome in zip(asked, outcomes, strict=True):
            right[i] = outcome.value is True
        with self._lock:
            self._counts.update(outcome.fault for outcome in outcomes if outcome.fault)
        return right

    def figures(self) -> dict[str, float]:
        """Timeouts and crashes since the last call."""
        with self._lock:
            counts, self._counts = self._counts, collections.Counter()
        return {"verify/timeouts": counts["timeout"], "verify/crashes": counts["crash"]}

    def close(self) -> None:
        """Ends the workers; the next response starts new ones."""
        self._workers.close()


VERIFIERS = {
    "strict": None,  # equal texts
    "math_verify": Verifier(Path(__file__).with_name("math_answers.py"), "math-verify[antlr4_13_2]>=0.9,<0.10"),
}
