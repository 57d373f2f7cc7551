"""Python commands in processes forked from one that has imported the large libraries already.

Entry scripts need five seconds to import torch and Lightning, and a few hundred tests start one. Each command still
runs in its own process with its own arguments, working directory and output; only the imports are shared. Libraries
read environment variables while they are imported, so the fork server serves only the environment it was started with.
The README's commands (except those that only print help) and all ranks start without it.
"""

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

_server: tuple[subprocess.Popen, str] | None = None


def run(command: list[str], cwd: Path, env: dict[str, str], timeout: float) -> subprocess.CompletedProcess:
    """Like `subprocess.run(["python", *command], capture_output=True, text=True)`; the timeout kills the process."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(_address())
        connection.settimeout(timeout)
        request = {"command": command, "cwd": str(cwd), "env": env, "folder": folder}
        connection.sendall(json.dumps(request).encode() + b"\n")
        answers = connection.makefile()
        pid = int(answers.readline())
        try:
            code = int(answers.readline())
        except TimeoutError:
            os.killpg(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(command, timeout) from None
        out, err = (Path(folder, name).read_text(encoding="utf-8") for name in ("out", "err"))
    return subprocess.CompletedProcess(command, code, out, err)


def _address() -> str:
    """Where the fork server listens; the first call starts it, and it ends with this process."""
    global _server
    if _server is None:
        folder = tempfile.mkdtemp(prefix="warm_")
        address = os.path.join(folder, "socket")
        process = subprocess.Popen([sys.executable, __file__, address], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
        _server = process, address
        atexit.register(_end, process, folder)
        process.stdout.readline()
    return _server[1]


def _end(process: subprocess.Popen, folder: str) -> None:
    process.stdin.close()
    process.terminate()
    process.wait()
    subprocess.run(["rm", "-r", folder], check=False)


def _serve(address: str) -> None:
    import datasets  # noqa: F401
    import hydra  # noqa: F401
    import lightning.pytorch  # noqa: F401
    import pandas  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401

    import lmscale.training.pretrain  # noqa: F401

    gc.freeze()  # garbage collection would touch, and so copy, the shared pages
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:  # serves one request: starts the command as a child and waits for it
            listener.close()
            _answer(connection)
            os._exit(0)
        connection.close()
        while True:  # reap finished requests
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break


def _answer(connection: socket.socket) -> None:
    request = json.loads(connection.makefile().readline())
    pid = os.fork()
    if pid == 0:
        connection.close()
        _become(request)
    connection.sendall(f"{pid}\n".encode())
    connection.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())


def _become(request: dict) -> None:
    """Turn this process into the command; never returns."""
    import runpy

    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(os.path.join(request["folder"], name), os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = request["command"]
    sys.path[0] = os.path.dirname(sys.argv[0])
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


if __name__ == "__main__":
    _serve(sys.argv[1])
