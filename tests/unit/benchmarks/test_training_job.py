"""Jobs that a benchmark starts, and the options of its modes."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from benchmarks import training_job as module
from benchmarks.training_job import DRAFTED, LOG, METRICS, RUNNING, EngineCounts, read_steps, training_job

if TYPE_CHECKING:
    from pathlib import Path


def test_a_job_is_over_when_who_waits_for_it_fails(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        training_job([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path) as job,
    ):
        raise KeyboardInterrupt
    assert job.poll() is not None


def test_a_job_has_its_log_and_no_metrics_of_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text('{"data": {"timing_s/gen": 1.0}}\n')
    with training_job([sys.executable, "-c", "print('said'); raise SystemExit(3)"], tmp_path) as job:
        job.wait(60)
    assert (read_steps(tmp_path), (tmp_path / LOG).read_text()) == ([], "said\n")
    assert job.returncode == 3


def test_what_a_job_that_died_has_left_behind_is_ended(tmp_path: Path) -> None:
    """Ray's processes are in sessions of their own, and outlive a driver that was killed; some heed no SIGTERM.

    They have titles, which are written over what they were started with where nothing is said against it.
    """
    title = "from setproctitle import setproctitle; setproctitle('VLLM::EngineCore')"
    sleeper = f"{title}; import time; print(flush=True); time.sleep(600)"
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"  # inherited
    options = f"[sys.executable, '-c', {sleeper!r}], start_new_session=True, stdout=subprocess.PIPE"
    start = f"import signal, subprocess, sys; {deaf}; left = subprocess.Popen({options}); left.stdout.readline()"
    start += "; print(left.pid)"
    with training_job([sys.executable, "-c", f"{start}; sys.exit(1)"], tmp_path) as job:
        job.wait(60)
        left = psutil.Process(int((tmp_path / LOG).read_text()))
    assert not left.is_running()


ENGINE_SERVER = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(sys.argv[1].encode())

server = HTTPServer(("127.0.0.1", 0), Handler)
code = "import time; print(flush=True); time.sleep(600)"
engine = subprocess.Popen([sys.executable, "-c", code, "VLLM::EngineCore"], stdout=subprocess.PIPE)
engine.stdout.readline()  # Linux tells the words of a command a moment after its start
print("listens", flush=True)
server.serve_forever()
"""
"""A process that has an engine's title below it, and a metrics page."""


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({RUNNING: 3.0, DRAFTED[2]: 5.0}, [6.0]),
        ({RUNNING: 3.0, **dict(zip(DRAFTED, (2.0, 1.0, 5.0), strict=True))}, [6.0, 4.0, 2.0, 10.0]),
        ({"other": 1.0}, []),
    ],
)
def test_counts_of_a_jobs_engines_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, float], expected: list[float]
) -> None:
    monkeypatch.setattr(module, "READ_TIMEOUT_S", 60.0)  # a page that is late is left out, also on a busy machine
    text = "".join(f'{name}{{engine="{i}"}} {value}\n' for name, value in values.items() for i in (0, 1))
    counts, mark = EngineCounts(), "a-job-of-this-test"
    with training_job([sys.executable, "-c", ENGINE_SERVER, text], tmp_path, mark=mark) as job:
        ends_s = time.monotonic() + 60
        while "listens" not in (tmp_path / LOG).read_text():
            assert job.poll() is None
            assert time.monotonic() < ends_s
        counts.find(mark)
        assert counts.sample() == expected
