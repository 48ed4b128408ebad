"""The MCP server against the real web application: as lines, and with the client of the protocol's authors."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from client import Fairway
from client.mcp import TOOLS, McpServer
from portal.models import Job
from tests.cached_environment import cached_environment
from tests.client.test_client import ROOT, address, dataset, fields

__all__ = ["address", "dataset", "fields"]
pytestmark = pytest.mark.django_db(transaction=True)


def ask(server: McpServer, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    lines = "".join(json.dumps({"jsonrpc": "2.0", **each}) + "\n" for each in messages)
    target = io.StringIO()
    server.serve(io.StringIO(lines), target)
    return [json.loads(line) for line in target.getvalue().splitlines()]


def call(server: McpServer, name: str, **arguments: Any) -> tuple[str, bool]:
    params = {"name": name, "arguments": arguments}
    (answer,) = ask(server, {"id": 1, "method": "tools/call", "params": params})
    return answer["result"]["content"][0]["text"], answer["result"]["isError"]


def test_jobs_are_previewed_submitted_explained_and_cancelled(address, dataset, fields) -> None:
    server = McpServer(Fairway())
    preview, _ = call(server, "preview_start", fields=fields)
    assert json.loads(preview)["feasible"] is True and not Job.objects.exists()
    twice = [call(server, "submit_job", fields=fields, idempotency_key="k1")[0] for _ in range(2)]
    job = Job.objects.get()
    assert [json.loads(each)["id"] for each in twice] == [job.public_id] * 2
    assert [each["id"] for each in json.loads(call(server, "list_jobs", state="PENDING")[0])] == [
        job.public_id
    ]
    assert json.loads(call(server, "show_job", job=job.public_id)[0])["name"] == fields["name"]
    assert json.loads(call(server, "why_waiting", job=job.public_id)[0])["state"] == "PENDING"
    assert call(server, "read_logs", job=job.public_id)[1]  # it has no log yet
    call(server, "cancel_job", job=job.public_id)
    job.refresh_from_db()
    assert job.state == "CANCELLED"


def test_refusals_are_results_and_unknown_words_are_errors(address, dataset, fields) -> None:
    server = McpServer(Fairway())
    text, is_error = call(server, "submit_job", fields=fields | {"gpus_per_task": 64})
    assert is_error and "Nearest possible request" in text
    assert call(server, "show_job") == ("Missing: job.", True)
    assert call(server, "submit_job", fields=["x"])[1]
    tool, method, notice = {"name": "rm"}, {"id": 2, "method": "x"}, {"method": "notifications/initialized"}
    lists = [{"id": 3, "method": "tools/call", "params": each} for each in ([1], {"arguments": [1]})]
    answers = ask(server, {"id": 1, "method": "tools/call", "params": tool}, method, notice, *lists)
    assert [each["error"]["code"] for each in answers] == [-32602, -32601, -32602, -32602]
    target = io.StringIO()
    server.serve(io.StringIO("{\n[]\n"), target)
    assert [json.loads(line)["error"]["code"] for line in target.getvalue().splitlines()] == [-32700, -32700]


def test_simulation_and_reading_change_nothing(address, dataset, fields) -> None:
    job = Fairway().submit(**fields)
    simulated = McpServer(Fairway(), simulate=True)
    for name, arguments in (("submit_job", {"fields": fields}), ("cancel_job", {"job": job.id})):
        text, is_error = call(simulated, name, **arguments)
        assert text.startswith("Simulated: nothing was changed.") and not is_error
    reading = McpServer(Fairway(), read_only=True)
    (answer,) = ask(reading, {"id": 1, "method": "tools/list"})
    offered = {each["name"] for each in answer["result"]["tools"]}
    assert offered == {name for name, tool in TOOLS.items() if not tool.changes}
    (refused,) = ask(reading, {"id": 1, "method": "tools/call", "params": {"name": "cancel_job"}})
    assert "error" in refused
    assert Job.objects.get().state == "PENDING"


CLIENT = """
import asyncio, json, sys
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

async def main():
    server = StdioServerParameters(command=sys.argv[1], args=["-m", "client", "mcp"], env=json.loads(sys.argv[2]))
    async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
        started = await session.initialize()
        tools = await session.list_tools()
        result = await session.call_tool("submit_job", {"fields": json.loads(sys.argv[3])})
        print(started.server_info.name, len(tools.tools), json.loads(result.content[0].text)["id"], result.is_error)

asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_client_of_the_protocol_submits_a_job(address, dataset, fields) -> None:
    cache = cached_environment("mcp==2.3.0")
    names = ("FAIRWAY_URL", "FAIRWAY_TOKEN", "PATH")
    env = {name: os.environ[name] for name in names} | {"PYTHONPATH": str(ROOT)}
    words = [str(cache / "bin/python"), "-c", CLIENT, sys.executable, json.dumps(env), json.dumps(fields)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    output, problems = process.communicate(timeout=120)
    job = Job.objects.get()
    assert output.split() == ["fairway", str(len(TOOLS)), job.public_id, "False"], problems
