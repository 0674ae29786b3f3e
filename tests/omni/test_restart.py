"""A job of the CPU recipe whose engine dies twice, which is stopped, and whose command is typed again.

No group of images is trained twice or left out: which ones a step of MixGRPO trains does not depend on the machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from partial_rollout.diffusion.books import drawn
from partial_rollout.diffusion.job import read_prompts
from partial_rollout.observability.events import (
    BatchTaken,
    CheckpointSaved,
    EventReader,
    Fault,
    GateMoved,
    PhaseBegan,
    ProcessFound,
    SegmentEnded,
    StepEnded,
    WeightsUpdated,
)
from tests import preloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

WAIT_S = 150.0
"""For each thing that is to happen, on a machine that is busy with other tests."""
LOOK_S = 0.1
BATCH, IMAGES = 2, 2
NEVER = 10_000
"""Training steps of a run that is ended before."""


class Run:
    """The recipe's command, and what its events tell."""

    def __init__(self, command: list[str], environment: dict[str, str], folder: Path) -> None:
        self.command, self.environment, self.folder = command, environment, folder
        self.process: subprocess.Popen[bytes] | None = None
        self.reader = EventReader(folder / "events")
        self.events: list[Any] = []
        """Events of the last start."""

    def start(self, steps: int) -> None:
        self.reader.read()
        self.events = []
        log = (self.folder.parent / "out.log").open("ab")
        self.process = subprocess.Popen(
            [*self.command, f"trainer.total_training_steps={steps}"],
            env=self.environment, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        log.close()

    def until(self, what: str, happened: Callable[[list[Any]], bool]) -> None:
        """Wait for something in the events of the last start."""
        deadline_s = time.monotonic() + WAIT_S
        while True:
            ended = self.process is None or self.process.poll() is not None
            self.events += self.reader.read()
            if happened(self.events):
                return
            assert not ended, f"the run ended before {what}: {self.told()}"
            assert time.monotonic() < deadline_s, f"no {what} within {WAIT_S:g} s: {self.told()}"
            time.sleep(LOOK_S)

    def until_steps(self, number: int) -> None:
        """Wait for so many steps after what has happened so far."""
        already = len(self.of(StepEnded))
        self.until(f"{number} more steps", lambda events: len(self.of(StepEnded)) >= already + number)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def ends(self) -> int:
        assert self.process is not None
        code = self.process.wait(WAIT_S)
        self.events += self.reader.read()
        return code

    def kill_server(self) -> None:
        """Kill the image server that was found last, and wait until its engine's processes have ended too."""
        server = psutil.Process(self.of(ProcessFound)[-1].pid)
        engine = server.children(recursive=True)
        assert engine
        server.kill()
        _, alive = psutil.wait_procs(engine, timeout=WAIT_S)
        assert not alive

    def told(self) -> str:
        log = self.folder / "run.log"
        return (log.read_text()[-3000:] if log.exists() else "") + (self.folder.parent / "out.log").read_text()[-1000:]

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(WAIT_S)


@pytest.fixture
def run(repository: Path, nursery: Path, tiny_qwen_image: Path, tmp_path: Path) -> Iterator[Run]:
    interpreter = tmp_path / "venv" / "omni" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.symlink_to(preloaded.client(nursery))
    settings = {"VENV": str(tmp_path / "venv"), "SKIP_SETUP": "1", "OUTPUT_DIR": str(tmp_path / "run")}
    settings |= {"ALGORITHM": "mix_grpo", "MODEL_PATH": str(tiny_qwen_image)}
    recipe = repository / "partial_rollout" / "run" / "run_qwen_image_flow_grpo_cpu.sh"
    overrides = [f"trainer.train_batch_size={BATCH}", f"rollout.n={IMAGES}", "trainer.num_pictures=0"]
    command = ["bash", str(recipe), *overrides, "trainer.save_freq=2", "trainer.save_minutes=null"]
    run = Run(command, os.environ | preloaded.environment_of_jobs(nursery) | settings, tmp_path / "run")
    yield run
    run.close()


def test_engines_die_and_the_run_is_stopped_and_typed_again(run: Run, repository: Path):
    run.start(NEVER)
    run.until_steps(1)
    run.kill_server()  # while images are generated, or whatever comes then
    run.until("the server that is started again", lambda events: len(run.of(ProcessFound)) == 2)
    # Two batches may have been whole before; the third one is by the new server, which an update reaches then.
    run.until_steps(3)
    closed = len(run.of(GateMoved))
    run.until("a training", lambda events: any(not each.is_open for each in run.of(GateMoved)[closed:]))
    run.kill_server()
    run.until("the server that is started again", lambda events: len(run.of(ProcessFound)) == 3)
    run.until_steps(1)
    assert [(each.role, each.name, each.pid) for each in run.of(Fault)] == [
        ("image server", "0", each.pid) for each in run.of(ProcessFound)[:2]
    ]
    assert run.process is not None
    run.process.terminate()
    assert run.ends() == 130, run.told()
    first, saved = run.events, run.of(CheckpointSaved)[-1].step
    assert saved == max(each.step for each in run.of(StepEnded))

    run.start(saved + 3)
    assert run.ends() == 0, run.told()
    assert f"goes on from the checkpoint of step {saved}" in (run.folder / "run.log").read_text()
    steps = [json.loads(line)["step"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, saved + 4))
    _check_books(first, run.events, len(steps), saved, len(read_prompts(str(_prompts(repository)))))
    # Engines have the checkpoint's weights before they are asked for an image.
    told = [each for each in run.events if isinstance(each, PhaseBegan | WeightsUpdated)]
    assert isinstance(told[0], WeightsUpdated)
    assert told[0].version == saved
    assert min(each.version for each in run.of(SegmentEnded)) == saved


def _prompts(repository: Path) -> Path:
    return repository / "partial_rollout" / "run" / "tiny_qwen_image" / "prompts.txt"


def _check_books(first: list[Any], second: list[Any], num_steps: int, saved: int, num_prompts: int) -> None:
    """What was trained is what a run trains that nobody disturbs: groups in order, with their prompts."""
    taken = [each for each in first if isinstance(each, BatchTaken) and each.step <= saved]
    taken += [each for each in second if isinstance(each, BatchTaken)]
    wanted = [
        (step, [(number, drawn(0, number, num_prompts=num_prompts, num_images=IMAGES)[0]) for number in numbers])
        for step in range(1, num_steps + 1)
        for numbers in [range((step - 1) * BATCH, step * BATCH)]
    ]
    found = [
        (each.step, [(_number(uid), int(row)) for uid, row in zip(each.uids, each.source_index, strict=True)])
        for each in taken
    ]
    assert found == wanted


def _number(uid: str) -> int:
    return int(uid.removeprefix("group-"))
