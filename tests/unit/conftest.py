"""Faster composition for the unit tests, which compose some 120 configurations."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import pytest
from omegaconf import OmegaConf

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def files_are_parsed_once() -> Iterator[None]:
    """Hydra parses some thirty YAML files for each configuration: half of its time. A file is parsed when it is new."""
    parse, parsed = OmegaConf.load, {}

    def load(file: Any) -> Any:
        name = getattr(file, "name", file)
        found = os.stat(name)
        key = (str(name), found.st_mtime_ns, found.st_size)
        if key not in parsed:
            parsed[key] = parse(file)
        return copy.deepcopy(parsed[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", staticmethod(load))
        yield
