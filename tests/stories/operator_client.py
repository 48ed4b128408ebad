"""An administrator of an installation: the first sign-in, the forms of nodes and environments, and REST."""

from __future__ import annotations

import html
import logging
import re
from typing import Any

import httpx

from tests.rig.node import RigNode
from tests.stories.portal import StoryPortal
from tests.stories.users import eventually

REST = "/api/v1/"
ENVIRONMENT, POOL = "tiny", "machines"
COUNTER = "i=0; while [ ! -e /tmp/end ]; do echo $i; i=$((i+1)); sleep 1; done; echo end $i"
"""Counts in its log until somebody creates the file; a gap or a second count would show."""


class Operator:
    """Keeps every job that the portal has acknowledged."""

    def __init__(self, portal: StoryPortal) -> None:
        logging.getLogger("httpx").setLevel(logging.WARNING)
        self._browser = httpx.Client(base_url=portal.url, timeout=60)
        address, _, code = portal.sign_in_link.partition("#")
        self.send_form("/sign-in/link/", {"code": code}, page=address)
        token = self._browser.post(
            f"{REST}tokens/",
            json={"name": "operator", "scopes": ["admin"]},
            headers={"X-CSRFToken": self._csrf_token("/account/")},
        )
        assert token.status_code == 201, token.text
        self._headers = {"Authorization": f"Bearer {token.json()['token']}"}
        self.api = httpx.Client()
        self.use(portal)
        self.project = str(self.get("projects/")["items"][0]["name"])
        self.acknowledged: dict[str, str] = {}
        """Their names by id, without those that a restore was found to have lost."""
        self.submitted = 0

    def use(self, portal: StoryPortal) -> None:
        """Continue with the same token at a portal that was restored elsewhere."""
        self._browser.base_url = httpx.URL(portal.url)
        self.api.close()
        self.api = httpx.Client(base_url=portal.url, headers=self._headers, timeout=60)

    # -- requests ----------------------------------------------------------------------------------

    def get(self, path: str) -> Any:
        answer = self.api.get(path if path.startswith("/") else f"{REST}{path}")
        assert answer.status_code == 200, (path, answer.status_code, answer.text[:500])
        return answer.json()

    def post(self, path: str, body: Any = None) -> Any:
        answer = self.api.post(f"{REST}{path}", json=body or {})
        assert answer.is_success, (path, answer.status_code, answer.text[:500])
        return answer.json()

    def answers(self) -> bool:
        try:
            return self.api.get(f"{REST}me/").status_code == 200
        except httpx.HTTPError:
            return False

    def send_form(
        self, path: str, form: dict[str, str], *, page: str = "", status: int = 302
    ) -> httpx.Response:
        data = {"csrfmiddlewaretoken": self._csrf_token(page or path), **form}
        answer = self._browser.post(path, data=data)
        assert answer.status_code == status, (path, answer.status_code, answer.text[-1500:])
        return answer

    def _csrf_token(self, path: str) -> str:
        return form_field(self._browser.get(path).text, "csrfmiddlewaretoken")

    # -- nodes and environments --------------------------------------------------------------------

    def add_node(self, machine: RigNode, name: str) -> None:
        """Add a machine by the page: host key, script in its root shell, test of the connection."""
        form = {"host": machine.address, "port": str(machine.port), "name": name, "new_pool": "", "pool": ""}
        form |= {"account": "fairway", "runtime": "podman", "engine": "auto"}
        pools = {row["name"]: row["id"] for row in self.get("pools/")["items"]}
        form |= {"pool": pools[POOL]} if POOL in pools else {"new_pool": POOL}
        shown = self.send_form("/nodes/add/", form, status=200).text
        assert form_field(shown, "host_key") == machine.host_key()
        machine.execute("sh", "-s", text_in=form_field(shown, "script"), timeout_s=120)
        self.send_form("/nodes/add/", form | {"host_key": machine.host_key(), "confirmed": "on"})
        eventually(lambda: self.is_ready(name), 60, f"{name} is ready")

    def is_ready(self, name: str) -> bool:
        rows = [row for row in self.get("nodes/")["items"] if row["name"] == name]
        return bool(rows) and rows[0]["state"] == "ready" and bool(rows[0]["reachable"])

    def add_environment(self, image: str) -> None:
        form = {"name": ENVIRONMENT, "title": "Tiny", "runtime": "podman", "image": image, "enabled": "on"}
        self.send_form("/environments/add/", form, page="/environments/new/")

    # -- jobs --------------------------------------------------------------------------------------

    def submit(self, name: str, script: str, **fields: Any) -> str:
        """Submit a job and return its id; its name is used once."""
        body = {
            "name": name,
            "project": self.project,
            "environment": ENVIRONMENT,
            "command": ["sh", "-c", script],
            "gpus_per_task": 1,
            "cpu_milli": 100,
            "memory_mib": 64,
            "termination_grace_s": 1,
        }
        job = str(self.post("jobs/", body | fields)["id"])
        self.acknowledged[job] = name
        self.submitted += 1
        return job

    def job(self, job: str) -> Any:
        return self.get(f"jobs/{job}/")

    def wait(self, job: str, *states: str, within_s: float = 60) -> None:
        eventually(lambda: self.job(job)["state"] in states, within_s, f"{self.job(job)} is {states}")

    def wait_running(self, job: str, within_s: float = 60) -> None:
        """Wait until all tasks of the latest attempt run."""
        eventually(lambda: "RUNNING" in self.attempts(job), within_s, f"{self.job(job)} runs")

    def attempts(self, job: str) -> list[str]:
        return [attempt["state"] for attempt in self.job(job)["attempts"]]

    def node_of(self, job: str) -> str:
        return str(self.job(job)["attempts"][-1]["tasks"][0]["node"]["name"])

    def lines(self, job: str) -> list[str]:
        return [line for line in str(self.get(f"jobs/{job}/logs/")["text"]).splitlines() if line]

    def check_jobs(self, *, may_be_lost: frozenset[str] = frozenset()) -> frozenset[str]:
        """Check that each acknowledged job is there once, and no other; forget and return those that were lost."""
        rows, path = [], "jobs/?limit=100"
        while path:
            page = self.get(path)
            rows += page["items"]
            path = page["next"]
        found = sorted((str(row["id"]), str(row["name"])) for row in rows)
        lost = frozenset(self.acknowledged) & may_be_lost - {job for job, _ in found}
        self.acknowledged = {job: name for job, name in self.acknowledged.items() if job not in lost}
        assert found == sorted(self.acknowledged.items())
        return lost

    def check_counter(self, job: str, *, ended: bool = False) -> None:
        """Check that the counter was started once, and counts without a gap."""
        shown = self.job(job)
        states = [attempt["state"] for attempt in shown["attempts"]]
        wanted = "COMPLETED" if ended else "RUNNING"
        assert (shown["state"], states) == (wanted, [wanted]), shown
        whole = lambda: self.lines(job)[-1:] == [f"end {len(self.lines(job)) - 1}"]  # noqa: E731
        assert not ended or eventually(whole, 60, "the whole log")
        counted = [line for line in self.lines(job) if not line.startswith("end")]
        assert counted == [str(number) for number in range(len(counted))]


def form_field(text: str, name: str) -> str:
    """Return the value of a hidden field, or the text of a text area by its id."""
    found = re.search(rf'name="{name}" value="([^"]*)"', text) or re.search(
        rf'<textarea[^>]* id="{name}"[^>]*>(.*?)</textarea>', text, re.DOTALL
    )
    assert found is not None, f"no field {name} in {text[-1500:]}"
    return html.unescape(found[1])


def end_counter(machine: RigNode, job: str) -> None:
    """Create the file for which the counter waits."""
    name = machine.podman("ps", "--filter", f"label=fairway.job={job}", "--format", "{{.Names}}").strip()
    machine.podman("exec", name, "touch", "/tmp/end")
