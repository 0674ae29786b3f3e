"""Warnings and errors of other packages are found in a log, whatever their form, and nothing else is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from partial_rollout.observability.foreign import LogMessages, LogTail, Message, messages

if TYPE_CHECKING:
    from pathlib import Path

SERVER = "\x1b[36m(PartialRolloutServer pid=14619)\x1b[0m "
SEEN = {
    f"{SERVER}WARNING 11-23 05:02:07 [vllm.py:652] Using the V1 model runner": ("Using the V1 model runner", False),
    f"{SERVER}(EngineCore pid=152) ERROR 11-23 05:02:47 [core.py:1] EngineCore failed": ("EngineCore failed", True),
    f"{SERVER}WARNING:2026-11-23 05:01:42,975:IPC is not supported": ("IPC is not supported", False),
    f"{SERVER}ERROR:2026-11-23 05:01:42,975:attempt 1 failed": ("attempt 1 failed", True),
    "2026-11-23 05:00:17,202\tWARNING auth.py:85 -- Token is needed": ("Token is needed", False),
    "[2026-11-23 05:00:17,202 E 12 99] (raylet) node_manager.cc:1: 2 Workers killed": (
        "node_manager.cc:1: 2 Workers killed",
        True,
    ),
    "2026-11-23 05:03:13,480 - WARNING - transfer_queue.utils - threads 8": ("threads 8", False),
    "[2026-11-23 05:03:13,480][partial_rollout.main_ppo][WARNING] - old name": ("old name", False),
    "/site-packages/verl/engine.py:32: UserWarning: torchtitan is not there": ("torchtitan is not there", False),
    f"{SERVER}[W1123 05:02:40.023028851 utils.cpp:68] Warning: NUMA binding": ("NUMA binding", False),
    "error: data.train_files=x does not exist": ("data.train_files=x does not exist", True),
    "Training Progress:   0%|          | 0/8 [00:00<?, ?it/s]2026-11-23 05:03:13,4 - WARNING - tq - threads": (
        "threads",
        False,
    ),
    "WARNING 11-23 05:02:07 [a.py:1] full [repeated 26x across cluster] (Ray deduplicates logs)": ("full", False),
}
NOT_SEEN = (
    "INFO 11-23 05:00:11 [importing.py:53] Triton is installed but 0 active driver(s) found (expected 1).",
    f"{SERVER}          'truncation': 'error',",
    "ray init kwargs: {'env_vars': {'NCCL_DEBUG': 'WARN', 'VLLM_LOGGING_LEVEL': 'WARN'}}",
    "(TaskRunner pid=1) step:3 - critic/score/mean:0.25 - timing_s/gen:1.5 - error/rate:0.0",
    "(TaskRunner pid=1) Training Progress:  12%|█▎        | 1/8 [00:16<01:57, 16.76s/it]",
    "  warnings.warn('deprecated')",
    "(TaskRunner pid=9) [2026-11-24 03:24:00,760 E 19109 19109] core_worker.cc:2465: Actor a with class name: 'S' "
    "has constructor arguments in the object store and max_restarts > 0. If the arguments go out of scope",
)


@pytest.mark.parametrize("line", SEEN)
def test_a_warning_or_an_error_is_found_in_every_form(line: str) -> None:
    message = LogMessages().feed(line)
    assert message is not None
    assert (message.text, message.is_error) == SEEN[line]
    assert message.source == ("PartialRolloutServer" if line.startswith(SERVER) else "")


@pytest.mark.parametrize("line", NOT_SEEN)
def test_nothing_else_is_a_message(line: str) -> None:
    assert LogMessages().feed(line) is None


def test_a_traceback_is_one_error_also_between_lines_of_other_processes() -> None:
    lines = [
        "(A pid=1) Traceback (most recent call last):",
        '(A pid=1)   File "x.py", line 1, in f',
        "(B pid=2) ValueError: no traceback has begun here",
        "(A pid=1)     raise KeyError(1)",
        "(A pid=1) KeyError: 1",
        "(A pid=1) KeyError: 2",
    ]
    assert messages(lines) == [Message("KeyError: 1", is_error=True, source="A")]


@pytest.mark.parametrize("raised", ["Exception: the node timed out", "ray.exceptions.RayTaskError(ValueError): x"])
def test_a_traceback_ends_with_any_kind_of_exception(raised: str) -> None:
    assert messages(["Traceback (most recent call last):", "    raise Exception(", raised]) == [
        Message(raised, is_error=True)
    ]


def test_messages_that_differ_in_numbers_have_one_key() -> None:
    assert Message("worker 3 waited 1.5 s at 0x7fab").key == Message("worker 12 waited 9 s at 0x1").key
    assert Message("worker 3 waited").key != Message("worker 3 is lost").key


def test_a_log_is_read_as_it_grows_and_torn_lines_when_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    tail = LogTail(path)
    assert list(tail.read()) == []
    path.write_bytes(b"one\ntwo\rth")
    assert list(tail.read()) == ["one", "two"]
    with path.open("ab") as file:
        file.write(b"ree \xff\n\n")
    assert list(tail.read()) == ["three \ufffd"]
    assert list(LogTail(path, from_end=True).read()) == []
