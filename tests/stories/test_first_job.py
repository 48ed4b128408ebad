"""The main job, end to end: two machines become nodes, two teams share them, and nobody sees the other's work.

Everything here is real: sshd and podman on two machines, PostgreSQL, Valkey, every process of Fairway,
JupyterLab and Chromium. Only the GPUs are pretended, and the pages say so.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from portal.services.environments.process_environment import TOOL_PORT, jupyterlab_command
from tests.rig.images import RigImage
from tests.rig.node import RigNode
from tests.rig.rig import Rig
from tests.stories.portal import StoryPortal
from tests.stories.users import Person, add_node, eventually, invite, set_quota
from tests.time_budget import budget_ms

pytestmark = [
    pytest.mark.rig,
    pytest.mark.browser,
    pytest.mark.heavy,
    pytest.mark.early,
    pytest.mark.timeout(600),
]

# The first process of a container is sent SIGTERM to no effect unless it has a handler.
SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(0)); time.sleep(600)"


def test_two_teams_share_two_nodes(
    browser: Browser, portal: StoryPortal, lab_rig: Rig, lab_image: RigImage
) -> None:
    admin = Person(browser, portal)
    admin.go(portal.sign_in_link)
    expect(admin.page).to_have_url(re.compile(r"/account/|/$"), timeout=budget_ms(15))

    # -- machines -------------------------------------------------------------------------------------
    for number, node in enumerate(lab_rig.nodes, start=1):
        add_node(admin, node, f"node{number}")
    page = admin.go("/cluster/")
    expect(page.get_by_text("8 free").first).to_be_visible(timeout=budget_ms(20))
    expect(page.get_by_text("simulated", exact=False).first).to_be_visible()

    page = admin.go("/environments/new/")
    page.get_by_label("Name", exact=True).fill("jupyterlab")
    page.get_by_label("Title", exact=True).fill("JupyterLab")
    page.get_by_label("Image optional").fill(lab_image.name)
    page.get_by_label("Tool optional", exact=True).fill("jupyterlab")
    page.get_by_label("Command of the tool").fill(" ".join(jupyterlab_command()))
    page.get_by_label("Port of the tool").fill(str(TOOL_PORT))
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("jupyterlab is saved")).to_be_visible()
    admin.go("/environments/")
    eventually(lambda: "2 of 2" in admin.go("/environments/").content(), what="the image is on both nodes")

    # -- teams ----------------------------------------------------------------------------------------
    for name in ("vision", "nlp"):
        page = admin.go("/projects/")
        page.get_by_label("Name", exact=True).fill(name)
        page.get_by_role("button", name="Create project").click()
        expect(page.get_by_role("heading", name=name)).to_be_visible()
    set_quota(admin, vision={"guaranteed": "4"}, nlp={"guaranteed": "4"})
    vera = invite(admin, browser, "vision", "vera")
    nils = invite(admin, browser, "nlp", "nils")

    # -- a notebook -----------------------------------------------------------------------------------
    page = vera.go("/launch/")
    page.get_by_label("Name", exact=True).fill("probe")
    page.get_by_role("button", name=re.compile("^Launch")).last.click()
    expect(page).to_have_url(re.compile(r"/jobs/[a-z0-9]+/"), timeout=budget_ms(20))
    notebook = re.search(r"/jobs/([a-z0-9]+)/", page.url)[1]  # type: ignore[index]
    opener = page.get_by_role("button", name="Open").or_(page.get_by_role("link", name="Open"))
    expect(opener.first).to_be_enabled(timeout=budget_ms(60))
    with vera.context.expect_page() as opened:
        opener.first.click()
    lab = opened.value
    assert (
        run_cell(lab, "import os; print('GPUs', os.environ['CUDA_VISIBLE_DEVICES'].count('GPU-'))")
        == "GPUs 1"
    )
    assert f"ws-{notebook}." in lab.url

    # -- a run by REST --------------------------------------------------------------------------------
    nils.take_token()
    body = {
        "name": "count",
        "project": "nlp",
        "environment": "jupyterlab",
        "gpus_per_task": 3,
        "cpu_milli": 100,
        "memory_mib": 256,
        "command": ["python3", "-c", "import os; print('hello from', os.environ['CUDA_VISIBLE_DEVICES'])"],
    }
    answer = nils.api.post("/jobs/", json=body, headers={"Idempotency-Key": "one"})
    assert answer.status_code == 201, answer.text
    again = nils.api.post("/jobs/", json=body, headers={"Idempotency-Key": "one"})
    assert again.json() == answer.json()
    run = answer.json()["id"]
    eventually(lambda: nils.api.get(f"/jobs/{run}/").json()["state"] == "COMPLETED", what="the run completes")
    lines = eventually(
        lambda: nils.api.get(f"/jobs/{run}/logs/").json().get("text"), what="its log can be read"
    )
    assert "hello from GPU-" in json.dumps(lines)
    assert json.dumps(lines).count("GPU-") == 3

    # -- too much -------------------------------------------------------------------------------------
    refused = nils.api.post("/jobs/", json=body | {"gpus_per_task": 9})
    assert refused.status_code == 422
    assert refused.json()["code"] == "unsatisfiable"
    assert "4" in refused.json()["detail"]
    assert nils.api.post("/jobs/", json=body | {"gpus_per_task": 1, "tasks": 9}).status_code == 422
    sleeper = ["python3", "-c", SLEEPER]
    big = nils.submit(body | {"name": "big", "gpus_per_task": 4, "tasks": 2, "command": sleeper})
    verdict = eventually(lambda: nils.api.get(f"/jobs/{big}/").json().get("verdict"), what="a verdict")
    assert "2 × 4 GPUs" in verdict["message"] and "7 are free" in verdict["message"], verdict
    expect(nils.go(f"/jobs/{big}/").get_by_text("Needs 2 × 4 GPUs").first).to_be_visible()
    nils.api.post(f"/jobs/{big}/cancel/")

    # -- a quota decides ------------------------------------------------------------------------------
    a_quota_changes_the_order(admin, vera, nils, body | {"command": sleeper})

    # -- walls ----------------------------------------------------------------------------------------
    nobody_else_reaches_the_notebook(vera, nils, portal, notebook, lab_rig)

    # -- suspend and resume: the same workspace with the same home ------------------------------------
    assert run_cell(lab, "open('kept.txt', 'w').write('kept'); print('written')") == "written"
    vera.take_token()
    submitted_at = answer.json()["submitted_at"]
    eventually(
        lambda: (vera.api.get(f"/jobs/{notebook}/").json()["idle"]["last_active_at"] or "") > submitted_at,
        90,
        "its use after that",
    )
    page = vera.go(f"/jobs/{notebook}/")
    page.get_by_role("button", name="Suspend").click()
    vera.reaches(notebook, "SUSPENDED")
    expect(page.get_by_text("It holds no GPU; its files are kept.")).to_be_visible(timeout=budget_ms(20))
    page.get_by_role("button", name="Resume").click()
    vera.reaches(notebook, "RUNNING")
    opener = page.get_by_role("button", name="Open").or_(page.get_by_role("link", name="Open"))
    expect(opener.first).to_be_enabled(timeout=budget_ms(60))
    with vera.context.expect_page() as opened:
        opener.first.click()
    assert run_cell(opened.value, "print(open('kept.txt').read())") == "kept"
    assert vera.errors == [] and nils.errors == [] and admin.errors == []


def run_cell(lab: Page, code: str) -> str:
    """Runs one cell in a new notebook, over the kernel's WebSocket, and gives the line it printed."""
    lab.wait_for_selector(".jp-Launcher, .jp-NotebookPanel", timeout=budget_ms(60))
    if not lab.locator(".jp-Launcher").count():  # the home remembers a notebook that was open when it stopped
        _reset(lab)
        lab.wait_for_selector(".jp-Launcher", timeout=budget_ms(60))
    lab.locator(".jp-Launcher").locator("[data-category=Notebook]").first.click()
    cell = lab.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell .cm-content").first
    cell.click(timeout=budget_ms(30))
    lab.keyboard.insert_text(code)
    lab.wait_for_selector(
        ".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook-ExecutionIndicator[data-status=idle]",
        timeout=budget_ms(60),
    )
    printed = lab.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-OutputArea-output pre").first
    _until_printed(lab, cell, printed)
    text = printed.inner_text().strip()
    lab.keyboard.press("Escape")
    lab.evaluate("() => document.querySelector('.jp-mod-current .lm-TabBar-tabCloseIcon')?.click()")
    discard = lab.get_by_role("button", name=re.compile("Discard|Don't save", re.I))
    if discard.count():
        discard.first.click()
    return text


def _reset(lab: Page) -> None:
    lab.goto(re.match(r"https?://[^/]+", lab.url)[0] + "/lab?reset")  # type: ignore[index]


def _until_printed(lab: Page, cell: Locator, printed: Locator) -> None:
    """Runs the cell again where JupyterLab took the key before it had its kernel, as a person would."""
    for _ in range(4):
        cell.click()
        lab.keyboard.press("Shift+Enter")
        with contextlib.suppress(PlaywrightTimeout):
            return printed.wait_for(timeout=budget_ms(15))
    picture = Path(tempfile.gettempdir(), "fairway-story.png")
    lab.screenshot(path=str(picture))
    raise AssertionError(f"the cell printed nothing: {picture}")


def a_quota_changes_the_order(admin: Person, vera: Person, nils: Person, body: dict[str, Any]) -> None:
    """Two equal jobs wait for GPUs; whoever the quota favours starts first when they are free."""
    vera.take_token()
    # 1 GPU is the notebook's; nils holds the other 7 until the order was changed
    blocker = nils.submit(body | {"name": "blocker", "tasks": 7, "gpus_per_task": 1})
    eventually(
        lambda: nils.api.get(f"/jobs/{blocker}/").json()["state"] == "RUNNING", what="the blocker runs"
    )
    set_quota(admin, vision={"guaranteed": "0", "limit": "1"}, nlp={"guaranteed": "8"})
    first = vera.api.post(
        "/jobs/", json=body | {"name": "mine", "project": "vision", "gpus_per_task": 3, "preemptible": True}
    )
    assert first.status_code == 422, "a limit of 1 makes 3 GPUs impossible, and says so"
    assert "limit" in first.json()["detail"]
    set_quota(admin, vision={"guaranteed": "4", "limit": "none"}, nlp={"guaranteed": "4"})
    mine = vera.submit(body | {"name": "mine", "project": "vision", "gpus_per_task": 3})
    # vision is owed 4 and holds 1: what nlp borrowed beyond its 4 comes back
    eventually(
        lambda: vera.api.get(f"/jobs/{mine}/").json()["state"] == "RUNNING", 60, "vision gets its guarantee"
    )
    nils.reaches(blocker, "PENDING", within_s=60)  # its last tasks may still be saving their work
    for person, job in ((vera, mine), (nils, blocker)):
        assert person.api.post(f"/jobs/{job}/cancel/").is_success
        person.reaches(job, "CANCELLED")


def nobody_else_reaches_the_notebook(
    vera: Person, nils: Person, portal: StoryPortal, notebook: str, rig: Rig
) -> None:
    """By page, API, socket, gateway, a second container and a shell on the same node: refused."""
    assert nils.page.goto(f"{portal.url}/jobs/{notebook}/").status == 404  # type: ignore[union-attr]
    assert nils.api.get(f"/jobs/{notebook}/").status_code == 404
    assert nils.api.get(f"/jobs/{notebook}/logs/").status_code == 404
    assert nils.api.post(f"/workspaces/{notebook}/open/").status_code == 404
    assert nils.api.post(f"/jobs/{notebook}/cancel/").status_code == 404
    host = {"Host": f"ws-{notebook}.localhost:{portal.port}"}
    with httpx.Client() as outsider:
        for path in ("/", "/lab", "/api/kernels", "/api/contents"):
            refused = outsider.get(f"http://127.0.0.1:{portal.port}{path}", headers=host)
            assert refused.status_code in (401, 403, 404), (path, refused.status_code)
            assert "Jupyter" not in refused.text
    answer = nils.page.goto(f"http://ws-{notebook}.localhost:{portal.port}/lab")
    assert answer is not None and answer.status in (401, 403, 404)
    nils.go("/")
    reported = nils.page.evaluate(
        """(job) => new Promise((done) => {
            const socket = new WebSocket(location.origin.replace("http", "ws") + "/live/");
            const heard = [];
            socket.onopen = () => socket.send(JSON.stringify({subscribe: [`job.${job}`, `logs.${job}.0`]}));
            socket.onmessage = (message) => heard.push(JSON.parse(message.data));
            setTimeout(() => done(heard), 3000);
        })""",
        notebook,
    )
    assert all(
        frame.get("error") or notebook not in json.dumps(frame.get("data", "")) for frame in reported
    ), reported
    other = nils.page.evaluate(
        """(address) => new Promise((done) => {
            const socket = new WebSocket(address);
            socket.onopen = () => done("open");
            socket.onerror = () => done("refused");
        })""",
        f"ws://ws-{notebook}.localhost:{portal.port}/api/kernels/x/channels",
    )
    assert other == "refused"
    job = vera.api.get(f"/jobs/{notebook}/").json()
    name = json.dumps(job)
    node = next(node for number, node in enumerate(rig.nodes, 1) if f"node{number}" in name)
    from_a_shell_and_from_containers(nils, node, notebook)


def from_a_shell_and_from_containers(nils: Person, node: RigNode, notebook: str) -> None:
    """The port on the node asks for the secret; another container does not even reach it."""
    ports = node.podman("ps", "--format", "{{.Ports}}", "--filter", f"label=fairway.job={notebook}")
    port = re.search(r"127\.77\.0\.1:(\d+)->", ports)[1]  # type: ignore[index]
    as_nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    probe = (
        "import urllib.request, urllib.error\n"
        f"try: urllib.request.urlopen('http://127.77.0.1:{port}/api/contents', timeout=3); print('in')\n"
        "except urllib.error.HTTPError as e: print(e.code)\n"
        "except OSError: print('refused')\n"
    )
    assert node.execute(*as_nobody, "python3", "-c", probe).stdout.strip() in ("403", "refused")
    own = node.podman("ps", "-q", "--filter", f"label=fairway.job={notebook}").strip()
    address = node.podman(
        "inspect", own, "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    ).strip()
    targets = [f"{address}:{TOOL_PORT}", f"127.77.0.1:{port}", f"{node.address}:{port}"]
    script = (
        "import socket, sys\n"
        f"for target in {targets!r}:\n"
        "    host, port = target.rsplit(':', 1)\n"
        "    try: socket.create_connection((host, int(port)), 3); print('reached', target)\n"
        "    except OSError: print('no way', target)\n"
    )
    body = {
        "project": "nlp",
        "environment": "jupyterlab",
        "name": "spy",
        "gpus_per_task": 1,
        "cpu_milli": 100,
        "memory_mib": 256,
        "command": ["python3", "-c", script],
    }
    # one on each GPU that is free, so that one of them sits on the same node
    spies = [nils.submit(body) for _ in range(7)]
    for spy in spies:
        nils.reaches(spy, "COMPLETED", "FAILED", within_s=60)
        said = nils.log_of(spy)
        assert "reached" not in said, said
        assert said.count("no way") == 3, said
