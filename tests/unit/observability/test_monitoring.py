"""Grafana's dashboard and Prometheus' alerts ask for metrics that a run exports; a real Prometheus evaluates them.

`scrape_quickstart.prom` is what a quickstart's Ray metrics port answered, our metrics only. The tests with a Prometheus
run where Debian's package `prometheus` is installed.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from partial_rollout.observability import metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
MONITORING = ROOT / "monitoring"
SCRAPE = Path(__file__).with_name("scrape_quickstart.prom")
NAME = re.compile(r"ray_partial_rollout_\w+")
NEEDS_PROMETHEUS = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="needs Debian's package prometheus: make setup-prometheus",
)
WAIT_S = 60.0
RARE = "dropped_prompts"
"""Exported once a prompt was dropped for a reason; none was in the recorded job."""
CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs: [{{job_name: ray, static_configs: [{{targets: ['{target}']}}]}}]
"""


def panel_expressions() -> Iterator[str]:
    """What the dashboard asks for, of all runs."""
    for panel in json.loads((MONITORING / "dashboard.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield target["expr"].replace("$run", ".*")


def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"] for rule in group["rules"]
    ]


def exported_names(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Every metric that the manager and the trainer make, as Ray exports it."""
    names: set[str] = set()

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...] = ()) -> None:
            names.add(f"ray_{name}")

        def set_default_tags(self, tags: dict[str, str]) -> None:
            pass

        def set(self, value: float, tags: dict[str, str]) -> None:
            pass

    monkeypatch.setattr(metrics, "Gauge", Gauge)
    metrics.ManagerMetrics()
    metrics.TrainerMetrics("")
    return names


def test_dashboard_and_alerts_ask_for_what_is_exported_and_show_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    exported = exported_names(monkeypatch)
    shown = {name for expression in panel_expressions() for name in NAME.findall(expression)}
    alerted = {name for rule in rules() for name in NAME.findall(rule["expr"])}
    assert shown == exported
    assert alerted <= exported
    assert all(rule["annotations"].keys() == {"summary", "description"} for rule in rules())


def test_names_are_after_prometheus_conventions(monkeypatch: pytest.MonkeyPatch) -> None:
    exported = exported_names(monkeypatch)
    assert not [name for name in exported if re.search(r"_(ms|s|sec|percent|num)(_|$)", name)]
    recorded = set(NAME.findall(SCRAPE.read_text()))
    missing = {name for name in exported - recorded if RARE not in name}
    assert missing == set()
    assert 'run="' in SCRAPE.read_text()


SERIES = """
rule_files: [{rules}]
evaluation_interval: 10s
tests:
  - interval: 10s
    input_series:
      - {{series: 'ray_partial_rollout_last_step_timestamp_seconds{{run="a"}}', values: '0+10x30 300x300'}}
      - {{series: 'ray_partial_rollout_step_seconds{{run="a"}}', values: '10x600'}}
      - {{series: 'ray_partial_rollout_oldest_ongoing_seconds{{run="a"}}', values: '1x30 90+10x300'}}
      - {{series: 'ray_partial_rollout_dropped_prompts_total{{run="a", reason="timeout"}}', values: '0+1x600'}}
      - {{series: 'ray_partial_rollout_dropped_prompts_total{{run="b", reason="no_spread"}}', values: '0+9x600'}}
      - {{series: 'ray_partial_rollout_dropped_prompts_total{{run="slow", reason="timeout"}}', values: '_x120 1x400'}}
      - {{series: 'ray_partial_rollout_prompts{{run="a", state="ongoing"}}', values: '8x600'}}
      - {{series: 'ray_partial_rollout_prompts{{run="b", state="ongoing"}}', values: '8x600'}}
      - {{series: 'ray_partial_rollout_prompts{{run="burst", state="ongoing"}}', values: '200x600'}}
      - {{series: 'ray_partial_rollout_prompts{{run="slow", state="ongoing"}}', values: '60x600'}}
      - {{series: 'ray_partial_rollout_prompts{{run="slow", state="done"}}', values: '4x600'}}
      - {{series: 'ray_partial_rollout_taken_prompts_total{{run="a"}}', values: '0+9x600'}}
      - {{series: 'ray_partial_rollout_taken_prompts_total{{run="b"}}', values: '0+9x600'}}
      - {{series: 'ray_partial_rollout_taken_prompts_total{{run="burst"}}', values: '_x2 256x600'}}
      - {{series: 'ray_partial_rollout_taken_prompts_total{{run="slow"}}', values: '64x600'}}
      - {{series: 'ray_partial_rollout_engine_relaunches_total{{run="a"}}', values: '_x40 1x300'}}
      - {{series: 'ray_partial_rollout_engine_relaunches_total{{run="second"}}', values: '0x200 1x100'}}
      - {{series: 'ray_partial_rollout_dropped_prompts_total{{run="burst", reason="timeout"}}', values: '_x40 48x300'}}
      - {{series: 'ray_partial_rollout_step{{run="a"}}', values: '1+1x600'}}
      - {{series: 'ray_partial_rollout_step{{run="first"}}', values: '_x6 1x200'}}
      - {{series: 'ray_partial_rollout_step{{run="gone"}}', values: '_x6 1x60'}}
      - {{series: 'ray_partial_rollout_step{{run="again"}}', values: '_x6 1x600'}}
      - {{series: 'ray_partial_rollout_last_step_timestamp_seconds{{run="again"}}', values: '_x30 300x210'}}
      - {{series: 'ray_partial_rollout_staleness_steps_max{{run="a"}}', values: '2x30 9x300'}}
      - {{series: 'ray_partial_rollout_kv_usage_ratio{{run="a"}}', values: '0.5x30 1.0x300'}}
    promql_expr_test:
"""
CHECK = """
      - {{expr: 'ALERTS{{alertname="{name}", alertstate="firing"}}', eval_time: {at}, exp_samples: [{samples}]}}
"""


def at(name: str, minutes: int, *runs: str) -> str:
    """What promtool must find so many minutes after the beginning: the alert fires for these runs and for no other."""
    severity = next(rule for rule in rules() if rule["alert"] == name)["labels"]["severity"]
    labels = (f'ALERTS{{alertname="{name}", alertstate="firing", run="{run}", severity="{severity}"}}' for run in runs)
    samples = ", ".join(f"{{labels: '{each}', value: 1}}" for each in labels)
    return CHECK.format(name=name, at=f"{minutes}m", samples=samples)


FIRES = {
    "NoBatch": {4: [], 20: ["a"]},
    "NoFirstStep": {30: [], 33: ["first"], 50: [], 68: [], 72: ["again"]},
    "OldPrompt": {4: [], 20: ["a"]},
    "DroppedPrompts": {4: ["a"], 10: ["a", "burst"], 18: ["a"], 24: ["a"]},
    "EngineStartedAgain": {6: [], 8: ["a"], 35: ["a", "second"], 38: ["second"]},
    "OldTokens": {4: [], 20: ["a"]},
    "KvCacheFull": {4: [], 20: ["a"]},
}
"""By alert and minutes: the runs for which it fires. Run `a` has every trouble from its sixth minute on. Totals
are not there before they count; that of run `second` was there and rises. Run `first` never ends its
first step, and `gone` has ended in it. Run `again` has ended steps until minute 40, and its next start has ended none.
Of the 64 prompts of run `slow` one is dropped in a step of half an hour."""


@NEEDS_PROMETHEUS
@pytest.mark.slow
def test_each_alert_fires_when_it_should_and_not_before(tmp_path: Path) -> None:
    assert FIRES.keys() == {rule["alert"] for rule in rules()}
    text = SERIES.format(rules=MONITORING / "alerts.yml")
    text += "".join(at(name, minutes, *runs) for name, when in FIRES.items() for minutes, runs in when.items())
    path = tmp_path / "test.yml"
    path.write_text(text)
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@NEEDS_PROMETHEUS
@pytest.mark.slow
async def test_a_prometheus_evaluates_every_expression_on_a_recorded_job(tmp_path: Path) -> None:
    scrapes = asyncio.Queue[None]()

    async def answer(_request: web.Request) -> web.Response:
        scrapes.put_nowait(None)
        return web.Response(text=SCRAPE.read_text(), content_type="text/plain")

    app = web.Application()
    app.router.add_get("/metrics", answer)
    async with TestServer(app) as target, ClientSession() as session:
        config = CONFIG.format(rules=MONITORING / "alerts.yml", target=f"{target.host}:{target.port}")
        (tmp_path / "p.yml").write_text(config)
        process, address = await start_prometheus(tmp_path)
        try:
            for _ in range(4):  # a scrape has been stored when the next but one comes
                await asyncio.wait_for(scrapes.get(), WAIT_S)
            for expression in [*panel_expressions(), *(rule["expr"] for rule in rules())]:
                async with session.get(f"{address}/api/v1/query", params={"query": expression}) as answered:
                    found = await answered.json()
                assert found["status"] == "success", (expression, found)
                is_rare = RARE in expression
                is_alert = any(expression == rule["expr"] for rule in rules())
                assert found["data"]["result"] or is_rare or is_alert, expression
            async with session.get(f"{address}/api/v1/rules") as answered:
                groups = (await answered.json())["data"]["groups"]
            assert [rule["health"] for group in groups for rule in group["rules"]] == ["ok"] * len(rules())
        finally:
            process.terminate()
            await asyncio.wait_for(process.wait(), WAIT_S)


async def start_prometheus(folder: Path) -> tuple[asyncio.subprocess.Process, str]:
    """A Prometheus with the configuration `p.yml` of the folder that listens, and its address."""
    words = [f"--config.file={folder / 'p.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    process = await asyncio.create_subprocess_exec(
        "prometheus", *words, "--web.listen-address=127.0.0.1:0", stderr=asyncio.subprocess.PIPE, cwd=folder
    )
    assert process.stderr is not None
    address, is_ready = "", False
    while not (address and is_ready):  # told in either order
        log = await asyncio.wait_for(process.stderr.readline(), WAIT_S)
        assert log, "prometheus ended before it was ready"
        if found := re.search(rb"msg=\"?Listening on\"? address=(\S+)", log):
            address = found[1].decode()
        is_ready = is_ready or b"Server is ready" in log
    return process, f"http://{address}"
