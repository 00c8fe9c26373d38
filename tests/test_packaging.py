"""The frame: what the wheel holds, which way the imports point, what gets installed, and the links of the checkout."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from openelm_mlx._links import LINKED, check_links

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "openelm_mlx"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def python(*arguments: str, cwd: Path, executable: str | Path = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)


# Which way the imports point.


def imports(file: Path, module: str) -> Iterator[str]:
    """The full names of everything a file imports, at the top or inside functions; ``module`` is its own name."""
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def modules(folder: Path, package: str) -> Iterator[tuple[Path, str]]:
    """The files of a folder and their module names, without what is linked into it."""
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        if (folder / parts[0]).is_symlink():
            continue
        yield file, ".".join([package, *(part for part in parts if part != "__init__")])


def wrong_imports(folder: Path, package: str, forbidden: set[str]) -> list[str]:
    """ "file imports name" for each import of a folder that the arrows of the design do not allow."""
    names = forbidden | {f"openelm_mlx.{name}" for name in forbidden} | set(LINKED)
    pattern = re.compile(rf"({'|'.join(map(re.escape, sorted(names)))})(\.|$)")
    return [
        f"{file.relative_to(ROOT) if file.is_relative_to(ROOT) else file.name} imports {name}"
        for file, module in modules(folder, package)
        for name in imports(file, module)
        if pattern.match(name)
    ]


@pytest.mark.parametrize(
    ("folder", "package", "forbidden"),
    [
        (PACKAGE, "openelm_mlx", set(LINKED)),
        (ROOT / "convert", "openelm_mlx.convert", {"finetune", "benchmarks"}),
        (ROOT / "finetune", "openelm_mlx.finetune", {"convert", "benchmarks"}),
        (ROOT / "benchmarks", "openelm_mlx.benchmarks", set()),
    ],
    ids=["openelm_mlx", "convert", "finetune", "benchmarks"],
)
def test_imports_point_one_way(folder: Path, package: str, forbidden: set[str]) -> None:
    assert wrong_imports(folder, package, forbidden) == []


def test_a_wrong_import_is_seen(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("from . import convert\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "deep.py").write_text(
        "from ..finetune import data\nfrom .. import config\n\ndef f():\n    import benchmarks.roofline\n"
    )
    assert wrong_imports(tmp_path, "openelm_mlx", set(LINKED)) == [
        "__init__.py imports openelm_mlx.convert",
        "deep.py imports openelm_mlx.finetune.data",
        "deep.py imports benchmarks.roofline",
    ]


def test_the_linked_folders_have_one_name() -> None:
    code = "import sys, openelm_mlx.convert; sys.exit('convert' in sys.modules)"
    done = python("-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", ["import convert", "from finetune import data", "import benchmarks.roofline"])
def test_ruff_bans_the_short_names(line: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--select=TID251", "--stdin-filename=convert/planted.py", "-"],
        input=f"{line}\n",
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert "TID251" in done.stdout


# What gets installed.


def closure(requirements: list[Requirement]) -> set[str]:
    """The names of all distributions that these requirements bring into this environment."""
    seen: set[tuple[str, str]] = set()
    waiting = list(requirements)
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            waiting.extend(needs(name, extra))
    return {name for name, _ in seen}


def needs(name: str, extra: str) -> list[Requirement]:
    """What a distribution requires, here and with this extra; nothing when it is not installed."""
    if name == PROJECT["name"]:
        lines = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    else:
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            return []
    requirements = [Requirement(line) for line in lines]
    return [needed for needed in requirements if not needed.marker or needed.marker.evaluate({"extra": extra})]


def test_torch_is_in_no_extra_but_reference() -> None:
    for extra, lines in {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}.items():
        declared = {canonicalize_name(Requirement(line).name) for line in lines}
        assert ("torch" in declared) == (extra == "reference"), extra


def test_nothing_brings_torch_in() -> None:
    names = closure([Requirement(f"{PROJECT['name']}[dev]")])
    assert {"mlx-lm", "transformers", "pytest", "mlx"} <= names, "the closure is not followed"
    assert "torch" not in names


def test_each_backend_is_an_extra_of_its_own() -> None:
    backends = {extra: PROJECT["optional-dependencies"][extra] for extra in ("cpu", "cuda12", "cuda13")}
    for extra, lines in backends.items():
        (requirement,) = map(Requirement, lines)
        assert (requirement.name, requirement.extras) == ("mlx", {extra})
        assert requirement.marker is not None
        assert not requirement.marker.evaluate({"platform_system": "Darwin"})


# The links of the checkout.


def test_the_links_are_links_and_pass() -> None:
    for name in LINKED:
        assert (PACKAGE / name).readlink() == Path("..", name)
    check_links(PACKAGE)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_checkout_without_links_says_so_and_how_to_mend_it(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "core.symlinks=false"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    package = tmp_path / "openelm_mlx"
    package.mkdir()
    for name in LINKED:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (package / name).symlink_to(f"../{name}")
    git("init")
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    git("commit", "-m", "x")
    for name in LINKED:
        (package / name).unlink()
    git("config", "core.symlinks", "false")
    git("checkout", "--", "openelm_mlx")
    assert (package / "convert").read_text() == "../convert"

    with pytest.raises(ImportError, match="is a text file instead of a link") as refusal:
        check_links(package)
    assert "\n" not in str(refusal.value)
    mend = str(refusal.value).partition("in the checkout: ")[2]
    subprocess.run(["sh", "-c", mend], cwd=tmp_path, check=True, capture_output=True)
    check_links(package)
    assert all((package / name).is_symlink() for name in LINKED)


# The wheel.


def copy_of_the_tree(target: Path) -> Path:
    ignored = (".venv*", ".git", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")
    return Path(shutil.copytree(ROOT, target, symlinks=True, ignore=shutil.ignore_patterns(*ignored)))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, the wheel made from it, and in ``direct/`` the wheel made from the tree itself."""
    folder = tmp_path_factory.mktemp("built")
    tree = copy_of_the_tree(folder / "tree")
    for arguments in (["--outdir", str(folder)], ["--wheel", "--outdir", str(folder / "direct")]):
        done = python("-m", "build", *arguments, str(tree), cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def wheel_in(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def content(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    wheel = content(wheel_in(built))
    top = {name.split("/")[0] for name in wheel}
    assert {name for name in top if not name.endswith(".dist-info")} == {"openelm_mlx"}
    assert len(top) == 2
    assert {"openelm_mlx/py.typed", *(f"openelm_mlx/{name}/__init__.py" for name in LINKED)} <= wheel
    assert wheel == content(wheel_in(built / "direct")), "the sdist and the tree make different wheels"


@pytest.mark.slow
def test_no_file_of_a_package_is_left_out_of_the_wheel(built: Path) -> None:
    tree = built / "tree"
    wanted = set()
    for name in ("openelm_mlx", *LINKED):
        files = [file for file in (tree / name).rglob("*") if file.is_file() and file.suffix not in (".md", ".pyc")]
        prefix = "" if name == "openelm_mlx" else "openelm_mlx/"
        wanted |= {prefix + file.relative_to(tree).as_posix() for file in files}
    records = {
        file for file in wanted if file.startswith("openelm_mlx/benchmarks/results/")
    }  # of measurements: no code
    assert wanted - records - content(wheel_in(built)) == set()


@pytest.mark.slow
def test_the_wheel_brings_the_embedded_model_and_stays_small(built: Path) -> None:
    wheel = wheel_in(built)
    model = ("config.json", "model.safetensors", "tokenizer.model", "README.md")
    assert {f"openelm_mlx/assets/demo_model/{name}" for name in model} <= content(wheel)
    assert {f"openelm_mlx/assets/pie/{name}.jsonl" for name in ("train", "valid")} <= content(wheel)
    assert wheel.stat().st_size < 9e6


@pytest.mark.slow
def test_the_wheel_installs(built: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    assert python("-m", "venv", str(venv), cwd=tmp_path).returncode == 0
    interpreter = venv / "bin" / "python"
    done = python("-m", "pip", "install", "--no-deps", str(wheel_in(built)), cwd=tmp_path, executable=interpreter)
    assert done.returncode == 0, done.stderr
    code = (
        "import importlib.util as u, openelm_mlx.version as v; print(v.__version__, v.__file__, "
        f"[n for n in {LINKED!r} if u.find_spec(n)], [n for n in {LINKED!r} if not u.find_spec('openelm_mlx.' + n)])"
    )
    done = python("-c", code, cwd=tmp_path, executable=interpreter)
    assert done.returncode == 0, done.stderr
    assert str(venv) in done.stdout
    assert done.stdout.endswith("[] []\n")
    assert (venv / "bin" / "openelm").is_file()


@pytest.mark.slow
def test_mypy_and_ruff_see_the_linked_folders_once(tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path / "tree")
    (tree / "convert" / "planted.py").write_text('import os\nnumber: int = "text"\n')
    types = python("-m", "mypy", ".", cwd=tree).stdout
    assert re.findall(r"^(\S*planted\.py:\d+: error)", types, re.MULTILINE) == [
        "openelm_mlx/convert/planted.py:2: error"
    ]
    lint = python("-m", "ruff", "check", "--output-format=concise", ".", cwd=tree).stdout
    assert re.findall(r"^(\S*planted\.py:\d+:\d+: F401)", lint, re.MULTILINE) == ["convert/planted.py:1:8: F401"]
