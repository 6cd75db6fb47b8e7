"""Imports between the packages of ``src`` follow a fixed order of layers, without cycles.

The tests read the imports from the source text. Every import counts: at the top of a module, in a
function, and under TYPE_CHECKING. The last tests plant a forbidden import and check that it is
detected.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"

# From top to bottom: a package may import packages of lower lines, but none of its own line.
LAYERS = (
    ("cli", "compat"),
    ("server",),
    ("serving",),
    ("verify", "viewer", "distributed.ray"),
    ("llm",),
    ("llm_engine",),
    ("chat",),
    ("distributed",),
    ("build",),
    ("runner",),
    ("structured",),
    ("compile",),
    ("kernels",),
    ("model_name", "params"),
    ("errors", "startup", "disk_cache", "threads"),
)
# A module with its own layer, above the rest of its package.
APART = ("distributed.ray",)
COMPILE_LAYERS = (
    ("captured_drafter",),
    ("captured_model", "start_record"),
    ("start_tensors",),
    ("load", "probe", "capture", "passes", "inductor"),
    ("kv_cache",),
    ("model",),
    ("fusions",),
    ("lowering",),
    ("fx", "step_inputs"),
    ("step_fields", "weights"),
)
KERNEL_LAYERS = (
    ("ops", "mla", "moe"),
    ("sparse",),
    ("attention", "matmul", "recurrent"),
    ("sampling",),
    ("collectives",),
    ("fused", "native", "row_trial"),
    ("arguments", "custom_op", "e4m3", "jit", "device", "fixed_order", "overlap"),
    ("registry",),
    ("families",),
    ("arch",),
)
# The tests of a package are in the folder of the same name below `tests`, except for these.
TESTED_ELSEWHERE = {
    "kernels/families": "kernels/test_registry.py finds all that they register",
    "server/protocol": "server: through HTTP",
    **{
        path.relative_to(SRC).as_posix(): "compat/test_vllm.py imports every module"
        for path in (SRC / "compat" / "vllm", *(SRC / "compat" / "vllm").rglob("*"))
        if (path / "__init__.py").exists()
    },
}
# Folders of `tests` that do not test a single package; `src/spec` is a link to `spec`.
WITHOUT_PACKAGE = {
    *("benchmarks", "clients", "coverage", "golden", "mutants", "peer", "property", "spec"),
}
# The engine is outside the layers: only these packages may import it, and it may import only
# `params` and the lowest line.
ABOVE_ENGINE = (
    "cli",
    "compat",
    "server",
    "serving",
    "verify",
    "distributed.ray",
    "llm",
    "llm_engine",
    "chat",
    "distributed",
    "build",
    "runner",
    "structured",
)
NOT_FOR_ENGINE = ("torch", "triton", "transformers", "numpy")
# `pagespec/__init__.py` loads public names on first use and has the version.
ROOT, ABOVE_ROOT = "", ("cli", "compat", "server")
# The specification is outside `src`. The wheel contains it for `pagespec trace`.
SPEC, ABOVE_SPEC = "spec", ("cli", "viewer")


class Import(NamedTuple):
    """``target``: a module of pagespec without the prefix ``pagespec.``, or a foreign module."""

    module: str
    target: str
    is_ours: bool
    line: int

    def __str__(self) -> str:
        return f"{self.module or 'pagespec'}:{self.line} imports {self.target or 'pagespec'}"


def read_modules(src: Path) -> dict[str, bool]:
    """Every module's name without the prefix ``pagespec.``, and whether it is a package."""
    found = {}
    for path in src.rglob("*.py"):
        parts = path.relative_to(src).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        found[".".join(parts[:-1] if is_package else parts)] = is_package
    return found


def read_imports(text: str, module: str, modules: Mapping[str, bool]) -> list[Import]:
    """The imports of a module with this source text."""
    home = tuple(module.split(".")) if module else ()
    home = home if modules[module] else home[:-1]
    found = [
        Import(module, target, is_ours, node.lineno)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for target, is_ours in _targets(node, home, modules)
        if target != module or not is_ours
    ]
    return list(dict.fromkeys(found))


def path_of(module: str, is_package: bool) -> Path:
    folder = SRC.joinpath(*module.split(".")) if module else SRC
    return folder / "__init__.py" if is_package else folder.with_suffix(".py")


def _targets(
    node: ast.Import | ast.ImportFrom, home: tuple[str, ...], modules: Mapping[str, bool]
) -> Iterator[tuple[str, bool]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            top, _, rest = alias.name.partition(".")
            yield (rest, True) if top == "pagespec" else (alias.name, False)
    else:
        written = node.module or ""
        if node.level:
            base = ".".join((*home[: len(home) - node.level + 1], *filter(None, [written])))
        elif written.partition(".")[0] == "pagespec":
            base = written.partition(".")[2]
        else:
            yield written, False
            return
        for alias in node.names:
            inner = f"{base}.{alias.name}".lstrip(".")
            yield (inner if inner in modules else base), True


def layer_of(name: str, above: str = "") -> str:
    """The top-level package of a module, or its subpackage within the package ``above``."""
    if not above and name in APART:
        return name
    rest = name[len(above) + 1 :] if above else name
    return rest.partition(".")[0]


def upward(imports: list[Import], order: tuple[tuple[str, ...], ...], above: str = "") -> list[str]:
    """The imports between the packages of ``order`` that do not go to a lower line."""
    place = {name: number for number, line in enumerate(order) for name in line}
    broken = []
    for edge in imports:
        if above and not all(name.startswith(f"{above}.") for name in edge[:2]):
            continue
        here, there = layer_of(edge.module, above), layer_of(edge.target, above)
        if not edge.is_ours or here == there or here not in place or there not in place:
            continue
        if place[here] >= place[there]:
            broken.append(f"{edge}: {here} is {_relation(place, here, there)} {there}")
    return broken


def _relation(place: Mapping[str, int], here: str, there: str) -> str:
    return "below" if place[here] > place[there] else "beside"


def cycles(imports: list[Import]) -> list[str]:
    """Groups of modules that import each other, with the imports among them."""
    graph: dict[str, set[str]] = {}
    for edge in imports:
        if edge.is_ours:
            graph.setdefault(edge.module, set()).add(edge.target)

    reached = {module: _reached(graph, module) for module in graph}
    found, seen = [], set()
    for module, others in reached.items():
        if module in others and module not in seen:
            group = {other for other in others if module in reached.get(other, ())}
            seen |= group
            edges = [str(e) for e in imports if e.is_ours and {e.module, e.target} <= group]
            found.append("\n    ".join([f"a cycle of {len(group)} modules:", *edges]))
    return found


def _reached(graph: Mapping[str, set[str]], module: str) -> set[str]:
    reached: set[str] = set()
    todo = list(graph[module])
    while todo:
        other = todo.pop()
        if other not in reached:
            reached.add(other)
            todo += graph.get(other, ())
    return reached


def broken_rules(imports: list[Import]) -> list[str]:
    """Violations of all rules except the order within ``kernels``."""
    broken = upward(imports, LAYERS) + upward(imports, COMPILE_LAYERS, "compile") + cycles(imports)
    lowest = LAYERS[-1]
    for edge in imports:
        here, there = layer_of(edge.module), layer_of(edge.target)
        if not edge.is_ours:
            if here == "engine" and there in NOT_FOR_ENGINE:
                broken.append(f"{edge}: the engine may not import {there}")
        elif here == "engine" and there not in ("engine", "params", *lowest):
            broken.append(f"{edge}: the engine may not import it")
        elif there == "engine" and here not in (ROOT, "engine", *ABOVE_ENGINE):
            broken.append(f"{edge}: {here} may not import the engine")
        elif there == ROOT and here not in ABOVE_ROOT:
            broken.append(f"{edge}: only {ABOVE_ROOT} may")
        elif there == SPEC and here not in ABOVE_SPEC:
            broken.append(f"{edge}: only {ABOVE_SPEC} may")
    return broken


MODULES = read_modules(SRC)


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return [
        found
        for module, is_package in sorted(MODULES.items())
        for found in read_imports(path_of(module, is_package).read_text(), module, MODULES)
    ]


def report(broken: list[str]) -> str:
    return "\n".join(["", *broken])


def test_no_import_goes_up_or_forms_a_cycle(imports: list[Import]) -> None:
    broken = broken_rules(imports)
    assert not broken, report(broken)


def test_kernel_packages_import_lower_ones_only(imports: list[Import]) -> None:
    broken = upward(imports, KERNEL_LAYERS, "kernels")
    assert not broken, report(broken)


def test_every_imported_module_exists(imports: list[Import]) -> None:
    names = {*MODULES, SPEC}
    lost = [str(e) for e in imports if e.is_ours and not _is_known(e.target, names)]
    assert not lost, report(lost)


def _is_known(target: str, names: set[str]) -> bool:
    return target in names or layer_of(target) == SPEC


@pytest.mark.parametrize(
    ("above", "order"), [("compile", COMPILE_LAYERS), ("kernels", KERNEL_LAYERS)]
)
def test_every_subpackage_has_a_layer(above: str, order: tuple[tuple[str, ...], ...]) -> None:
    packages = {layer_of(name, above) for name in MODULES if name.startswith(f"{above}.")}
    assert packages == {name for line in order for name in line}


def test_every_package_has_a_layer() -> None:
    packages = {layer_of(name) for name in MODULES}
    assert packages == {ROOT, "engine", *(name for line in LAYERS for name in line)}


def unmirrored(sources: Path, tests: Path) -> set[str]:
    """Folders with modules in ``sources`` but without tests in ``tests``, and the reverse."""
    packages, tested = (
        {path.parent.relative_to(top).as_posix() for path in top.rglob(pattern)}
        for top, pattern in ((sources, "*.py"), (tests, "test_*.py"))
    )
    return (packages ^ tested) - {"."}


def test_tests_mirror_the_package() -> None:
    assert unmirrored(SRC, Path(__file__).parent) == {*TESTED_ELSEWHERE, *WITHOUT_PACKAGE}


# Tests of the checks ------------------------------------------------------------------------------

PLANTED = [
    ("runner.memory_profile", "from ..llm import LLM", "runner is below llm"),
    ("kernels.device", "from ..compile.fx import nodes", "kernels is below compile"),
    ("errors", "from .startup import gc_paused", "errors is beside startup"),
    ("verify.report", "def f():\n    from ..cli import main", "verify is below cli"),
    ("compile.model.layers", "from ..capture import dynamo", "model is below capture"),
    ("compile.model.loaded", "from ..load import source", "model is below load"),
    ("compile.model.linear_weights", "from ..probe import probe_pass", "model is below probe"),
    ("compile.load.load", "def f():\n    from ..probe import probe", "load is beside probe"),
    ("compile.probe.probe", "from ..load import quantized_load", "probe is beside load"),
    ("compile.capture.few_layers", "from ..load import load", "capture is beside load"),
    ("compile.capture.dynamo", "from ..probe import masks", "capture is beside probe"),
    ("compile.passes.cleanup", "from ..inductor import regions", "passes is beside induc"),
    ("compile.fusions.fuse_norm", "from ..passes import cleanup", "fusions is below passes"),
    ("compile.lowering.lower_gpu", "from ..fusions import sort_rows", "lowering is below fus"),
    ("compile.fx.nodes", "from ...engine import plan", "compile may not import the engine"),
    ("kernels.jit.compile_pool", "from ...engine import plan", "kernels may not import the engine"),
    ("engine.plan", "def f():\n    import torch.fx", "the engine may not import torch"),
    ("engine.plan", "from ..llm import LLM", "the engine may not import it"),
    ("engine.request", "from pagespec.runner.cpu import pack", "the engine may not import it"),
    ("engine.request", "from . import plan", "a cycle of 2 modules"),
    (
        "engine.policy",
        "if TYPE_CHECKING:\n    from .scheduler import Scheduler",
        "a cycle of",
    ),
    ("build", "from . import __version__", "only ('cli', 'compat', 'server') may"),
    ("llm", "from .spec.replay import replay", "only ('cli', 'viewer') may"),
]


def test_a_folder_without_tests_is_detected(tmp_path: Path) -> None:
    for file in ("src/a/x.py", "src/a/b/y.py", "tests/a/test_x.py", "tests/c/test_z.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert unmirrored(tmp_path / "src", tmp_path / "tests") == {"a/b", "c"}


@pytest.mark.parametrize(("module", "text", "found"), PLANTED)
def test_a_forbidden_import_is_detected(
    imports: list[Import], module: str, text: str, found: str
) -> None:
    planted = [*imports, *read_imports(text, module, MODULES)]
    before = set(broken_rules(imports))
    new = [line for line in broken_rules(planted) if line not in before]
    assert any(found in line for line in new), report(new)


PLANTED_AMONG_KERNELS = [
    ("kernels.sampling.sampler", "kernels.matmul.plan", "sampling is below matmul"),
    ("kernels.matmul.dispatch", "kernels.moe.grouped_mm", "matmul is below moe"),
    ("kernels.sparse.chosen", "kernels.mla.decode", "sparse is below mla"),
    ("kernels.attention.decode", "kernels.matmul.plan", "attention is beside matmul"),
    ("kernels.moe.route", "kernels.mla.decode", "moe is beside mla"),
]


@pytest.mark.parametrize(("module", "target", "found"), PLANTED_AMONG_KERNELS)
def test_a_forbidden_import_among_kernels_is_detected(module: str, target: str, found: str) -> None:
    (broken,) = upward([Import(module, target, True, 1)], KERNEL_LAYERS, "kernels")
    assert broken.endswith(f"imports {target}: {found}")


def test_the_wheel_has_every_package() -> None:
    declared = tomllib.loads((SRC.parent / "pyproject.toml").read_text())
    packages = declared["tool"]["setuptools"]["packages"]
    folders = {path.parent for path in SRC.rglob("__init__.py") if "__pycache__" not in path.parts}
    there = {".".join(("pagespec", *folder.relative_to(SRC).parts)) for folder in folders}
    own = {name for name in packages if not name.startswith("pagespec.spec")}
    assert own == {name for name in there if not name.startswith("pagespec.spec")}
