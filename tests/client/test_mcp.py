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
    assert [json.loads(line)["error"]["code"] for line in target.getvalue().splitlines()] == [-32700, -32600]


WRONG_VALUES: dict[str, list[Any]] = {
    "string": [1, None, True, ["x"], {}, "\ud800"],
    "integer": ["1", 1.5, None, True, -1, [1]],
    "object": ["x", 1, None, ["x"]],
}
VALUES: dict[str, Any] = {"string": "x", "integer": 1, "object": {}}


def test_every_tool_refuses_unknown_and_malformed_arguments_in_a_sentence(address, dataset, fields) -> None:
    server = McpServer(Fairway())
    for name, tool in TOOLS.items():
        right = {each: VALUES[schema["type"]] for each, schema in tool.properties.items()}
        cases = [(right | {"colour": 1}, "colour"), *((right | {"jobs": "x"}, "jobs") for _ in [0])]
        for each, schema in tool.properties.items():
            cases += [(right | {each: value}, each) for value in WRONG_VALUES[schema["type"]]]
            if "minLength" in schema:
                cases.append((right | {each: ""}, each))
            if "maximum" in schema:
                cases.append((right | {each: schema["maximum"] + 1}, each))
        cases += [({key: right[key] for key in right if key != each}, each) for each in tool.required]
        for arguments, word in cases:
            text, is_error = call(server, name, **arguments)
            assert is_error, (name, arguments)
            assert word in text and text.endswith("."), (name, arguments, text)
            assert not any(
                python in text
                for python in ("object is not", "unexpected keyword", "int()", "codec", "NoneType")
            )
        assert tool.describe(name)["inputSchema"]["additionalProperties"] is False
    assert not Job.objects.exists()


def test_malformed_messages_are_answered_and_the_server_goes_on(address, dataset, fields) -> None:
    lines = ["{", "[]", "[" * 100_000, "null", "1", '{"id": {}, "method": "ping"}', '{"id": 1, "method": 5}',
             '{"id": 2, "method": "ping", "params": "x"}',
             '{"id": 3, "method": "tools/call", "params": {"name": ["x"]}}',
             '{"id": 4, "method": "tools/call", "params": {"name": "list_jobs", "arguments": "x"}}',
             '{"id": 5, "method": "tools/call", "params": {"name": "list_jobs", "arguments": 0}}']  # fmt: skip
    target = io.StringIO()
    McpServer(Fairway()).serve(io.StringIO("\n".join([*lines, '{"id": 9, "method": "ping"}\n'])), target)
    *answers, last = map(json.loads, target.getvalue().splitlines())
    assert len(answers) == len(lines)
    assert all(each["error"]["message"].endswith(".") for each in answers)
    assert last["result"] == {}


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
