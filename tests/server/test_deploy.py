"""The files of deploy/ agree with the server: ports, paths, metrics, times."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families as parse

from pagespec import AsyncLLM
from pagespec.cli.serve import ServerOptions
from pagespec.kernels.native.library import _COMPILERS
from pagespec.server.app import create_app
from pagespec.server.config import ServerConfig
from tests.support.content_llm import content_llm
from tests.support.server import client

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCS = Path(__file__).parents[2] / "docs" / "serving.md"
METRIC = re.compile(r"\b(?:vllm|pagespec):\w+|\bprocess_\w+")


def served_names() -> tuple[set[str], set[str]]:
    """The names of the metrics and of their samples."""

    async def main() -> str:
        engine = AsyncLLM(content_llm())
        async with client(create_app(engine)) as http:
            text = (await http.get("/metrics")).text
        await engine.shutdown()
        return text

    families = list(parse(asyncio.run(main())))
    samples = {sample.name for family in families for sample in family.samples}
    return {family.name for family in families}, samples


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_every_metric_of_the_dashboard_is_served() -> None:
    _, samples = served_names()
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    found = {name for text in expressions(dashboard) for name in METRIC.findall(text)}
    assert len(found) > 20
    assert found <= samples
    (model,) = (v for v in dashboard["templating"]["list"] if v["name"] == "model_name")
    assert {*METRIC.findall(model["query"]["query"])} <= samples
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] <= 24 - place["w"], panel["title"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_every_metric_is_in_the_documentation() -> None:
    names, _ = served_names()
    told = {*METRIC.findall(DOCS.read_text())}
    ours = {name for name in names if name.startswith(("vllm:", "pagespec:"))}
    assert ours <= told
    assert {name for name in told if ":" in name} - {"vllm:"} <= ours


def test_every_option_is_in_the_documentation_with_its_default() -> None:
    rows = [row for row in DOCS.read_text().splitlines() if row.startswith("| `--")]
    flags = []
    for option in ServerOptions.options():
        flag = option.names[0] if option.names else "--" + option.name.replace("_", "-")
        flags.append(flag)
        (row,) = (row for row in rows if f"`{flag}`" in row.split("|")[1])
        if isinstance(option.default, str | int | float) and option.default not in (True, False):
            assert str(option.default).removesuffix(".0") in row, row
    told = {flag for row in rows for flag in re.findall(r"--[a-z-]+", row.split("|")[1])}
    assert told - {"--no-access-log"} == set(flags)


def test_a_stop_takes_longer_than_a_drain() -> None:
    drain_s = ServerConfig().drain_timeout_s
    unit = (DEPLOY / "pagespec.service").read_text()
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M)[0]) > drain_s
    assert re.findall(r"--drain-timeout (\d+)", unit) == [f"{drain_s:.0f}"]
    compose = (DEPLOY / "compose.yaml").read_text()
    assert int(re.findall(r"stop_grace_period: (\d+)s", compose)[0]) > drain_s


def test_the_unit_names_a_model_and_does_not_repeat_a_refused_start() -> None:
    unit = (DEPLOY / "pagespec.service").read_text()
    assert re.search(r"^RestartPreventExitStatus=2$", unit, re.M)
    assert re.search(r"^Documentation=http://", unit, re.M), "the server speaks plain HTTP"
    (line,) = re.findall(r"^ExecStart=\S+ (serve .+)$", unit, re.M)
    assert "--model ${PAGESPEC_MODEL}" in line
    assert re.search(r"^Environment=PAGESPEC_MODEL=\S+$", unit, re.M)
    names = {name for option in ServerOptions.options() for name in option.names}
    names |= {"--" + option.name.replace("_", "-") for option in ServerOptions.options()}
    assert set(re.findall(r"--[a-z-]+", line)) <= names | {"--model"}


def test_the_image_can_compile_kernels() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    base = text[text.index(" AS base") : text.index("FROM base AS cpu")]
    assert any(re.search(rf"(?<!\S){re.escape(name)}(?!\S)", base) for name in _COMPILERS)


def test_proxies_close_paths_for_administrators() -> None:
    inside = {"metrics", "load", "get_world_size", "pause", "resume", "is_paused"}
    inside.add("reset_prefix_cache")
    for name in ("nginx.conf", "Caddyfile"):
        text = (DEPLOY / name).read_text()
        groups = re.findall(r"\^/\(([\w|]+)\)", text)
        assert {path for group in groups for path in group.split("|")} == inside


def test_no_version_is_pinned_twice() -> None:
    lines = (DEPLOY.parent / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert len(pins) == len(set(pins))


def test_proxies_let_as_large_bodies_through_and_do_not_buffer() -> None:
    largest_mib = ServerConfig().max_body_bytes >> 20
    nginx, caddy = (DEPLOY / "nginx.conf").read_text(), (DEPLOY / "Caddyfile").read_text()
    assert f"client_max_body_size {largest_mib}m;" in nginx
    assert f"max_size {largest_mib}M" in caddy
    assert "proxy_buffering off;" in nginx
    assert "flush_interval -1" in caddy


def test_files_that_name_files_name_those_that_are_there() -> None:
    compose = (DEPLOY / "compose.yaml").read_text()
    for name in re.findall(r"- \./([\w./]+):/", compose):
        assert (DEPLOY / name).is_file(), name
    root = DEPLOY.parent
    for sources in re.findall(
        r"^COPY (?!--from)(.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.M
    ):
        for source in sources.split():
            assert (root / source).exists(), source
            assert f"!{source}" in (DEPLOY / "Dockerfile.dockerignore").read_text()
    assert "pagespec:8000" in (DEPLOY / "prometheus.yml").read_text()


def test_the_container_does_not_run_as_root() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    last = text[text.rindex("\nFROM ") :]
    assert re.search(r"^USER pagespec$", last, re.M)
    assert last.index("USER pagespec") < last.index("ENTRYPOINT")
    assert re.search(r'^ENTRYPOINT \["pagespec", "serve"', last, re.M), "signals reach it"
