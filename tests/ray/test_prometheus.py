"""Debian's Prometheus with our configuration reads a run on a Ray cluster that is up, and answers for the dashboard."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from tests.ray.exporting_run import READY, RUN
from tests.unit.observability.test_monitoring import (
    MONITORING,
    NEEDS_PROMETHEUS,
    panel_expressions,
    rules,
    start_prometheus,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 240.0
SCRAPE_S = 1
DISCOVERY = "/tmp/ray/prom_metrics_service_discovery.json"
SEEN = """
groups: [{name: seen, rules: [{alert: Seen, expr: 'count_over_time(ray_partial_rollout_steps_total[1m]) > 2'}]}]
"""
"""Fires when there are samples enough for a rate."""
EXPORTS = {"RAY_metrics_report_interval_ms": "1000"}
"""Ray's own interval is 10 s. After two of them it forgets what was not set again."""
STAYS = "count_over_time(ray_partial_rollout_last_step_timestamp_seconds[1m]) > 15"
"""What a step has set stays until the next one ends."""
STATES = {
    "EngineStartedAgain": "firing",
    "DroppedPrompts": "pending",  # one of eight, for less than two minutes
    **dict.fromkeys(("NoBatch", "NoFirstStep", "OldPrompt"), "inactive"),
}
"""States of alerts in this run."""


@NEEDS_PROMETHEUS
async def test_a_prometheus_that_reads_a_running_ray_answers_every_expression_and_alert(tmp_path: Path) -> None:
    """The alert of a first relaunch fires, though its counter was not there before."""
    seen = asyncio.Event()

    async def take_alerts(request: web.Request) -> web.Response:
        if any(alert["labels"]["alertname"] == "Seen" for alert in await request.json()):
            seen.set()
        return web.Response()

    app = web.Application()
    app.router.add_post("/api/v2/alerts", take_alerts)
    async with running_ray() as folder, TestServer(app) as receiver, ClientSession() as session:
        (tmp_path / "seen.yml").write_text(SEEN)
        (tmp_path / "p.yml").write_text(configuration(folder, f"{receiver.host}:{receiver.port}"))
        process, address = await start_prometheus(tmp_path)
        # Else its messages would fill the pipe.
        messages = asyncio.create_task(process.stderr.read(), name="messages")  # pyright: ignore[reportOptionalMemberAccess]
        try:
            await asyncio.wait_for(seen.wait(), WAIT_S)

            async def ask(path: str, **query: str) -> Any:
                async with session.get(f"{address}/api/v1/{path}", params=query) as answered:
                    found = await answered.json()
                assert found["status"] == "success", (query, found)
                return found["data"]

            # A scrape in one second may be late on a busy machine.
            up = (await ask("query", query="max_over_time(up[1m])"))["result"]
            assert up
            assert [target["value"][1] for target in up] == ["1"] * len(up)

            async def ask_until(is_there: Callable[[Any], bool], path: str, **query: str) -> Any:
                # A scrape that was too late leaves nothing, and takes an alert back, until the next one.
                ends_s = time.monotonic() + WAIT_S
                while not is_there(found := await ask(path, **query)):
                    assert time.monotonic() < ends_s, (query, found)
                    await asyncio.sleep(SCRAPE_S)
                return found

            async def result_of(expression: str) -> list[Any]:
                return (await ask_until(lambda found: bool(found["result"]), "query", query=expression))["result"]

            for expression in panel_expressions():
                await result_of(expression)
            steps = await result_of(f'ray_partial_rollout_steps_total{{run="{RUN}"}}')
            assert [each["value"][1] for each in steps] == ["2"]
            answered = await ask_until(lambda found: of_alerts("state", found).items() >= STATES.items(), "rules")
            assert of_alerts("health", answered) == {rule["alert"]: "ok" for rule in rules()}
            await result_of(STAYS)
        finally:
            process.terminate()
            await asyncio.wait_for(asyncio.gather(messages, process.wait()), WAIT_S)


def of_alerts(field: str, answered: Any) -> dict[str, str]:
    """What Prometheus says of each of our alerts in one field, by name."""
    every = (rule for group in answered["groups"] for rule in group["rules"])
    return {rule["name"]: rule[field] for rule in every if rule["name"] != "Seen"}


def configuration(ray_folder: Path, receiver: str) -> str:
    """Our file, for another folder of Ray, with a receiver of alerts, and more often than every 10 s."""
    text = (MONITORING / "prometheus.yml").read_text()
    for ours, here in (
        (DISCOVERY, str(ray_folder / Path(DISCOVERY).name)),
        ("  - alerts.yml", f"  - {MONITORING / 'alerts.yml'}\n  - seen.yml"),
        ("10s", f"{SCRAPE_S}s"),
    ):
        assert ours in text
        text = text.replace(ours, here)
    return f"{text}\nalerting: {{alertmanagers: [{{static_configs: [{{targets: ['{receiver}']}}]}}]}}\n"


@asynccontextmanager
async def running_ray() -> AsyncIterator[Path]:
    """A Ray cluster with the metrics of a run, in a process of its own; gives Ray's folder."""
    folder = Path(tempfile.mkdtemp(prefix="pr-ray-", dir="/tmp"))  # short: Ray's socket paths are limited to 107 bytes
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.ray.exporting_run", str(folder)),
        cwd=ROOT,
        env=os.environ | EXPORTS | {"PYTHONPATH": str(ROOT)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        while READY not in (line := (await asyncio.wait_for(process.stdout.readline(), WAIT_S)).decode()):
            assert line, "the run ended before it exported"
        yield folder
    finally:
        process.stdin.close()
        await asyncio.wait_for(process.wait(), WAIT_S)
        shutil.rmtree(folder, ignore_errors=True)
