"""The program for nodes: the same bytes each time, and nothing in it that Python 3.8 cannot read."""

from __future__ import annotations

import ast
import builtins
import dis
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType

import pytest

from agents.bundle import build_archive
from agents.local import open_local
from agents.nvml_subset import used_names
from tests.fakes import nvml

AGENTS = Path(__file__).parents[2] / "agents"
ON_NODES = [*(AGENTS / "node").rglob("*.py"), AGENTS / "verbs.py"]


def test_equal_source_gives_an_equal_bundle(tmp_path: Path) -> None:
    assert build_archive(tmp_path / "a.pyz") == build_archive(tmp_path / "b.pyz")
    assert (tmp_path / "a.pyz").read_bytes() == (tmp_path / "b.pyz").read_bytes()


def test_node_code_reads_as_python_3_8_and_imports_only_the_standard_library() -> None:
    allowed = set(sys.stdlib_module_names) | {"agents", "pynvml"}
    for path in ON_NODES:
        tree = ast.parse(path.read_text(), feature_version=(3, 8))
        for each in ast.walk(tree):
            names = [alias.name for alias in each.names] if isinstance(each, ast.Import) else []
            names += [each.module or ""] if isinstance(each, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] in allowed, f"{path.name} imports {name}"
                on_nodes = name.startswith(("agents.node", "agents.verbs"))
                assert on_nodes or not name.startswith("agents."), f"{path.name}: {name}"


def test_third_party_code_is_valid_python_3_8_with_its_licence(tmp_path: Path) -> None:
    build_archive(tmp_path / "agent.pyz")
    with zipfile.ZipFile(tmp_path / "agent.pyz") as archive:
        ast.parse(archive.read("pynvml.py").decode(), feature_version=(3, 8))
        licence = archive.read("pynvml.LICENSE").decode()
    assert licence.startswith("Copyright (c)") and "NVIDIA CORPORATION" in licence.upper()
    assert licence.rstrip().endswith("POSSIBILITY OF SUCH DAMAGE.")


def test_the_bundled_nvml_has_every_function_the_agent_uses(tmp_path: Path) -> None:
    build_archive(tmp_path / "agent.pyz")
    with zipfile.ZipFile(tmp_path / "agent.pyz") as archive:
        text = archive.read("pynvml.py").decode()
    assert len(text) < 60_000
    part = ModuleType("part")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "part", part)  # it looks itself up, to make a class of each error
        exec(compile(text, "pynvml.py", "exec"), vars(part))
    assert used_names() <= set(vars(part)) and len(used_names()) > 40
    known = set(vars(part)) | set(dir(builtins))
    for code in codes_of(compile(text, "pynvml.py", "exec")):
        asked = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
        assert asked <= known, f"{code.co_name} needs {asked - known}"


@pytest.mark.parametrize(("python_version", "suffix"), [("that of the portal", ".pyc"), ("another", ".py")])
def test_the_agent_starts_from_bytecode_if_the_node_has_the_portals_python(
    tmp_path: Path, python_version: str, suffix: str
) -> None:
    build_archive(tmp_path / "built.pyz")
    archive = tmp_path / "agent.pyz"
    with zipfile.ZipFile(tmp_path / "built.pyz") as built, zipfile.ZipFile(archive, "w") as copied:
        for each in built.infolist():
            content = built.read(each)
            if python_version == "another" and each.filename.endswith(".pyc"):
                content = bytes([content[0] ^ 1]) + content[1:]
            copied.writestr(each, content)
    (tmp_path / "gpus.json").write_text('{"gpus": []}')
    places = {"state_dir": str(tmp_path / "state"), "home_root": str(tmp_path / "homes")}
    settings = {"cluster": "t", "gpu_provider": f"file:{tmp_path / 'gpus.json'}", **places}
    (tmp_path / "node.json").write_text(json.dumps(settings))
    with open_local(archive, "watch", tmp_path / "node.json", cluster="t") as link:
        assert link.hello.gpus == ()
    program = "import sys; sys.path.insert(0, sys.argv[1]); import agents.node.server as s; print(s.__file__)"
    command = [sys.executable, "-I", "-c", program, str(archive)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert printed.strip() == f"{archive}/agents/node/server{suffix}"


def codes_of(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from codes_of(each)


@pytest.mark.skipif(nvml.missing_compiler() is not None, reason=str(nvml.missing_compiler()))
def test_the_bundle_sees_the_gpus_of_a_machine_that_has_only_a_driver(tmp_path: Path) -> None:
    build_archive(tmp_path / "agent.pyz")
    driver = nvml.FakeDriver(tmp_path, [nvml.h200(0), nvml.h200(1)])
    places = {"state_dir": str(tmp_path / "state"), "home_root": str(tmp_path / "homes")}
    (tmp_path / "node.json").write_text(json.dumps({"cluster": "t", "gpu_provider": "nvml", **places}))
    with open_local(
        tmp_path / "agent.pyz",
        "watch",
        tmp_path / "node.json",
        cluster="t",
        environment=driver.environment,
        python=sys._base_executable,  # as a node's Python, which has no packages
    ) as link:
        reported = [(gpu.uuid, gpu.model, gpu.memory_mib, gpu.health) for gpu in link.hello.gpus]
        assert reported == [(f"GPU-h200-{n}", "NVIDIA H200", 143_771, "ok") for n in (0, 1)]
        assert link.hello.driver == "570.124.06"
