"""What a worker logs of its trajectories, and how it replays them: the same outputs, without engine and reward."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from partial_rollout.agent_loop import rollout_log as worker_log
from partial_rollout.agent_loop import worker as worker_module
from partial_rollout.agent_loop.rollout_log import LogFolder, WorkerLog, decode_output, encode_finished
from partial_rollout.agent_loop.trajectory import Trajectory
from partial_rollout.agent_loop.worker import PartialRolloutAgentLoopWorker, summaries
from partial_rollout.core.replay import Place
from partial_rollout.core.rollout_log import HEADER, Finished, FrameReader, Output, checksum, decode
from partial_rollout.errors import DataError
from partial_rollout.observability.events import EventReader, TrajectoryEnded
from partial_rollout.settings.block import PartialRolloutConfig
from tests.fake_worker import make_claim
from tests.unit.agent_loop.test_worker import SAMPLING, WordTokenizer

if TYPE_CHECKING:
    from pathlib import Path

LONG_S = 60.0
EXTRA = {
    "reward_extra_info": {"acc": np.float32(0.25), "ok": np.bool_(True), "text": "é", "none": None},
    "turn_scores": [0.5, 1.0],
    "version_spans": [[3, 2], [4, 1]],
    "array": np.arange(6, dtype=np.int64).reshape(2, 3),
    "min_global_steps": 3,
    "max_global_steps": 4,
}


def output(**fields: Any) -> AgentLoopOutput:
    response_ids: list[Any] = [7, np.int64(8), 9]
    found = AgentLoopOutput(
        prompt_ids=[1, 2],
        response_ids=response_ids,
        response_mask=[1, 1, 0],
        response_logprobs=[-0.1, np.float64(-0.2), 0.0],
        metrics=AgentLoopMetrics(generate_sequences=1.5),
        num_turns=2,
        extra_fields=dict(EXTRA),
        **fields,
    )
    found.reward_score = 0.75
    return found


def ended(uid: str = "a", session: int = 0, **fields: Any) -> tuple[Trajectory, list[AgentLoopOutput]]:
    return Trajectory(make_claim(uid), session), [output(**fields)]


def folder(path: Path, number: int = 1) -> LogFolder:
    return LogFolder(str(path / "after_step_4"), number, 4)


def places(path: Path) -> dict[str, Place]:
    """Places of all trajectories in a file."""
    found: dict[str, Place] = {}
    with path.open("rb") as file:
        for offset, payload in FrameReader(file):
            record = decode(payload)
            if isinstance(record, Finished):
                found[record.key] = Place(str(path), offset, HEADER.size + len(payload), checksum(payload))
    return found


def written(path: Path, *trajectories: tuple[Trajectory, list[AgentLoopOutput]]) -> dict[str, Place]:
    """What a worker has logged of them."""
    log = WorkerLog("worker-0", LONG_S)
    log.begin(folder(path), [])
    for trajectory, outputs in trajectories:
        log.write(trajectory, outputs, summaries(trajectory, outputs))
    log.close(LONG_S)
    return places(folder(path).file("worker-0"))


def same(one: AgentLoopOutput, other: AgentLoopOutput) -> None:
    """Assert that both outputs are the same in the form that verl stores."""
    first, second = one.as_dict(), other.as_dict()
    assert first.keys() == second.keys()
    for name in ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores"):
        assert first[name].dtype == second[name].dtype
        assert first[name].tolist() == second[name].tolist()
    extra, again = first["extra_fields"], second["extra_fields"]
    assert {name: value for name, value in extra.items() if name != "array"} == {
        name: value for name, value in again.items() if name != "array"
    }
    assert (extra["array"].dtype, extra["array"].tolist()) == (again["array"].dtype, again["array"].tolist())
    for name, value in extra["reward_extra_info"].items():
        assert type(again["reward_extra_info"][name]) is type(value)
    assert (first["num_turns"], first["metrics"]) == (second["num_turns"], second["metrics"])


async def test_a_trajectory_is_read_as_it_was_written(tmp_path: Path) -> None:
    trajectory, outputs = ended()
    found = summaries(trajectory, outputs)
    log = WorkerLog("worker-0", LONG_S)
    log.replay(written(tmp_path, (trajectory, outputs)))
    replayed = await log.read(Trajectory(make_claim("a"), 0))
    assert replayed is not None
    (again,) = replayed.outputs
    same(outputs[0], AgentLoopOutput(**again))
    assert replayed.summaries == found
    assert await log.read(Trajectory(make_claim("a"), 0)) is None  # once


async def test_a_trajectory_without_log_probs_is_read_without_them(tmp_path: Path) -> None:
    trajectory, outputs = ended()
    outputs[0].response_logprobs = None
    log = WorkerLog("worker-0", LONG_S)
    log.replay(written(tmp_path, (trajectory, outputs)))
    replayed = await log.read(Trajectory(make_claim("a"), 0))
    assert replayed is not None
    (again,) = replayed.outputs
    assert (again["response_ids"], again.get("response_logprobs")) == ([7, 8, 9], None)


async def test_only_the_first_attempt_is_replayed_or_one_that_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    log, found = WorkerLog("worker-0", LONG_S), written(tmp_path, ended())
    for claim, is_read in [
        (make_claim("a", attempt=2), False),
        (replace(make_claim("a", attempt=2), goes_on=True), True),
        (make_claim("a"), True),
    ]:
        log.replay(found)
        assert (await log.read(Trajectory(claim, 0)) is not None) == is_read


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "other"])
async def test_a_record_that_is_not_what_was_written_is_generated_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = written(tmp_path, ended("a"), ended("b"))
    place = found["a_0"]
    path = folder(tmp_path).file("worker-0")
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[place.offset + place.num_bytes // 2] ^= 1
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(content[: place.offset + place.num_bytes - 1])
    elif damage == "gone":
        path.unlink()
    else:
        found["a_0"] = found["b_0"]
    log = WorkerLog("worker-1", LONG_S)
    log.replay(found)
    assert await log.read(Trajectory(make_claim("a"), 0)) is None
    assert "is generated again" in caplog.text
    other = await log.read(Trajectory(make_claim("b"), 0))
    assert (other is not None) is (damage in ("flip", "other"))


async def test_a_disk_that_stands_still_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, goes_on, num_reads = threading.Event(), threading.Event(), []

    def stands_still(places: list[Place]) -> list[bytes]:
        num_reads.append(places)
        begun.set()
        goes_on.wait(LONG_S)
        return []

    monkeypatch.setattr(worker_log, "read_frames", stands_still)
    log = WorkerLog("worker-0", read_s=0.01)
    log.replay(written(tmp_path, ended("a"), ended("b")))
    assert await log.read(Trajectory(make_claim("a"), 0)) is None
    assert await log.read(Trajectory(make_claim("b"), 0)) is None
    assert await asyncio.to_thread(begun.wait, LONG_S)  # the wait may have run out before
    goes_on.set()
    assert (len(num_reads), len(caplog.records)) == (1, 1)
    assert "the disk has not answered for 0.01 s" in caplog.text


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"multi_modal_data": {"image": [1]}}, "multi_modal_data"),
        ({"routed_experts": [[1]]}, "routed_experts"),
        ({"mm_processor_kwargs": {"call": print}}, "builtin_function_or_method"),
        ({"mm_processor_kwargs": {"sizes": np.array([[1], None], dtype=object)}}, "ndarray"),
    ],
)
def test_what_no_record_can_hold_is_left_out_with_one_warning(
    tmp_path: Path, fields: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    log = WorkerLog("worker-0", LONG_S)
    log.begin(folder(tmp_path), [])
    for _ in range(2):
        trajectory, outputs = ended(**fields)
        (summary,) = log.write(trajectory, outputs, summaries(trajectory, outputs))
        assert summary.log_checksum == 0
        assert not trajectory.record_bytes
    log.close(LONG_S)
    (warning,) = caplog.records
    assert why in warning.message
    assert places(folder(tmp_path).file("worker-0")) == {}


def test_a_value_of_an_unknown_kind_is_not_taken_for_another_one() -> None:
    rest = msgspec.msgpack.encode({"metrics": msgspec.msgpack.Ext(9, b"")})
    with pytest.raises(DataError, match="unknown kind 9"):
        decode_output(Output(b"", b"", b"", None, rest))


def test_a_new_folder_begins_with_the_trajectories_whose_groups_have_not_ended(tmp_path: Path) -> None:
    (first, outputs), (second, others) = ended("a"), ended("b")
    log = WorkerLog("worker-0", LONG_S)
    log.begin(folder(tmp_path), [])
    (summary,) = log.write(first, outputs, summaries(first, outputs))
    log.write(second, others, summaries(second, others))
    later = LogFolder(str(tmp_path / "after_step_8"), 1, 8)
    log.begin(later, [first.record_bytes])
    log.close(LONG_S)
    kept = places(later.file("worker-0"))
    assert {key: place.checksum for key, place in kept.items()} == {"a_0": summary.log_checksum}


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PartialRolloutAgentLoopWorker:
    """A worker by its real constructor; verl's parts only say what they were asked."""

    def verls_constructor(self: Any) -> None:
        self.llm_client, self.config = type("Client", (), {})(), OmegaConf.create({"algorithm": {}})
        self.reward_loop_worker_handles, self.tokenizer = None, WordTokenizer()
        self.rollout_config = SimpleNamespace(agent=SimpleNamespace(num_workers=1))

    monkeypatch.setattr(worker_module.AgentLoopWorkerTQBase, "__init__", verls_constructor)
    monkeypatch.setattr(worker_module, "find_manager", lambda: None)
    monkeypatch.setattr(worker_module, "report_to", lambda writer: None)
    made: Any = PartialRolloutAgentLoopWorker("worker-0", PartialRolloutConfig(events=str(tmp_path / "events")), 4)
    made.rollout_config = SAMPLING
    return made


async def test_a_replayed_trajectory_is_stored_as_it_was_and_logged_again_and_no_agent_loop_runs(
    worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[tuple[Any, dict[str, Any]]] = []

    async def store(self: Any, outputs: Any, validate: bool, **kwargs: Any) -> None:
        stored.append((outputs, kwargs))

    async def agent_loop(*args: Any, **kwargs: Any) -> Any:
        return [output()]

    monkeypatch.setattr(worker_module.AgentLoopWorkerTQBase, "_agent_loop_postprocess", store)
    worker._run_agent_loop = agent_loop
    trajectory, outputs = ended()
    outputs[0].response_ids[0] = 42
    found = written(tmp_path, (trajectory, outputs))
    expected = encode_finished(trajectory, outputs, summaries(trajectory, outputs))
    await worker.begin_log(folder(tmp_path, number=2))
    await worker.replay(found)
    row = {"index": 3, "agent_name": "x", "raw_prompt": "p", "uid": "a", "global_steps": 5}
    (replayed,) = await worker.generate(make_claim("a"), dict(row), 0)
    (generated,) = await worker.generate(make_claim("a"), dict(row), 1)
    ((given,), kwargs), *none = stored
    assert none == []
    same(outputs[0], given)
    assert kwargs == {"index": 3, "raw_prompt": "p", "uid": "a", "global_steps": 5, "session_id": 0}
    assert replayed.log_checksum == checksum(expected) != generated.log_checksum != 0
    worker._log.close(LONG_S)
    again = places(folder(tmp_path, number=2).file("worker-0"))
    assert again["a_0"].checksum == checksum(expected)
    assert [
        event.session for event in EventReader(tmp_path / "events").read() if isinstance(event, TrajectoryEnded)
    ] == [0, 1]
