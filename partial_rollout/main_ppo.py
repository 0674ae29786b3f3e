"""`python -m partial_rollout.main_ppo +async_training.partial_rollout=True ...`

It takes any command line of `python -m verl.trainer.main_ppo`. Without the flag it runs verl's own trainer.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
import psutil
from hydra.core.hydra_config import HydraConfig
from omegaconf.errors import OmegaConfBaseException

from partial_rollout.errors import UserError
from partial_rollout.integrations.verl_compat import check_versions
from partial_rollout.observability import stages
from partial_rollout.observability.choices import tell, tell_proposals
from partial_rollout.observability.events import CommandEnded, EventWriter, events_folder
from partial_rollout.observability.log import report_to
from partial_rollout.observability.report import report_at_end
from partial_rollout.runtime.folder_lock import folder_of_one_command
from partial_rollout.runtime.termination import INTERRUPTED_CODE
from partial_rollout.settings.by_hand import ByHand
from partial_rollout.settings.command_line import check_overrides
from partial_rollout.settings.compose import OUR_CONFIGS, CommandLine, resolve
from partial_rollout.settings.derived import read_block
from partial_rollout.settings.hub import ask_hub
from partial_rollout.settings.prepare import prepare

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from partial_rollout.settings.prepare import Prepared

CONFIG_DIR = str(OUR_CONFIGS)
logger = logging.getLogger("partial_rollout.main_ppo")
"""Named by hand, because `__name__` is `__main__` when this module runs as a command."""


@hydra.main(config_path=CONFIG_DIR, config_name="partial_rollout", version_base=None)
def main(config: DictConfig) -> None:
    """Entry point; exit code 0 after a whole run, 2 for a user's mistake, 130 for Ctrl-C, 1 for any other failure."""
    events: Path | None = None
    try:
        prepared = prepare(config, ByHand.read(HydraConfig.get().overrides.task), ask_hub)
        folder = Path(prepared.config.trainer.default_local_dir)
        with folder_of_one_command(folder, "trainer.default_local_dir"):
            events = _begin(prepared)
            from partial_rollout.launch import launch  # imports Ray, verl and torch: what is refused was refused before

            code, text = launch(prepared)
    except (UserError, OmegaConfBaseException) as error:
        code, text = 2, str(error)
    except KeyboardInterrupt:
        code, text = INTERRUPTED_CODE, "stopped by Ctrl-C or SIGTERM; the same command goes on from its last checkpoint"
    logger.info("the command ends with code %d", code, extra={"event": CommandEnded(code=code, text=text)})
    if events is not None:
        report_at_end(events)
    if code:
        print(f"error: {text}", file=sys.stderr)
        sys.exit(code)


def _begin(prepared: Prepared) -> Path | None:
    """Open the driver's event stream, also without the flag, and tell what was changed; returns the stream's folder."""
    events = events_folder(read_block(prepared.config))
    report_to(EventWriter(events, "driver", keep_all=True))
    stages.begin(stages.CONFIGURATION, psutil.Process().create_time())
    chosen = {choice.key for choice in prepared.choices}
    for change in prepared.changes:
        if change.key not in chosen:
            logger.info("changed %s", change)
    tell(prepared.choices)
    tell_proposals(prepared.proposals)
    return events


def start() -> None:
    """Check the command line's keys and the versions, on whose files the configuration is built, then run `main`."""
    try:
        line = CommandLine.parse(sys.argv[1:])
        check_overrides(line.overrides)
        check_versions()
        sys.argv[1:] = resolve(line).arguments()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    main()


if __name__ == "__main__":
    start()
