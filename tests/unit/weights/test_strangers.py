"""Two processes, of which one does not keep to the protocol: a named error on both ends, and nothing is left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from partial_rollout.errors import WeightProtocolError
from tests.unit.weights.support import make_weights, over, receive_all, segments, send_all


@pytest.fixture(scope="module")
def process():
    """Plays all scenarios, one after the other."""
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-m", "tests.unit.weights.stranger"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        yield process
        process.kill()


@pytest.fixture(params=["ipc", "tcp"])
def channels(request, channels):
    """Within a node, and between nodes."""
    return over(request.param, channels)


def check(process, address, scenario: str, call, ours: str, theirs: str) -> None:
    """`call` is our end; both texts are patterns of what each end says."""
    before = segments()
    request = {"scenario": scenario, "directory": address.directory, "secret": address.secret.hex()}
    print(json.dumps(request), file=process.stdin, flush=True)
    with pytest.raises(WeightProtocolError, match=ours):
        call()
    answer = json.loads(process.stdout.readline())
    assert answer.startswith("WeightProtocolError: ")
    assert theirs in answer
    assert segments() == before


@pytest.mark.parametrize(
    ("scenario", "ours", "theirs"),
    [
        ("newer receiver", r"speaks version \d+ of the weight channel, we \d+", "the other end failed: "),
        ("receiver without the secret", "the other end failed: .*does not know this run's secret", "run's secret"),
        ("receiver of another update", "at weight update 2, we at 1", "at weight update 2, we at 1"),
    ],
)
def test_a_receiver_that_is_not_ours_gets_no_weights(process, channels, scenario, ours, theirs):
    asked = []

    def weights():
        asked.append(True)
        yield from make_weights(1)

    check(process, channels.address, scenario, lambda: send_all(channels.address, weights()), ours, theirs)
    assert asked == []


@pytest.mark.parametrize(
    ("scenario", "ours", "theirs"),
    [
        # The sender judges the version and the update first, by the receiver's hello, and tells.
        (
            "newer sender",
            r"the other end failed: .* speaks version \d+ of the weight channel, we \d+",
            "speaks version",
        ),
        ("sender without the secret", "does not know this run's secret", "does not know this run's secret"),
        ("sender of another update", "the other end failed: .*at weight update 1, we at 2", "we at 2"),
        ("forgetful sender", r"truncated: Done\(num_tensors=4.* was sent, Done\(num_tensors=3", "truncated"),
        ("breaking sender", "the stream ended within tensor 'layer.0' at byte 8192 of 16384", "ended within"),
    ],
)
def test_a_sender_that_is_not_ours_is_refused(process, channels, scenario, ours, theirs):
    check(process, channels.address, scenario, lambda: receive_all(channels.address), ours, theirs)
