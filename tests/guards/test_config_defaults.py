"""The defaults people read in the YAML are the defaults the code uses."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import yaml

from partial_rollout.settings.block import PartialRolloutConfig

if TYPE_CHECKING:
    from pathlib import Path


def test_yaml_defaults_equal_the_dataclass_defaults(repository: Path):
    text = (repository / "configs" / "partial_rollout" / "default.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text) == dataclasses.asdict(PartialRolloutConfig())
