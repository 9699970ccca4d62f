"""A job for `workers`: does whatever it is told, in the process that must survive it or be ended."""

import os
import resource
import socket
import subprocess
import sys
import time


def load():
    def work(value):
        command, argument = value
        return DO[command](argument)

    return work


def _everywhere(data):
    for fd in range(3, 20):
        try:
            os.write(fd, data.encode())
        except OSError:
            pass
    return "written"


def _forge(data):
    _everywhere(data)
    time.sleep(60)


def _forever(_):
    while True:
        pass


def _limits(_):
    names = ("RLIMIT_AS", "RLIMIT_CORE", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_CPU")
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


def _self(_):
    return {
        "pid": os.getpid(),
        "group": os.getpgid(0),
        "session": os.getsid(0),
        "environment": dict(os.environ),
        "modules": sorted(sys.modules),
        "path": sys.path,
        "hash": hash("text"),
        "cwd": os.getcwd(),
    }


def _burn(seconds):
    while time.process_time() < seconds:
        pass
    return seconds


DO = {
    "echo": lambda value: value,
    "self": _self,
    "limits": _limits,
    "forever": _forever,
    "burn": _burn,
    "sleep": lambda seconds: time.sleep(seconds) or os.getpid(),
    "memory": lambda size: len(bytearray(size)),
    "exit": os._exit,
    "abort": lambda _: os.abort(),
    "everywhere": _everywhere,
    "forge": _forge,
    "print": lambda text: print(text, flush=True) or sys.stderr.write(text),
    "evaluate": lambda text: eval(text),
    "recurse": lambda n: eval("(" * n + "1" + ")" * n),
    "raise": lambda text: [][text],
    "stop": lambda _: sys.exit(0),
    "long": lambda n: "x" * n,
    "connect": lambda _: socket.socket(),
    "run": lambda command: subprocess.run(command),
}
