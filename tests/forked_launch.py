"""Runs launch.py for many lists of arguments, each in its own process: a fork of one that has imported the library.

python -m tests.forked_launch < LISTS.json       # prints [{"returncode": .., "stdout": .., "stderr": ..}, ..]
"""

import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path


def runs(lists: list[list[str]]) -> list[subprocess.CompletedProcess]:
    """What `python launch.py *arguments` gives in the project's folder on the CPU, for every list of arguments."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.forked_launch"], input=json.dumps(lists), stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).resolve().parents[1], env=os.environ | {"JAX_PLATFORMS": "cpu"}, timeout=300, check=True,
    )  # fmt: skip
    return [subprocess.CompletedProcess(a, **found) for a, found in zip(lists, json.loads(done.stdout), strict=True)]


def _run(arguments: list[str]) -> dict:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.argv = ["launch.py", *arguments]
            runpy.run_path("launch.py", run_name="__main__")
            sys.exit()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = [(file.seek(0), file.read())[1] for file in (out, err)]
        return {"returncode": code, "stdout": texts[0], "stderr": texts[1]}


if __name__ == "__main__":
    import quads_jax.train  # noqa: F401  of the imports all but the command line's own

    print(json.dumps([_run(arguments) for arguments in json.load(sys.stdin)]))
