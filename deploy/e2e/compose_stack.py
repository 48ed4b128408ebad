"""The stack of docker-compose.yml on this machine: its own docker daemon, locally built images, one site."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
HOST, APPS = "portal.fairway.test", "apps.fairway.test"
HTTP_PORT, HTTPS_PORT = 18080, 18443
UID = 10001
STAND_IN_IMAGES = {
    "node:22-bookworm-slim": "",
    "python:3.12-slim-bookworm": "",
    "postgres:17-alpine": "RUN install --directory --owner 70 --group 70 --mode 3777 /var/run/postgresql\n"
    'ENTRYPOINT ["postgres.sh"]\nCMD []',
    "valkey/valkey:8-alpine": "",
    "nginx:1.28-alpine": 'ENTRYPOINT ["nginx.sh"]',
    "fairway-e2e/node": 'CMD ["/usr/sbin/sshd", "-D", "-e"]',
}
SERVICES = 11


class ComposeStack:
    """One run of the stack in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.site = folder / "site"
        self.env = {
            **os.environ,
            "DOCKER_HOST": f"unix://{folder}/docker.sock",
            "DOCKER_BUILDKIT": "0",  # BuildKit's Dockerfile front end would be pulled from a registry
            "COMPOSE_DOCKER_CLI_BUILD": "0",
            "COMPOSE_PROJECT_NAME": "fairwaye2e",
        }
        self.compose_command: list[str] = []

    # -- commands --------------------------------------------------------------------------------------

    def do(self, *command: str, within_s: float = 120, **also: Any) -> str:
        """Run a command in the site's folder; return its output, or raise with its last lines."""
        done = subprocess.run(
            command, cwd=self.site, env=self.env, capture_output=True, text=True, timeout=within_s, **also
        )
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(command)[:200]}: {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}"
            )
        return done.stdout

    def docker(self, *words: str, **also: Any) -> str:
        return self.do("docker", *words, **also)

    def compose(self, *words: str, **also: Any) -> str:
        return self.do(*self.compose_command, *words, **also)

    # -- docker and its images -------------------------------------------------------------------------

    @contextlib.contextmanager
    def daemon(self) -> Iterator[None]:
        """Run a dockerd of our own with its data in the folder."""
        with (self.folder / "dockerd.log").open("wb") as log:
            process = subprocess.Popen(
                [
                    *(
                        "dockerd",
                        "--data-root",
                        str(self.folder / "docker"),
                        "--exec-root",
                        str(self.folder / "exec"),
                    ),
                    *("--host", self.env["DOCKER_HOST"], "--pidfile", str(self.folder / "dockerd.pid")),
                    *("--exec-opt", "native.cgroupdriver=cgroupfs", "--bip", "172.31.240.1/24"),
                    *("--default-address-pool", "base=172.31.241.0/24,size=28"),
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self.wait("dockerd", self._answers, 60)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)

    def _answers(self) -> bool:
        return subprocess.run(["docker", "version"], env=self.env, capture_output=True).returncode == 0

    def build_stand_in_images(self) -> None:
        """Build local images under the names that the stack pulls from a registry."""
        base = self.folder / "debian.tar"
        if not base.exists():
            root = self.folder / "debian"
            self.do(
                "debootstrap",
                "--variant=minbase",
                "--include=ca-certificates",
                "bookworm",
                str(root),
                within_s=600,
            )
            certificates = Path("etc/ssl/certs/ca-certificates.crt")
            shutil.copy(Path("/") / certificates, root / certificates)  # a private CA, if there is one
            self.do("tar", "--directory", str(root), "--create", "--file", f"{base}.new", ".", within_s=300)
            shutil.rmtree(root)
            Path(f"{base}.new").rename(base)
        if not self.docker("images", "--quiet", "fairway-e2e/debian").strip():
            self.docker("import", str(base), "fairway-e2e/debian", within_s=300)
        context = self.folder / "stand-ins"
        shutil.rmtree(context, ignore_errors=True)
        shutil.copytree(HERE, context, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        for script in context.glob("*.sh"):
            script.chmod(0o755)
        program, npm = (
            shutil.which(name, path="/usr/local/bin:/usr/bin") or name for name in ("node", "npm")
        )
        modules = Path(npm).resolve().parents[1]
        (context / "node/bin").mkdir(parents=True)
        shutil.copy(program, context / "node/bin/node")
        shutil.copytree(modules, context / "node/lib/node_modules/npm", symlinks=True)
        for name in ("npm", "npx"):
            (context / "node/bin" / name).symlink_to(f"../lib/node_modules/npm/bin/{name}-cli.js")
        words = ("--file", str(context / "Containerfile"), str(context))
        self.docker("build", "--quiet", "--tag", "fairway-e2e/servers", *words, within_s=1200)
        for name, more in STAND_IN_IMAGES.items():
            self.docker("build", "--quiet", "--tag", name, "-", input=f"FROM fairway-e2e/servers\n{more}\n")

    # -- the site --------------------------------------------------------------------------------------

    def prepare_site(self) -> None:
        """Create files, settings, a certificate and a folder for keys, as in docs/operations.md."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=CHECKOUT, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        for name in filter(None, listed.split("\0")):
            if (CHECKOUT / name).is_file():
                (self.site / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(CHECKOUT / name, self.site / name)
        (self.site / ".env").write_text(
            f"FAIRWAY_HOST={HOST}\nFAIRWAY_APPS_DOMAIN={APPS}\nPOSTGRES_PASSWORD={os.urandom(16).hex()}\n"
            f"DATABASE_PASSWORD={os.urandom(16).hex()}\n"
            f"VALKEY_PASSWORD={os.urandom(16).hex()}\nFAIRWAY_HTTP_PORT={HTTP_PORT}\nFAIRWAY_HTTPS_PORT={HTTPS_PORT}\n"
        )
        certificates = self.site / "deploy/front/certificates"
        certificates.mkdir()
        for name, host in (("portal", HOST), ("apps", f"*.{APPS}")):
            self.do(
                *(
                    "openssl",
                    "req",
                    "-x509",
                    "-newkey",
                    "rsa:2048",
                    "-nodes",
                    "-days",
                    "2",
                    "-subj",
                    f"/CN={host}",
                ),
                *("-addext", f"subjectAltName=DNS:{host}", "-keyout", f"{certificates}/{name}.key"),
                *("-out", f"{certificates}/{name}.pem"),
            )
        self.make_folder(self.site / "secrets")
        for place in certificates.iterdir():
            os.chown(place, UID, -1)

    def make_folder(self, place: Path) -> None:
        """Create a folder that the account of the stack's processes may write to."""
        place.mkdir(exist_ok=True)
        os.chown(place, UID, -1)

    def delete_all_state(self) -> None:
        """Delete volumes and keys, as on a new machine; the node stays."""
        self.compose("--profile", "init", "rm", "--stop", "--force", within_s=300)
        self.docker("volume", "rm", *(f"fairwaye2e_{name}" for name in ("postgres", "data", "sockets")))
        shutil.rmtree(self.site / "secrets")
        self.make_folder(self.site / "secrets")

    def wait(self, what: str, look: Callable[[], Any], within_s: float = 120) -> Any:
        """Return the first true result of ``look``."""
        end_s = time.monotonic() + within_s
        while not (found := look()):
            if time.monotonic() > end_s:
                raise RuntimeError(f"{what}: not within {within_s:.0f} s")
            time.sleep(1)
        return found

    def healthy(self) -> bool:
        """Return whether every running service is healthy."""
        ids = self.compose("ps", "--quiet").split()
        states = [json.loads(self.docker("inspect", "--format", "{{json .State}}", each)) for each in ids]
        return len(ids) == SERVICES and all(s.get("Health", {}).get("Status") == "healthy" for s in states)

    def clean(self) -> None:
        """Stop everything that this run, or a killed one, has started."""
        subprocess.run(
            ["docker", "rm", "--force", "fairwaye2e-node"], env=self.env, capture_output=True, timeout=60
        )
        self.compose("--profile", "init", "down", "--volumes", "--remove-orphans", within_s=300)

    def diagnostics(self) -> str:
        """Return the logs of the services, for a failed run."""
        with contextlib.suppress(Exception):
            return self.compose("ps") + self.compose("logs", "--tail", "25", "--no-color")
        return ""
