"""A mistyped key of ours is found on the command line, before anything slow is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from partial_rollout.errors import ConfigError
from partial_rollout.settings.command_line import check_overrides
from partial_rollout.settings.compose import CommandLine

SLOW = ("torch", "vllm", "verl", "transformers")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("partial_rollout.prefech_factor=3", "prefech_factor: did you mean partial_rollout.prefetch_factor"),
        ("+partial_rollout.prefech_factor=3", "prefech_factor: did you mean partial_rollout.prefetch_factor"),
        ("++partial_rollout.tail.polcy=wait", "tail.polcy: did you mean partial_rollout.tail.policy"),
        ("partial_rollout.interrupt_mode=abort", "did you mean partial_rollout.tail.interrupt_mode"),
        ("partial_rolout.num_slots=3", "unknown key partial_rolout.num_slots: did you mean partial_rollout.num_slots"),
        ("+async_training.partial_rolout=True", r"did you mean async_training.partial_rollout\? .*\+async_training"),
        ("+asyc_training.partial_rollout=True", "did you mean async_training.partial_rollout"),
        ("partial_rollout.tail.boundary=cost", "tail.boundary was retired in release 0.2: leave it out"),
        ("+partial_rollout.costs.decode_step_ms=5", "costs was retired in release 0.2"),
        ("partial_rollout.tail.interrupt_mode='keep'", "interrupt_mode=keep was retired .* or keep_kv"),
    ],
)
def test_a_mistyped_or_retired_key_is_told_with_what_was_meant(argument: str, message: str):
    with pytest.raises(ConfigError, match=message):
        check_overrides(["data.train_batch_size=8", argument])


def test_what_is_right_or_not_ours_is_left_to_hydra():
    check_overrides(
        [
            "--config-name=mine",
            "--cfg",
            "job",
            "+async_training.partial_rollout=True",
            "partial_rollout.tail.policy=sync",
            "partial_rollout.timeouts={drain_s: 5}",
            "partial_rollout@partial_rollout=default",
            "~partial_rollout.event_log",
            "actor_rollout_ref.rollout.n=4",
            "+trainer.v1.partial_rollout.parameter_sync_step=1",
            "+async_training={partial_rollout: True}",
            "+mine/partial_rollout=fast",
            "+partial_rollout_notes=x",
        ]
    )


def test_the_entry_point_tells_it_at_once():
    code = (
        "import sys\n"
        "sys.argv = ['main_ppo', 'partial_rollout.prefech_factor=3']\n"
        "import runpy\n"
        "try:\n"
        "    runpy.run_module('partial_rollout.main_ppo', run_name='__main__')\n"
        "finally:\n"
        f"    print([name for name in {SLOW!r} if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ)
    assert result.returncode == 2, result.stderr
    assert "error: unknown key partial_rollout.prefech_factor: did you mean" in result.stderr
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--actor_rollout_ref.rollout.n=8"], "write it without --: actor_rollout_ref.rollout.n=8"),
        (["-actor_rollout_ref.rollout.n=8"], "write it without -: actor_rollout_ref.rollout.n=8"),
        (["a.b=1", "--no_such_option"], "--no_such_option is not an option of Hydra's: an override is written"),
        (["a.b=1", "rollout.n", "=", "8"], "rollout.n is not an override: write rollout.n=8, as one word"),
        (["a.b=1", "rollout.n", "=8"], "rollout.n is not an override: write rollout.n=8, as one word"),
        (["rollout.n=", "8"], "8 is not an override: write rollout.n=8, as one word"),
        (["a.b=1", "alone"], "alone is not an override: write key=value, as one word"),
        (["a.b=1", " "], "a word of spaces only: a backslash that continues a line"),
        (["data.train_files=~/data/x.parquet"], r"no ~ in a value, .* write data.train_files=\$HOME/data/x.parquet"),
        (["data.train_files=[~/a,~/b]"], r"write data.train_files=\[\$HOME/a,\$HOME/b\]"),
        (["data.train_batch_size=256,"], "a comma at its end: write data.train_batch_size=256$"),
        (["a.b=1", "trainer.nnodes=["], r"trainer.nnodes=\[ cannot be read: no viable alternative at input"),
    ],
)
def test_a_word_that_is_neither_option_nor_override_is_told_by_its_name(words: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        CommandLine.parse(words)


def test_hydras_options_and_overrides_are_left_as_they_are():
    options = ["--cfg", "job", "--resolve", "--info", "all", "-m", "--help"]
    overrides = ["~trainer.logger", "+a.b=1", "data.files=[a,b]", "c.d='~/e'", "f.g=1,2", "h.i=", "j={k: 1}"]
    line = CommandLine.parse([*options, *overrides])
    assert line.options == ("--cfg=job", "--resolve", "--info", "-m", "--help")
    assert line.overrides == ("all", *overrides)
