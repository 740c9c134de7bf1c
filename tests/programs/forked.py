"""A process that has imported what takes long to import, and runs each program in a fork of itself.

    with Forked() as forked:
        print(forked.run("page.py", cwd=folder, warn=["error"]))

A program is what `python page.py` runs: `__main__`, its folder first in the path, its own environment, output and
end. While it runs, `ringmap` as a command in its `.bin` (see `console`) is a fork of the same process.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from pathlib import Path

from tests import ROOT
from tests.programs.console import LISTENER

PRELOADED = [
    "PIL.Image",
    "gymnasium",
    "h5py",
    "matplotlib.figure",
    "numcodecs",
    "numpy",
    "pydantic",
    "rich.console",
    "ringmap.buffers.replay",
    "ringmap.cli.app",
    "ringmap.cli.arguments",
    "ringmap.formats.catalog.load",
    "ringmap.formats.hdf5",
    "torch",
    "torch._dynamo",
    "torch.utils.data",
    "typer",
    "typer._adapters",
    "zarr",
]


class Forked:
    """The process, seen from the tests."""

    def __enter__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.programs.forked"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_):
        # Not at the end of its input: a process that a test forked and left alive holds that open.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.close()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.stdout.close()

    def run(self, script, *words, cwd, warn=()):
        """Run a program to its end and return what it printed; a failure shows the same."""
        script, told = Path(cwd, script), Path(cwd, ".told")
        job = {
            "argv": [str(script), *words],
            "cwd": str(cwd),
            "env": dict(os.environ),
            "warn": list(warn),
            "told": str(told),
        }
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], 900)
        if not ready:
            self.process.kill()
        code = self.process.stdout.readline().strip()
        printed = told.read_text()
        told.unlink()
        assert code == "0", f"{script} gave {code or 'nothing'}\n{printed}"
        return printed


# -- in the process ----------------------------------------------------------------------------------


def serve():
    """Run one job after the other in forks; a fork returns its job, and the process itself None."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    folder = tempfile.mkdtemp()  # with a short path, as a socket must have
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/s")
    listener.listen()
    for line in iter(lambda: sys.stdin.readline().strip(), ""):  # the end is an empty line
        job = json.loads(line)
        job["env"][LISTENER] = f"{folder}/s"
        ended, said = os.pipe()
        if forked(lambda code, said=said: os.write(said, b"%d" % code)):
            return job
        os.close(said)
        while ended not in select.select([listener, ended], [], [])[0]:
            asking, _ = listener.accept()
            data, fds, _, _ = socket.recv_fds(asking, 1 << 20, 3)
            if forked(lambda code, asking=asking: asking.send(b"%d" % code)):
                return json.loads(data) | {"fds": fds}
            asking.close()
            for fd in fds:
                os.close(fd)
        print(os.read(ended, 9).decode(), flush=True)
        os.close(ended)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    shutil.rmtree(folder)
    return None


def forked(tell):
    """Return True in a new process, and False here; another process waits for its end and tells its code."""
    if os.fork():
        return False
    child = os.fork()
    if not child:
        return True
    tell(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(0)


def become(job):
    """Be the program of a job; its end is this process's."""
    if "fds" not in job:
        told = os.open(job["told"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        job["fds"] = [os.open(os.devnull, os.O_RDONLY), told, told]
    for number, fd in enumerate(job["fds"]):
        os.dup2(fd, number)
    for fd in {*job["fds"]}:
        os.close(fd)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    if "module" in job:
        sys.argv[1:] = job["argv"]
        sys.path[0] = job["cwd"]
        runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = job["argv"]
    script = sys.argv[0]
    sys.path[0] = os.path.dirname(script)
    sys.warnoptions[:] = job["warn"]
    warnings.resetwarnings()
    warnings._processoptions(sys.warnoptions)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = script
    exec(compile(Path(script).read_text(), script, "exec"), main.__dict__)


def end(job):
    """Be the program of a job, and end as a process of `multiprocessing` does: what lives at the end is left to the
    system.

    To take a hundred thousand objects apart is to copy the memory that they share with the first process.
    """
    code = 0
    try:
        become(job)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code == 1 and error.code != 1:
            print(error.code, file=sys.stderr)
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    if (given := serve()) is not None:
        end(given)
