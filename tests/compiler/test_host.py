import ctypes
import os
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo.compiler import host
from octavo.compiler.errors import CodegenError, OptionError, ToolchainError

SOURCE = 'extern "C" int answer() { return 42; }\n'
AVX2 = "sse4_2 avx2 fma f16c"
AVX512 = f"{AVX2} avx512f avx512bw avx512vl avx512dq"


def cpuinfo(*flags: str) -> str:
    return "\n".join(f"processor\t: {i}\nmodel name\t: x\nflags\t\t: {f}\n" for i, f in enumerate(flags))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A stand-in compiler that counts its runs and then calls the real one."""
    path = tmp_path / "fake-cxx"
    real = host.find_compiler()[0]
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo run >> {tmp_path}/runs\nexec {real} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("text", "level"),
    [
        (cpuinfo(f"{AVX512} avx512_bf16 avx512_vnni"), "avx512_bf16"),
        (cpuinfo(f"{AVX512} avx512_bf16"), "avx512"),
        (cpuinfo(AVX512), "avx512"),
        (cpuinfo(AVX512.replace("avx512vl", "")), "avx2"),
        (cpuinfo(AVX2), "avx2"),
        (cpuinfo("sse4_2 avx2 f16c avx512_bf16"), "portable"),
        (cpuinfo(AVX512, AVX2), "avx2"),
        (cpuinfo("sse4_2"), "portable"),
        ("Features\t: fp asimd\n", "portable"),
        ("", "portable"),
    ],
)
def test_level_of_cpuinfo(text: str, level: str) -> None:
    assert host.level_of(text) == level


def test_environment_may_lower_the_level_but_not_raise_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_detected_features", lambda: "avx2")
    monkeypatch.delenv("OCTAVO_CPU_FEATURES", raising=False)
    assert host.host_features() == "avx2"
    monkeypatch.setenv("OCTAVO_CPU_FEATURES", "portable")
    assert host.host_features() == "portable"
    for wrong in ("avx512", "sse9"):
        monkeypatch.setenv("OCTAVO_CPU_FEATURES", wrong)
        with pytest.raises(OptionError, match=f"expected one of avx2, portable on this CPU, got '{wrong}'"):
            host.host_features()


def test_can_run_lower_levels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_detected_features", lambda: "avx512")
    monkeypatch.delenv("OCTAVO_CPU_FEATURES", raising=False)
    runs = {level: host.can_run(level) for level in (*host.LEVELS, "neon", "")}
    assert runs == {
        "avx512_bf16": False, "avx512": True, "avx2": True, "portable": True, "neon": False, "": False,
    }  # fmt: skip


def test_cores_follow_affinity_and_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for quota, cores in (
        (["max", "100000"], 8),
        (["250000", "100000"], 3),
        (["50000", "100000"], 1),
        ([], 8),
    ):
        monkeypatch.setattr(host, "_read_words", lambda path, quota=quota: quota)
        assert host.usable_cores() == cores


def test_memory_is_what_is_available_within_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"/proc/meminfo": ["MemTotal:", "9000", "kB", "MemAvailable:", "8000", "kB"]}
    monkeypatch.setattr(host, "_read_words", lambda path: words.get(path, []))
    assert host.available_memory() == 8000 * 1024
    words |= {"/sys/fs/cgroup/memory.max": ["1000000"], "/sys/fs/cgroup/memory.current": ["400000"]}
    assert host.available_memory() == 600000
    words["/sys/fs/cgroup/memory.max"] = ["max"]
    assert host.available_memory() == 8000 * 1024


def test_no_compiler_says_what_was_looked_for_and_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ToolchainError, match=r"\$CXX, c\+\+, g\+\+ or clang\+\+ on PATH, found none.*apt install"
    ):
        host.build_shared_library(SOURCE, "portable", tmp_path)


def test_a_wrong_cxx_is_an_error_not_a_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(ToolchainError, match="CXX is 'no-such-compiler', which is not on PATH"):
        host.find_compiler()


def test_builds_once_and_reuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: Path) -> None:
    monkeypatch.setenv("CXX", str(script))
    first = host.build_shared_library(SOURCE, "portable", tmp_path / "cache")
    again = host.build_shared_library(SOURCE, "portable", tmp_path / "cache")
    assert first == again
    assert ctypes.CDLL(str(first)).answer() == 42
    assert (tmp_path / "runs").read_text().count("run") == 1
    assert first.with_suffix(".cpp").read_text() == SOURCE


def test_source_and_flags_and_compiler_are_in_the_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: Path
) -> None:
    paths = [host.build_shared_library(SOURCE, "portable", tmp_path)]
    paths.append(host.build_shared_library(SOURCE, "avx2", tmp_path))
    paths.append(host.build_shared_library(SOURCE.replace("42", "43"), "portable", tmp_path))
    monkeypatch.setenv("CXX", str(script))
    paths.append(host.build_shared_library(SOURCE, "portable", tmp_path))
    assert len(set(paths)) == 4


def test_two_builders_at_once_build_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: Path
) -> None:
    monkeypatch.setenv("CXX", str(script))
    with ThreadPoolExecutor(4) as pool:
        builds = [pool.submit(host.build_shared_library, SOURCE, "portable", tmp_path) for _ in range(4)]
        assert len({build.result() for build in builds}) == 1
    assert (tmp_path / "runs").read_text().count("run") == 1


def test_a_compile_error_shows_the_first_messages_and_leaves_no_library(tmp_path: Path) -> None:
    with pytest.raises(CodegenError, match=r"(?s)expected exit 0, got 1.*first messages:.*undeclared_thing"):
        host.build_shared_library("int f() { return undeclared_thing; }", "portable", tmp_path)
    assert not list(tmp_path.rglob("*.so"))
    assert [path.read_text() for path in tmp_path.rglob("*.failed.cpp")] == [
        "int f() { return undeclared_thing; }"
    ]


def test_unknown_features_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="expected one of avx512_bf16, avx512, avx2, portable, got 'neon'"):
        host.build_shared_library(SOURCE, "neon", tmp_path)


@pytest.mark.parametrize("level", host.LEVELS)
def test_flags_turn_the_level_s_macros_on(level: str) -> None:
    """Every level compiles here, whatever this CPU can run."""
    flags = [*host.BASE_FLAGS, *host.ARCH_FLAGS[level]]
    command = [*host.find_compiler(), *flags, "-dM", "-E", "-x", "c++", "/dev/null"]
    macros = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if platform.machine() == "x86_64":
        present = {
            name for name in ("__AVX2__", "__AVX512BW__", "__AVX512BF16__") if f"#define {name} " in macros
        }
        expected = {"avx512_bf16": 3, "avx512": 2, "avx2": 1, "portable": 0}[level]
        assert len(present) == expected
    assert "#define _OPENMP " in macros


def test_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "a"))
    assert host.cache_directory() == tmp_path / "a"
    monkeypatch.delenv("OCTAVO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert host.cache_directory() == tmp_path / "b" / "octavo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert host.cache_directory() == tmp_path / ".cache" / "octavo"
