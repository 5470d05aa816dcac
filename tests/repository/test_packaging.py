"""The sdist, and the wheel made from it, hold the whole package; the tree runs without being installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MAPPED = {"shardlib.ops": "ops", "shardlib.cuda": "cuda"}  # package -> folder at the top of the tree


def _settings() -> dict[str, object]:
    settings: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return settings


def _sources() -> set[str]:
    """Every file of the package, by its path in a wheel."""
    sources = set()
    for top, inside in (("shardlib", "shardlib"), *((folder, f"shardlib/{folder}") for folder in MAPPED.values())):
        for path in (ROOT / top).rglob("*"):  # does not follow links to folders
            relative = path.relative_to(ROOT / top)
            if path.is_file() and "__pycache__" not in relative.parts and path.suffix != ".so":
                sources.add(f"{inside}/{relative}")
    return sources


def test_every_folder_of_modules_is_a_listed_package() -> None:
    found = {"shardlib.cuda"} | {
        str(Path(source).parent).replace("/", ".") for source in _sources() if source.endswith("/__init__.py")
    }
    assert sorted(found) == _settings()["packages"]
    assert _settings()["package-dir"] == MAPPED


@pytest.mark.parametrize("folder", MAPPED.values())
def test_links_are_relative(folder: str) -> None:
    link = ROOT / "shardlib" / folder
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{folder}"


@pytest.mark.parametrize("folder", ["cuda", "tests/cuda"])
def test_nothing_hides_the_namespace_package_cuda(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist of a copy of the tree, and the wheel of that sdist."""
    folder = tmp_path_factory.mktemp("built")
    tree = folder / "tree"
    names = ("pyproject.toml", "README.md", "LICENSE", "shardlib", "ops", "cuda")
    tree.mkdir()
    for name in names:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(source, tree / name)

    def build(kind: str, where: Path) -> Path:
        code = f"import setuptools.build_meta as b; b.build_{kind}({str(folder)!r})"
        done = subprocess.run([sys.executable, "-c", code], cwd=where, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        (path,) = folder.glob({"sdist": "*.tar.gz", "wheel": "*.whl"}[kind])
        return path

    sdist = build("sdist", tree)
    with tarfile.open(sdist) as archive:
        safely: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python has it from 3.11.4 on
        archive.extractall(folder / "unpacked", **safely)
    (unpacked,) = (folder / "unpacked").iterdir()
    return sdist, build("wheel", unpacked)


@pytest.mark.long
def test_sdist_holds_every_source(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    wanted = {s.replace("shardlib/ops/", "ops/").replace("shardlib/cuda/", "cuda/") for s in _sources()}
    assert wanted - names == set()
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names


@pytest.mark.long
def test_wheel_from_sdist_holds_every_source_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == _sources()


@pytest.mark.long
def test_import_needs_no_optional_library() -> None:
    """The extras are for the examples, notebooks and tests; here they cannot be imported at all."""
    missing = ["tqdm", "matplotlib", "jax", "transformers", "hypothesis", "pytest"]
    code = f"import sys; sys.modules |= dict.fromkeys({missing}); import shardlib"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.skipif(version("torch") < "2.12", reason="torch 2.11 imports its compiler for the first fake tensor")
def test_import_leaves_out_what_takes_longer_than_itself() -> None:
    heavy = ["torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.checkpoint", "sympy"]
    code = f"import shardlib, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
