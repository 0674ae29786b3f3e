"""A model of the hub that is not downloaded yet: the first start asks about it, and so chooses as later ones do.

Only a start asks. The command asks where the model's dropout decides whether old log-probs are computed; the run's
first process on the cluster asks where the model's sizes decide which interrupt mode fits. Nothing is downloaded into
the cache, and nothing waits for long.
"""

from __future__ import annotations

import json
import tempfile
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    AskHub = Callable[[str], "ModelFiles | str"]
    """Tells of a model by its name on the hub: what is known of its files, or why nothing is."""

ASK_S = 20.0
"""Two small requests. A node without a way to the hub must not make a start wait."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What the arithmetic of memory needs of a model's files."""

    config: Mapping[str, Any]
    """`config.json`."""
    num_bytes: int
    """Bytes of all `*.safetensors` beside `config.json`; 0 if there are none."""


def ask_hub(name: str, timeout_s: float = ASK_S) -> ModelFiles | str:
    """The files of a model of the hub, or why they are not known; waits for `timeout_s` at most."""
    answer: Future[ModelFiles | str] = Future()

    def ask() -> None:
        answer.set_result(_ask(name, timeout_s))

    # A daemon, because a request that hangs cannot be ended. What it brings after the limit is not used; an error that
    # `_ask` does not know is printed by the thread.
    threading.Thread(target=ask, name="ask-hub", daemon=True).start()
    try:
        return answer.result(timeout_s)
    except FutureTimeout:
        return f"the hub did not tell the sizes of the model {name} within {timeout_s:g} s"


def _ask(name: str, timeout_s: float) -> ModelFiles | str:
    try:
        import huggingface_hub
        from httpx import HTTPError
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        return f"the hub cannot be asked for the sizes of the model {name}: {error}"
    try:
        found = huggingface_hub.model_info(name, files_metadata=True, timeout=timeout_s)
        with tempfile.TemporaryDirectory() as folder:
            path = huggingface_hub.hf_hub_download(name, "config.json", local_dir=folder, etag_timeout=timeout_s)
            config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, HTTPError, HfHubHTTPError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return f"the hub did not tell the sizes of the model {name} ({reason[:200]})"
    files = (file for file in found.siblings or () if "/" not in file.rfilename)
    return ModelFiles(config, sum(file.size or 0 for file in files if file.rfilename.endswith(".safetensors")))
