"""From a model to a service: profile, plan, pipelined run on two nodes, a killed rank, curves, registry, gateway.

Everything is real but the GPUs: two machines with sshd and podman, torch and MLflow's client in the image, every
process of Fairway, and Chromium.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.rig.faulty_link import FaultyLinkProxy
from tests.rig.images import RigImage, rig_image
from tests.rig.needs import missing_for_rig
from tests.rig.node import RigNode
from tests.rig.rig import Rig
from tests.stories.portal import StoryPortal
from tests.stories.users import POOL, Person, add_node, eventually, invite

pytestmark = [
    pytest.mark.rig,
    pytest.mark.browser,
    pytest.mark.heavy,
    pytest.mark.long,
    pytest.mark.timeout(3000),
]

PICTURES = os.environ.get("FAIRWAY_STORY_PICTURES", "")
"""Folder for a picture of each step; blank: none."""
MODELS = """
import time
import torch
class Slow(torch.nn.Module):
    def forward(self, x):
        time.sleep(0.05)
        return x * 1.0
def mlp():
    torch.manual_seed(3)
    sizes = [256, 512, 512, 512, 10]
    pairs = list(zip(sizes, sizes[1:]))
    layers = [part for pair in pairs for part in (torch.nn.Linear(*pair), torch.nn.ReLU())]
    return torch.nn.Sequential(Slow(), *layers[:-1])
"""
"""Slow enough for a run of more than a minute, from which its rate is measured."""
SERVER = """python3 -c '
import glob, http.server, json, os, sys
import mlflow, torch
sys.path.insert(0, os.path.expanduser("~"))
import models
folder = mlflow.artifacts.download_artifacts("models:/words/1")
(path,) = glob.glob(folder + "/**/*.pt", recursive=True)
model = models.mlp()
saved = torch.load(path)
model.load_state_dict(saved["model"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        answer = model(torch.ones(1, 256)).argmax().item()
        body = json.dumps(dict(step=saved["step"], answer=answer)).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
http.server.HTTPServer(("", int(os.environ["PORT"])), Handler).serve_forever()
'"""


@pytest.fixture(scope="module")
def torch_image() -> RigImage:
    reason = missing_for_rig()
    if reason is not None:
        pytest.skip(reason)
    return rig_image("tiny", also="torch==2.13.0 numpy mlflow-skinny==3.17.2")


@pytest.fixture(scope="module")
def torch_rig(torch_image: RigImage) -> Iterator[Rig]:
    with Rig(2, image_stores=[torch_image.store]) as made:
        yield made


@pytest.fixture(scope="module")
def portal(torch_rig: Rig) -> Iterator[StoryPortal]:
    """A fresh Fairway whose MLflow API nodes reach through a proxy, as docs/experiments.md says."""
    made = StoryPortal("--no-local-node")
    proxy = FaultyLinkProxy("127.0.0.1", made.port)
    proxy.host = torch_rig.portal_address
    with proxy:
        made.environment["FAIRWAY_TRACKING_URL"] = f"http://{proxy.host}:{proxy.port}"
        with made:
            yield made


def picture(page: Page, name: str) -> None:
    """Take a picture as on a desk, and one as on a telephone at night."""
    if not PICTURES:
        return
    page.screenshot(path=Path(PICTURES) / f"{name}.png", full_page=True)
    size = page.viewport_size
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(color_scheme="dark")
    page.screenshot(path=Path(PICTURES) / f"{name}-narrow.png", full_page=True)
    page.emulate_media(color_scheme="light")
    if size is not None:
        page.set_viewport_size(size)


def launch(page: Page) -> str:
    """Choose the environment, launch, and return the id of the job."""
    page.locator("label", has_text="Torch").click()
    page.get_by_role("button", name=re.compile("^Launch")).last.click()
    expect(page).to_have_url(re.compile(r"/jobs/[a-z0-9]+/$"), timeout=30_000)
    return page.url.rstrip("/").rpartition("/")[2]


def until_state(page: Page, state: str, within_s: float = 120) -> None:
    """Wait on the open page, without a reload, until the job is in this state."""
    expect(page.locator("#job-head")).to_contain_text(state, timeout=within_s * 1000)


def test_a_model_is_profiled_planned_trained_compared_registered_and_served(
    browser: Browser, portal: StoryPortal, torch_rig: Rig, torch_image: RigImage
) -> None:
    admin = Person(browser, portal)
    admin.go(portal.sign_in_link)
    expect(admin.page).to_have_url(re.compile(r"/account/|/$"), timeout=15_000)
    vera = set_up(admin, browser, torch_rig, torch_image)
    page = vera.page

    # -- profile ----------------------------------------------------------------------------------------
    write_models(vera)
    vera.go("/")
    page.keyboard.press("g")
    page.keyboard.press("t")
    expect(page.get_by_role("heading", name="Pipeline plans")).to_be_visible()
    picture(page, "01-plans-empty")
    form = page.locator("section", has=page.get_by_role("heading", name="Measure a profile"))
    form.get_by_label("Name").fill("words, batch 16")
    form.get_by_label("Model").fill("models:mlp")
    form.get_by_label("Shape of an input").fill("16,256")
    form.get_by_role("button", name="Fill in a job").click()
    picture(page, "02-profile-launch")
    launch(page)
    picture(page, "03-profile-job")
    page.get_by_role("link", name="stored under Pipeline plans").click()
    expect(page.get_by_role("heading", name="Profile jobs")).to_be_visible()
    picture(page, "04-profile-jobs")
    expect(page.get_by_role("link", name="Plan words, batch 16")).to_be_visible(timeout=240_000)

    # -- plan -------------------------------------------------------------------------------------------
    page.get_by_role("link", name="Plan words, batch 16").click()
    form = page.locator("section", has=page.get_by_role("heading", name="Compute a plan"))
    form.get_by_label("Nodes", exact=True).fill("2")
    form.get_by_label("GPUs per node").fill("1")
    form.get_by_label("Between GPUs of a node, GB/s").fill("10")
    form.get_by_label("Between nodes, GB/s").fill("1")
    picture(page, "05-plan-form")
    form.get_by_role("button", name="Compare plans").click()
    expect(page.get_by_role("heading", name="Plan of words, batch 16")).to_be_visible(timeout=20_000)
    page.get_by_role("link", name="Straight pipeline").click()
    expect(page.get_by_role("heading", name="Chosen: 1-1")).to_be_visible()
    plan = page.url
    drawn = page.locator("section", has=page.get_by_role("heading", name="Where 1-1 would run"))
    nodes = drawn.locator(".fw-place__n b.fw-mono").all_inner_texts()
    assert sorted(nodes) == ["node1", "node2"]
    picture(page, "06-plan")

    # -- run on the drawn nodes, a killed rank ------------------------------------------------------------
    page.get_by_role("link", name="Launch", exact=True).last.click()
    expect(page.get_by_label("Preferred nodes")).to_have_value(" ".join(nodes))
    command = page.get_by_label("Command", exact=True)
    assert "--model models:mlp --input 128,256" in command.input_value(), command.input_value()
    command.fill(command.input_value() + " --steps 200 --save_every 5")
    page.get_by_role("heading", name="Limits").click()  # a folded step
    page.get_by_text("command failure", exact=True).click()
    picture(page, "07-pipeline-launch")
    first = launch(page)
    until_state(page, "Running")
    expect(page.get_by_text(f"Starting on {', '.join(sorted(nodes))}, as preferred.")).to_be_visible()
    expect(page.get_by_text('{"step": 6,')).to_be_visible(timeout=300_000)
    picture(page, "08-pipeline-runs")
    kill_rank(torch_rig.nodes[int(nodes[1][-1]) - 1], first)
    expect(page.get_by_text("attempt 2").first).to_be_visible(timeout=180_000)
    picture(page, "09-after-the-kill")
    until_state(page, "Running")
    expect(page.get_by_text("It starts from the checkpoint step-")).to_be_visible(timeout=60_000)
    expect(page.get_by_text("continues after step").first).to_be_visible(timeout=180_000)
    until_state(page, "Completed", within_s=1200)
    expect(page.get_by_role("heading", name="Runs")).to_be_visible(timeout=20_000)
    picture(page, "10-completed")
    page.get_by_role("link", name="Checkpoints").click()
    expect(page.get_by_text("step-200.pt").first).to_be_visible()
    picture(page, "11-checkpoints")
    vera.take_token()
    log = vera.log_of(first)
    resumed = re.search(r"continues after step (\d+)", log)
    assert resumed and int(resumed[1]) % 5 == 0
    steps = [int(each) for each in re.findall(r'step\\*": (\d+), \\*"loss', log)]
    assert steps[0] == int(resumed[1]) + 1 and steps[-1] == 200, log[:2000]

    # -- predicted and measured, a second run --------------------------------------------------------------
    vera.go(f"/jobs/{first}/")
    page.get_by_role("link", name="predicted and measured rate").click()
    measured = page.locator("section", has=page.get_by_role("heading", name="Predicted against measured"))
    expect(measured.get_by_text(re.compile(r"[0-9]\s%"))).to_be_visible()
    picture(page, "12-predicted-and-measured")
    vera.go(plan)
    page.get_by_role("link", name="Launch", exact=True).last.click()
    page.get_by_label("Name", exact=True).fill("faster")
    command = page.get_by_label("Command", exact=True)
    command.fill(command.input_value() + " --steps 20 --learning_rate 0.2")
    launch(page)
    until_state(page, "Completed", within_s=200)

    # -- curves compared -----------------------------------------------------------------------------------
    page.get_by_role("link", name="Experiments of vision").click()
    for name in ("faster", "pipeline-11"):
        page.get_by_label(f"Compare {name}").check()
    picture(page, "13-experiments")
    page.get_by_role("button", name="Compare selected runs").click()
    expect(page.get_by_role("heading", name=re.compile("Compare 2"))).to_be_visible()
    expect(page.locator("canvas").first).to_be_visible(timeout=20_000)
    expect(page.locator("tr", has_text="learning_rate").locator(".fw-diff")).to_have_text(["0.2", "0.05"])
    picture(page, "14-compare")

    # -- registered ------------------------------------------------------------------------------------------
    page.get_by_role("link", name="pipeline-11").first.click()
    expect(page.get_by_role("heading", name="pipeline-11")).to_be_visible()
    page.get_by_label("Model", exact=True).fill("words")
    picture(page, "15-run")
    page.get_by_role("button", name="Register model").click()
    expect(page.get_by_text("Version 1 of words is registered.")).to_be_visible()
    picture(page, "16-model")

    # -- deployed, answered through the gateway --------------------------------------------------------------
    page.get_by_role("link", name="Deploy").click()
    page.get_by_label("Command", exact=True).fill(SERVER)
    page.get_by_label("Readiness path").fill("/")
    page.locator("label", has_text="Torch").click()
    picture(page, "17-deploy")
    page.get_by_role("button", name=re.compile("^(Launch|Deploy)")).last.click()
    expect(page.get_by_role("heading", name="words")).to_be_visible(timeout=30_000)
    expect(page.get_by_text("1 of 1")).to_be_visible(timeout=240_000)
    picture(page, "18-service")
    with vera.context.expect_page() as opened:
        page.get_by_role("button", name="Open").click()
    expect(opened.value.locator("body")).to_contain_text('"step": 200', timeout=30_000)
    picture(opened.value, "19-answer")
    address = page.locator("section", has=page.get_by_role("heading", name="Address")).locator("p").first
    answer = httpx.get(
        f"http://localhost:{portal.port}/", timeout=20,
        headers={"Host": address.inner_text().split("//")[1], "Authorization": vera.api.headers["Authorization"]},
    )  # fmt: skip
    assert answer.status_code == 200 and answer.json()["step"] == 200, answer.text
    assert vera.errors == [] and admin.errors == []


def set_up(admin: Person, browser: Browser, rig: Rig, image: RigImage) -> Person:
    """Add nodes, network, environment and project by the pages; return a member of the project."""
    for number, node in enumerate(rig.nodes, start=1):
        add_node(admin, node, f"node{number}")
    page = admin.go(f"/policy/?pool={POOL}")
    page.get_by_text("Gangs on several nodes use the host network", exact=False).first.click()
    network = page.locator("section", has=page.get_by_role("heading", name="Network between nodes"))
    network.get_by_role("button").first.click()
    expect(page.get_by_text("allowed for gangs")).to_be_visible()
    page = admin.go("/environments/new/")
    page.get_by_label("Name", exact=True).fill("torch")
    page.get_by_label("Title", exact=True).fill("Torch")
    page.get_by_label("Image optional").fill(image.name)
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("torch is saved")).to_be_visible()
    eventually(lambda: "2 of 2" in admin.go("/environments/").content(), what="the image is on both nodes")
    page = admin.go("/projects/")
    page.get_by_label("Name", exact=True).fill("vision")
    page.get_by_role("button", name="Create project").click()
    expect(page.get_by_role("heading", name="vision")).to_be_visible()
    return invite(admin, browser, "vision", "vera")


def write_models(person: Person) -> None:
    """Write the module with the model into the home on both nodes, as from a terminal."""
    person.take_token()
    job = person.submit(
        {
            "name": "upload", "project": "vision", "environment": "torch", "pool": POOL, "tasks": 2,
            "gpus_per_task": 3, "cpu_milli": 100, "memory_mib": 64,
            "command": ["sh", "-c", 'printf %s "$TEXT" > models.py'], "env": {"TEXT": MODELS},
        }
    )  # fmt: skip
    person.reaches(job, "COMPLETED", within_s=90)


def kill_rank(node: RigNode, job: str) -> None:
    """Kill the container of the job on the node."""
    found = node.execute("podman", "ps", "--format", "{{.Names}}").stdout.split()
    (container,) = [name for name in found if job in name]
    node.execute("podman", "kill", container)
