"""The shape of the project: who imports whom, what imports cost, what may be tracked."""

import ast
import pickle
import re
import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from sim.errors import BadInput

ROOT = Path(__file__).parents[1]
PACKAGES = ("sim", "executor", "calibration", "experiments")
MAY_IMPORT = {
    "sim": {"sim"},
    "executor": {"executor", "sim"},
    "calibration": {"calibration", "sim"},
    "experiments": set(PACKAGES),
}
SIM_VOCABULARY = {
    *("sim.policy", "sim.decider", "sim.ngram", "sim.workload", "sim.trace"),
    *("sim.agreement", "sim.latency", "sim.errors"),
}
MODEL_LIBRARIES = {"torch", "transformers", "tokenizers", "safetensors", "gguf"}
MACHINE_PATH = re.compile(r"(?:^|[\s\"'=:(`])/(?:work|farm|root|home|Users)/\w|\.\./shared\b", re.MULTILINE)
EXECUTABLE_FORMATS = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".npy", ".npz", ".joblib"}


def module_files() -> dict[str, Path]:
    """Dotted name to file of every module of the packages."""
    files = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in files}


def imports(statements: list[ast.AST]) -> set[str]:
    """Dotted names that the statements import; `from a import b` gives both `a` and `a.b`."""
    names: set[str] = set()
    for node in statements:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add(str(node.module))
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def all_imports(source: str) -> set[str]:
    """Every import of a source text, those inside functions included."""
    return imports(list(ast.walk(ast.parse(source))))


def tracked_files() -> list[Path]:
    """Files that are or would be committed."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


MODULES = module_files()


def test_an_import_inside_a_function_is_seen() -> None:
    assert {"torch", "sim.system"} <= all_imports("def load():\n    import torch\n    from sim import system\n")


@pytest.mark.parametrize("module", MODULES)
def test_packages_import_only_what_stands_below_them(module: str) -> None:
    package = module.partition(".")[0]
    used = {name.partition(".")[0] for name in all_imports(MODULES[module].read_text())}
    assert used & set(PACKAGES) <= MAY_IMPORT[package]


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("executor")])
def test_executor_uses_only_the_vocabulary_of_sim(module: str) -> None:
    used = {name for name in all_imports(MODULES[module].read_text()) if name in MODULES and name.startswith("sim.")}
    assert used <= SIM_VOCABULARY


@pytest.mark.parametrize("module", [m for m in MODULES if not m.startswith(("executor", "experiments.scripts"))])
def test_model_libraries_stay_in_the_executor(module: str) -> None:
    assert not MODEL_LIBRARIES & {name.partition(".")[0] for name in all_imports(MODULES[module].read_text())}


def test_modules_import_each_other_without_cycles() -> None:
    graph = {
        module: {name for name in imports(ast.parse(path.read_text()).body) if name in MODULES and name != module}
        for module, path in MODULES.items()
    }
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)
    graph["sim.errors"] = {"sim.agreement"}
    with pytest.raises(CycleError):
        list(TopologicalSorter(graph).static_order())


def test_no_module_is_named_after_nothing() -> None:
    assert not {"utils", "util", "common", "helpers", "base", "misc"} & {m.rpartition(".")[2] for m in MODULES}


@pytest.mark.parametrize("module", ["sim", "experiments.cli"])
def test_import_is_light(module: str) -> None:
    heavy = sorted({*MODEL_LIBRARIES, "pyarrow", "scipy", "matplotlib"})
    program = f"import sys, {module}; print(sorted(set({heavy}) & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"


def test_no_tracked_file_names_a_machine() -> None:
    assert MACHINE_PATH.search('folder = "/home' + '/someone/models"')
    texts = [path for path in tracked_files() if path.suffix not in {".safetensors", ".png"}]
    assert [path.name for path in texts if MACHINE_PATH.search(path.read_text(errors="ignore"))] == []


def test_tracked_files_are_small_and_safe_to_load() -> None:
    files = tracked_files()
    assert [path.name for path in files if path.suffix in EXECUTABLE_FORMATS] == []
    assert [path.name for path in files if path.stat().st_size > 20_000_000] == []


def test_constraints_pin_every_requirement_at_a_release_it_admits() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {canonicalize_name(name): Version(version) for name, version in (line.split("==") for line in lines)}
    extras = project["optional-dependencies"].values()
    requirements = [Requirement(line) for lines in (project["dependencies"], *extras) for line in lines]
    for requirement in requirements:
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement
    torch = next(requirement for requirement in requirements if requirement.name == "torch")
    major, minor, micro = pins["torch"].release
    assert not torch.specifier.contains(f"{major}.{minor}.{micro + 1}")
    assert not torch.specifier.contains(f"{major}.{minor + 1}.0")


def test_a_refusal_survives_copying() -> None:
    """Worker processes hand exceptions on by pickling them."""
    error = BadInput("name", "must be >= 1", 0)
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "name: must be >= 1, got 0"
