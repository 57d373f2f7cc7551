"""Processes forked from one that has imported the large libraries already.

A fresh interpreter needs five seconds to import torch and Lightning, and several hundred tests start commands or ranks.
multiprocessing's fork server imports the libraries once per test process. It has no other threads, and each process
that it forks has the arguments, environment, working directory, input and output that a spawned one would have.
Libraries read some environment variables while they are imported; tests that change those start Python themselves, as
do the README's commands and the tests that start ranks by torchrun or stop them with signals.
"""

import atexit
import gc
import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from multiprocessing import forkserver, reduction
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_LIBRARIES = (
    "tests.process_facts",
    "datasets",
    "hydra",
    "hypothesis",
    "lightning.pytorch",
    "pandas",
    "pytest",
    "seaborn",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.elastic.multiprocessing.errors",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "lmscale.hugging_face.conversion",
    "lmscale.corpus.cleaning",
    "lmscale.corpus.running",
    "lmscale.finetune.finetuning",
    "lmscale.training.pretrain",
)


_HERE = Path(__file__).parent


class WarmProcess(ForkServerProcess):
    """A forked process with this one's environment, input and output, which ends with this one.

    It may start further processes at the same server.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def __getstate__(self) -> dict:
        """The state that travels to the new process, with duplicates of stdin, stdout and stderr."""
        return self.__dict__ | {"_files": [reduction.DupFd(number) for number in range(3)]}

    def start(self) -> None:
        """Start the process, and the server if it does not run."""
        context.set_forkserver_preload(list(_LIBRARIES))  # tested code may have named others
        super().start()

    def run(self) -> None:
        """Run the target."""
        for number, duplicate in enumerate(self._files):
            os.dup2(duplicate.detach(), number)
        _take_environment(self._environment)
        forkserver._forkserver.ensure_running = lambda: None  # its address is known, but it is not a child of ours
        gc.freeze()  # garbage collection would touch, and so copy, the shared pages
        threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
        super().run()


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


context = multiprocessing.get_context("forkserver")
context.Process = WarmProcess


def run(
    command: list[str],
    cwd: Path,
    env: dict[str, str],
    timeout: float,
    input: bytes = b"",
    file_limit: int = resource.RLIM_INFINITY,
) -> subprocess.CompletedProcess:
    """Like `subprocess.run(["python", *command], capture_output=True)`, with the output as text.

    Ranks that the command starts are forked from the same server. The timeout kills the command and them. The kernel
    refuses to write more than `file_limit` bytes into any file of the command's own process, as on a full disk.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "in").write_bytes(input)
        process = context.Process(target=_become, args=(command, str(cwd), env, folder, file_limit))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(command, timeout)
        out, err = (Path(folder, name).read_text(encoding="utf-8") for name in ("out", "err"))
    return subprocess.CompletedProcess(command, process.exitcode, out, err)


def _take_environment(env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # chosen from TMPDIR again


def _become(command: list[str], cwd: str, env: dict[str, str], folder: str, file_limit: int) -> None:
    """Turn this process into the command; never returns."""
    os.setsid()
    os.chdir(cwd)
    _take_environment(env)
    os.dup2(os.open(os.path.join(folder, "in"), os.O_RDONLY), 0)
    sys.stdin = open(0, closefd=False)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(os.path.join(folder, name), os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    sys.argv = command
    # Without the folders that pytest added, but with this module's, which spawned processes import.
    own = [path for path in sys.path if path and Path(path) != _HERE.parent and not Path(path).is_relative_to(_HERE)]
    sys.path[:] = [os.path.dirname(command[0]), *own, str(_HERE)]
    multiprocessing.context._concrete_contexts["spawn"] = context
    code = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
    # Python's exit without the teardown of a few thousand modules.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
