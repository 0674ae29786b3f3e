"""A fork of the nursery is what the command would have been: arguments, environment, folder, files, exit status."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests import preloaded
from tests.preloaded import MARK, MARKS, nursery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.slow

TIMEOUT_S = 60.0
RUN = "0123456789abcdef" * 2
SETTING = "tests.unit.preloaded.sets_a_variable"
DECLARING = "tests.unit.preloaded.declares_an_actor"
SCRIPT = """
import os, sys
has_own_group = os.getpgrp() == os.getpid()
print(os.getpid(), has_own_group, os.getcwd(), os.environ["GREETING"], *sys.argv[1:], "wave" in sys.modules, flush=True)
data = sys.stdin.read()
print(data, end="")
sys.exit(7)
"""
SPAWNING = """
import multiprocessing, os, sys
from setproctitle import setproctitle

def child(ended, sent):
    setproctitle("VLLM::EngineCore")
    sent.send((os.getpid(), os.getppid(), "wave" in sys.modules, os.environ["GREETING"]))
    ended.wait()

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    ended, (received, sent) = spawn.Event(), spawn.Pipe(duplex=False)
    process = spawn.Process(target=child, args=(ended, sent))
    process.start()
    print(os.getpid(), *received.recv(), flush=True)
    if sys.stdin.readline() == "end\\n":
        ended.set()
    else:
        process.kill()
    process.join()
    print(process.exitcode)
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start something by a client; the nursery's owner ends with the test, and the nursery and its folder with it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    folder = Path(tempfile.mkdtemp(prefix="pr-", dir="/tmp"))  # short: paths of sockets are limited to 107 bytes
    owner = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    nursery = preloaded.start(folder, owner.pid, {"first": ("wave", SETTING), "job": ("colorsys", DECLARING)})

    def start(
        *arguments: str, greeting: str = "hello", cwd: Path = tmp_path, niceness: int = 0, **more: str
    ) -> subprocess.Popen[str]:
        variables = os.environ | {"GREETING": greeting, **dict.fromkeys(MARKS, RUN)} | more
        pipe = subprocess.PIPE
        return subprocess.Popen(
            ["nice", "-n", str(niceness), preloaded.client(folder), *arguments],
            env=variables, cwd=cwd, stdin=pipe, stdout=pipe, text=True,
        )  # fmt: skip

    yield start
    assert nursery.poll() is None
    owner.communicate(timeout=TIMEOUT_S)
    assert nursery.wait(TIMEOUT_S) == 0
    assert not folder.exists()


def test_a_process_is_as_nice_as_its_client(started, tmp_path: Path) -> None:
    """Ray's workers are; an engine that is not outruns the agent loops and rewards of its job."""
    (tmp_path / "niceness.py").write_text("import os; print(os.getpriority(os.PRIO_PROCESS, 0))")
    output, _ = started(str(tmp_path / "niceness.py"), niceness=5).communicate(timeout=TIMEOUT_S)
    assert int(output) == os.getpriority(os.PRIO_PROCESS, 0) + 5


def test_a_process_has_the_clients_arguments_environment_folder_and_files(started, tmp_path: Path) -> None:
    script = str(tmp_path / "script.py")
    first = started(script, "a", "b")
    out, _ = first.communicate("typed", timeout=TIMEOUT_S)
    pid, *rest = out.split()
    # A process group of its own, because Ray kills the group of a worker that has ended.
    assert rest == ["True", str(tmp_path), "hello", "a", "b", "True", "typed"]
    assert int(pid) != first.pid
    assert first.returncode == 7
    (tmp_path / "other").mkdir()
    second = started(script, greeting="bye", cwd=tmp_path / "other")
    assert second.communicate("", timeout=TIMEOUT_S)[0].split()[2:] == [str(tmp_path / "other"), "bye", "True"]


@pytest.mark.parametrize("words", [["-m", "script"], ["-Wignore", "-c", SCRIPT]])
def test_a_module_and_code_are_run_as_python_does(started, tmp_path: Path, words: list[str]) -> None:
    out, _ = started(*words, "a").communicate("typed", timeout=TIMEOUT_S)
    assert out.split()[1:] == ["True", str(tmp_path), "hello", "a", "True", "typed"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_client_and_process_end_together_by_the_same_signal(started, tmp_path: Path, number: signal.Signals) -> None:
    for whom in ("client", "process"):
        client = started(str(tmp_path / "script.py"))
        process = psutil.Process(int(client.stdout.readline().split()[0]))
        assert [process.environ()[name] for name in MARKS] == [RUN] * len(MARKS)
        (client if whom == "client" else process).send_signal(number)
        assert client.wait(TIMEOUT_S) == -number
        assert psutil.wait_procs([process], timeout=TIMEOUT_S)[1] == []
        client.stdin.close()
        client.stdout.close()


def test_clients_that_were_killed_do_not_end_the_nursery(started, tmp_path: Path) -> None:
    """Ray kills a worker that is not there in a minute, and a nursery may import for longer on a busy machine."""
    code = "import os, sys; print(os.getppid(), sys.argv[0])"
    asking = started("-c", code)
    nursery = psutil.Process(int(asking.communicate("", timeout=TIMEOUT_S)[0].split()[0]))
    address = str(Path(asking.args[3]).parent / "socket")
    fields = {"argv": ["-c", "import time; time.sleep(1e6)"], "environment": {}, "folder": "/", "files": []}
    whole = json.dumps(fields | {"niceness": 0, "is_own": True}).encode()
    size = struct.pack("!I", len(whole))
    nursery.suspend()
    try:
        for sent in (b"", b"f", b"f" + size[:2], b"f" + size + whole[:9], b"f" + size + whole):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.connect(address)
                client.sendall(sent)
    finally:
        nursery.resume()
    assert started("-c", code).communicate("", timeout=TIMEOUT_S)[0].split() == [str(nursery.pid), "-c"]
    assert psutil.wait_procs(nursery.children(), timeout=TIMEOUT_S)[1] == []


@pytest.mark.parametrize(("said", "exitcode"), [("end\n", "0"), ("kill\n", str(-signal.SIGKILL))])
def test_what_a_worker_of_ray_spawns_is_a_fork_too_and_its_descendant(
    started, tmp_path: Path, said: str, exitcode: str
) -> None:
    (tmp_path / "default_worker.py").write_text(SPAWNING)
    client = started(str(tmp_path / "default_worker.py"))
    worker, child, parent, *rest = client.stdout.readline().split()
    assert rest == ["True", "hello"]
    descendants = psutil.Process(int(worker)).children(recursive=True)
    assert {int(child), int(parent)} <= {process.pid for process in descendants}
    assert psutil.Process(int(child)).environ()[MARK] == RUN
    assert " ".join(psutil.Process(int(child)).cmdline()).strip() == "VLLM::EngineCore"
    assert client.communicate(said, timeout=TIMEOUT_S)[0] == f"{exitcode}\n"
    assert psutil.wait_procs(descendants, timeout=TIMEOUT_S)[1] == []


def test_workers_of_one_job_have_a_nursery_that_ends_with_their_raylet(started) -> None:
    code = "import os, sys; print(os.getppid(), 'wave' in sys.modules, 'colorsys' in sys.modules, *words)"
    code = f"import os; words = os.environ['SET_BY_AN_IMPORT'].split(); {code}"
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as raylet:
        variables = {"RAY_RAYLET_PID": str(raylet.pid), "RAY_JOB_ID": "01000000"}
        said = [started("-c", code, **variables).communicate("", timeout=TIMEOUT_S)[0].split() for _ in range(2)]
        other = started("-c", code, **variables | {"RAY_JOB_ID": "02000000"}).communicate("", timeout=TIMEOUT_S)[0]
        first, *rest = started("-c", code).communicate("", timeout=TIMEOUT_S)[0].split()
        assert rest == ["True", "False", "yes"]
        assert [words[1:] for words in (*said, other.split())] == [["True", "True", "yes"]] * 3
        assert said[0][0] == said[1][0]
        assert len({said[0][0], other.split()[0], first}) == 3
        nurseries = [psutil.Process(int(words[0])) for words in (said[0], other.split())]
        assert [process.environ()[MARK] for process in nurseries] == [RUN, RUN]
    assert psutil.wait_procs(nurseries, timeout=TIMEOUT_S)[1] == []


def test_workers_of_one_job_do_not_name_their_calls_alike(started) -> None:
    """Ray's library draws the names; an actor that has two calls of one name aborts."""
    code = "import ray; print(ray.ObjectRef.from_random().hex())"
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as raylet:
        variables = {"RAY_RAYLET_PID": str(raylet.pid), "RAY_JOB_ID": "01000000"}
        names = [started("-c", code, **variables).communicate("", timeout=TIMEOUT_S)[0] for _ in range(2)]
    assert len(set(names)) == 2
    assert all(names)


def _with_word(word: str) -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cmdline"]) if word in (each.info["cmdline"] or ())]


def test_all_tests_share_one_nursery_which_ends_with_its_owner_whenever_that_ends(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as owner:
        (folder,) = {nursery(tmp_path, owner.pid, {"first": ()}) for _ in range(2)}
        ends_s = time.monotonic() + TIMEOUT_S
        # Linux tells the words of a command a moment after its start.
        while not (started := _with_word(str(folder))):
            assert time.monotonic() < ends_s
        assert len(started) == 1
    # The nursery may still import.
    assert psutil.wait_procs(started, timeout=TIMEOUT_S)[1] == []
    assert not folder.exists()
