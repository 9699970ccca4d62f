"""The process in which a job runs on text that is not trusted: what a model wrote, a template that was downloaded.

    python -s -P -B worker_process.py JOB LIMITS PARENT

JOB is a Python file with a function `load()`, which imports what the job needs and gives the function that does it,
from one JSON value to another. LIMITS is a JSON object: "seconds" a value, "bytes" of address space. PARENT is the id
of the process that asked. Frames on standard input and output are four bytes of length, the highest first, and JSON: a
request [id, value], a reply [id, true, result] or [id, false, what the job raised]; the first reply has id 0 and says
whether `load` worked. Standard library only, and nothing of this project: it is run as a file, in a process without
JAX.

None of this is a sandbox against code of the attacker's choosing. It bounds what parsing such text can cost, and
refuses what no parser needs: other processes, signals, sockets, the loader of C libraries, and writing files.
"""

import ctypes
import importlib.util
import json
import math
import os
import resource
import signal
import sys

MAX_FRAME = 2**24  # bytes
MAX_DETAIL = 300  # characters of what a job raised
_PR_SET_PDEATHSIG = 1
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_REFUSED = (
    "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.kill", "os.killpg", "os.remove",
    "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown", "pty.spawn",
    "shutil.", "signal.", "socket.", "subprocess.", "ctypes.",
)  # fmt: skip


def _refuse(event: str, arguments: tuple) -> None:
    """An audit hook; once added it stays."""
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING
    if writes or event.startswith(_REFUSED):
        raise PermissionError(f"{event} is refused in a worker")


def _limit(space: int) -> None:
    """Bytes of address space; no core dump, no file, no process (where the user is not root); few open files."""
    for kind, most in (
        (resource.RLIMIT_AS, space),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def _limit_time(seconds: float) -> None:
    """CPU seconds from now on, beyond which the kernel ends this process. In whole seconds: the parent is sooner."""
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = math.ceil(used + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _read(fd: int, n: int) -> bytes:
    data = bytearray()
    while len(data) < n:
        piece = os.read(fd, min(n - len(data), 2**16))
        if not piece:
            os._exit(0)  # the parent has closed the pipe, or is gone
        data += piece
    return bytes(data)


def _write(fd: int, reply: list) -> None:
    data = json.dumps(reply).encode()
    if len(data) > MAX_FRAME:
        data = json.dumps([reply[0], False, f"the result has {len(data)} bytes, more than {MAX_FRAME}"]).encode()
    data = len(data).to_bytes(4, "big") + data
    while data:
        data = data[os.write(fd, data) :]


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_DETAIL]


def main(job: str, limits: dict, parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # it died before the line above
    requests, replies, nowhere = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)  # what a library prints is no reply
    _limit(limits["bytes"])
    try:
        spec = importlib.util.spec_from_file_location("job", job)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        work = module.load()
    except Exception as error:
        _write(replies, [0, False, _said(error)])
        return
    sys.addaudithook(_refuse)
    _write(replies, [0, True, None])
    while True:
        request, value = json.loads(_read(requests, int.from_bytes(_read(requests, 4), "big")))
        _limit_time(limits["seconds"])
        try:
            reply = [request, True, work(value)]
        except Exception as error:
            reply = [request, False, _said(error)]  # the parent takes another process for the next value
        _write(replies, reply)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
