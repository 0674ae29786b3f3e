"""Each version of vllm-omni is told about an engine in its own way."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from partial_rollout.integrations import omni_compat

ENGINE = {"engine_backend": "a.b.Engine", "max_num_seqs": 4}


@pytest.mark.parametrize("version", ["0.28.0", "0.240.0"])
def test_it_is_told_by_arguments(monkeypatch, version):
    monkeypatch.setattr(omni_compat, "installed_version", lambda _: version)
    with omni_compat.async_omni_arguments("m", **ENGINE) as given:
        assert given == {"model": "m", **ENGINE}


def test_0_24_is_told_by_a_file_that_goes_with_the_block(monkeypatch):
    """0.24 would drop `engine_backend` without a word."""
    monkeypatch.setattr(omni_compat, "installed_version", lambda _: "0.24.0")
    with omni_compat.async_omni_arguments("m", **ENGINE) as given:
        path = Path(given["stage_configs_path"])
        [stage] = json.loads(path.read_text(encoding="utf-8"))["stage_args"]
    assert given["model"] == "m"
    assert stage["engine_args"].items() >= ENGINE.items()
    assert not path.exists()


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ({"multimodal_output": {"trajectory": {"a": 1}}}, {"a": 1}),
        ({"multimodal_output": {}, "custom_output": {"a": 1}}, {"a": 1}),
        ({"multimodal_output": None, "custom_output": {}}, None),
        ({"multimodal_output": {}}, None),
    ],
    ids=["0.28", "0.24", "0.24, failed", "0.28, failed"],
)
def test_a_trajectory_is_found_where_each_version_puts_it(output, found):
    assert omni_compat.trajectory_of(SimpleNamespace(**output)) == found
