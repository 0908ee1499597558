"""What this machine offers: CPU feature level, cores, memory, C++ compiler, and a cache of what that built.

Standard library only: an artifact can be served, and its host code rebuilt, without the rest of the compiler.
"""

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from octavo.compiler.errors import CodegenError, OptionError, ToolchainError

# Best first: a host of one level runs code built for it and for every later one.
LEVELS = ("avx512_bf16", "avx512", "avx2", "portable")

_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_AVX512_BF16 = _AVX512 | {"avx512_bf16", "avx512_vnni"}  # no CPU has the first without the second
_NEEDED = {"avx512_bf16": _AVX512_BF16, "avx512": _AVX512, "avx2": _AVX2, "portable": set[str]()}

# Nobody reads the flags of floating-point exceptions; kept, they bar loops that compare from becoming vectors.
BASE_FLAGS = ("-O3", "-std=c++17", "-fno-trapping-math", "-shared", "-fPIC", "-fopenmp")
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
_AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", *_AVX2_FLAGS)
ARCH_FLAGS = {
    "avx512_bf16": (*_AVX512_FLAGS, "-mavx512bf16", "-mavx512vnni"),
    "avx512": _AVX512_FLAGS,
    "avx2": _AVX2_FLAGS,
    "portable": (),
}
BUILD_TIMEOUT_S = 900


def host_features() -> str:
    """The best of LEVELS that this CPU has. OCTAVO_CPU_FEATURES may name a lower one.

    Raises OptionError if that is no level, or one that this CPU lacks.
    """
    level = _detected_features()
    wanted = os.environ.get("OCTAVO_CPU_FEATURES", "")
    if not wanted:
        return level
    choices = LEVELS[LEVELS.index(level) :]
    if wanted not in choices:
        raise OptionError(
            f"OCTAVO_CPU_FEATURES: expected one of {', '.join(choices)} on this CPU, got '{wanted}'; unset it"
        )
    return wanted


def can_run(features: str) -> bool:
    """Whether code built for this level runs here."""
    return features in LEVELS and LEVELS.index(features) >= LEVELS.index(host_features())


@lru_cache(maxsize=1)
def _detected_features() -> str:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return "portable"
    try:
        return level_of(Path("/proc/cpuinfo").read_text())
    except OSError:
        return "portable"


def level_of(cpuinfo: str) -> str:
    """The level that the text of /proc/cpuinfo tells of: what every listed CPU has."""
    lines = [line.split(":", 1)[1].split() for line in cpuinfo.splitlines() if line.startswith("flags")]
    flags = set.intersection(*map(set, lines)) if lines else set[str]()
    return next(level for level in LEVELS if flags >= _NEEDED[level])


def usable_cores() -> int:
    """Cores this process may use: its affinity, cut to the container's CPU quota where one is set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read_words("/sys/fs/cgroup/cpu.max")
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit():
        cores = min(cores, -(-int(quota[0]) // int(quota[1])))
    return max(cores, 1)


def available_memory() -> int:
    """Bytes of memory that new allocations may take without swapping, as far as the system tells."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    words = _read_words("/proc/meminfo")
    if "MemAvailable:" in words:
        pages = int(words[words.index("MemAvailable:") + 1]) * 1024
    limit, used = _read_words("/sys/fs/cgroup/memory.max"), _read_words("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdigit():
        pages = min(pages, max(int(limit[0]) - int(used[0]), 0))
    return pages


def _read_words(path: str) -> list[str]:
    try:
        return Path(path).read_text().split()
    except OSError:
        return []


def find_compiler() -> list[str]:
    """The C++ compiler, as the start of a command line: $CXX if set, else c++, g++ or clang++ on PATH."""
    if chosen := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(chosen[0]) is None:
            raise ToolchainError(
                f"C++ compiler: CXX is '{chosen[0]}', which is not on PATH; correct or unset CXX"
            )
        return chosen
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    raise ToolchainError(
        "C++ compiler: expected $CXX, c++, g++ or clang++ on PATH, found none; install one "
        "(Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install)"
    )


@lru_cache(maxsize=8)
def _compiler_version(command: tuple[str, ...]) -> str:
    try:
        result = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"C++ compiler: '{shlex.join(command)} --version' failed: {error}") from None
    if result.returncode != 0:
        raise ToolchainError(
            f"C++ compiler: '{shlex.join(command)} --version' exited with {result.returncode}: "
            f"{result.stderr.strip()[:300]}; set CXX to a working compiler"
        )
    return result.stdout.splitlines()[0] if result.stdout else ""


def cache_directory() -> Path:
    """Where built code is kept: $OCTAVO_CACHE, else ~/.cache/octavo (XDG_CACHE_HOME is honoured)."""
    if chosen := os.environ.get("OCTAVO_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "octavo"


def build_shared_library(source: str, features: str, cache_dir: Path | None = None) -> Path:
    """Compile one C++ translation unit for a level of LEVELS; returns the library's path.

    The cache is content-addressed by source, compiler, its version and flags. Raises ToolchainError without a
    compiler, CodegenError with the first messages when the text does not compile.
    """
    if features not in ARCH_FLAGS:
        raise OptionError(f"CPU features: expected one of {', '.join(LEVELS)}, got '{features}'")
    command = find_compiler()
    flags = [*BASE_FLAGS, *ARCH_FLAGS[features]]
    parts = [source, *command, _compiler_version(tuple(command)), *flags, platform.machine()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    folder = (cache_dir or cache_directory()) / "cpp"
    library = folder / f"{key}.so"
    if library.is_file():
        return library
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(folder / f"{key}.lock"):
        if not library.is_file():  # another process may have built it while this one waited
            _compile(source, [*command, *flags], library)
    return library


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _compile(source: str, command: list[str], library: Path) -> None:
    """Build beside the final place and rename, so that nobody ever sees half a library."""
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build-") as folder:
        text, built = Path(folder) / "program.cpp", Path(folder) / "program.so"
        text.write_text(source)
        line = [*command, "-o", str(built), str(text)]
        try:
            result = subprocess.run(
                line, capture_output=True, text=True, errors="replace", timeout=BUILD_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ToolchainError(f"C++ compiler: '{shlex.join(line)}' failed: {error}") from None
        if result.returncode != 0 or not built.is_file():
            raise CodegenError(_failure(result, line, library.with_suffix(".failed.cpp"), source))
        os.replace(text, library.with_suffix(".cpp"))
        with built.open("rb") as handle:
            os.fsync(
                handle.fileno()
            )  # a crash after the rename must not leave an empty library under its key
        os.replace(built, library)


def _failure(result: subprocess.CompletedProcess[str], line: list[str], kept: Path, source: str) -> str:
    kept.write_text(source)
    output = result.stderr.splitlines() or result.stdout.splitlines()
    errors = [text for text in output if "error" in text][:5] or output[:5]
    shown = "\n  ".join(text[:300] for text in errors)
    return (
        f"C++ build: expected exit 0, got {result.returncode} from '{shlex.join(line[:-3])}'; "
        f"the text is kept in {kept}; first messages:\n  {shown}"
    )
