"""SIGTERM and errors leave a last checkpoint, and the metrics of steps that are taken again are taken out."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.diffusion.config import TrainerConfig
from partial_rollout.errors import EngineError, RunStopped
from partial_rollout.main_diffusion import open_metrics, train_until_stopped
from partial_rollout.observability.events import EventWriter

if TYPE_CHECKING:
    from pathlib import Path

WAIT_S = 20.0


class FakeJob:
    """Takes two steps; in the third, `third` happens."""

    def __init__(self, third: Any, version: int = 0) -> None:
        self.version, self.saved_step, self.third, self.told = version, version, third, list[str]()
        self.latest: list[Any] = []

    async def begin(self) -> None:
        self.told.append("begin")

    async def step(self) -> dict[str, float]:
        if self.version == 2:
            await self.third()
        self.version += 1
        names = ("generate", "interrupt", "train", "update", "step")
        rates = {"reward/mean": 0.0, "partial_rollout/resumed": 0, "partial_rollout/stale_step_share": 0.0}
        return {"step": self.version, **rates, **{f"timing/{name}_s": 0.0 for name in names}}

    async def save_if_due(self) -> None:
        pass

    async def save_last(self) -> bool:
        self.told.append(f"save {self.version}")
        self.saved_step = self.version
        return True

    async def end(self) -> None:
        self.told.append("end")

    async def close(self) -> None:
        self.told.append("close")

    def save(self) -> str:
        return "folder"


def run(job: FakeJob, folder: Path) -> None:
    trainer = TrainerConfig(output_dir=str(folder), reward="a.b", total_training_steps=3, num_pictures=0)

    async def bounded() -> None:
        training: Any = train_until_stopped(job, trainer, EventWriter(None, "trainer"))  # pyright: ignore
        await asyncio.wait_for(training, WAIT_S)

    before = signal.getsignal(signal.SIGTERM)
    try:
        asyncio.run(bounded())
    finally:
        signal.signal(signal.SIGTERM, before)


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends(tmp_path: Path, number: signal.Signals):
    async def third() -> None:
        os.kill(os.getpid(), number)
        await asyncio.Event().wait()

    job = FakeJob(third)
    with pytest.raises(RunStopped, match="interrupted in step 3; the same command goes on from step 2"):
        run(job, tmp_path)
    assert job.told == ["begin", "save 2", "close"]
    assert steps(tmp_path) == [1, 2]


def test_an_error_saves_and_is_raised(tmp_path: Path):
    async def third() -> None:
        raise EngineError("gone")

    job = FakeJob(third)
    with pytest.raises(EngineError, match="gone"):
        run(job, tmp_path)
    assert job.told == ["begin", "save 2", "close"]


def test_a_run_whose_last_step_ends_while_a_signal_is_heeded_is_complete(tmp_path: Path):
    saving = asyncio.Event()

    async def third() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await saving.wait()

    class Job(FakeJob):
        async def save_last(self) -> bool:
            saving.set()
            await asyncio.wait([task for task in asyncio.all_tasks() if task.get_name() == "training"])
            return await super().save_last()

    job = Job(third)
    run(job, tmp_path)
    assert job.told == ["begin", "end", "save 3", "close"]


def test_a_run_that_ends_by_itself_saves_nothing_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    async def third() -> None:
        pass

    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    job = FakeJob(third, version=2)
    run(job, tmp_path)
    assert job.told == ["begin", "end", "close"]
    assert steps(tmp_path) == [1, 2, 3]
    assert f"goes on from the checkpoint of step 2 in {tmp_path}" in capsys.readouterr().out


def test_lines_of_steps_that_are_taken_again_are_left_out(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    os.utime(path, (5, 5))
    open_metrics(path, 1).close()
    assert path.read_text() == '{"step": 1}\n'
    assert path.stat().st_mtime == 5  # `watch` reads a file that is newer than the start for news
    open_metrics(tmp_path / "new.jsonl", 0).close()
    assert (tmp_path / "new.jsonl").read_text() == ""
