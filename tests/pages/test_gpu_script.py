"""benchmarks/gpu.sh, rehearsed: every stage leaves what it should, whole, at its limit, and stopped from outside."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.suites import GPU

pytestmark = pytest.mark.slow  # `make test-all` runs it

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
STUB = Path(__file__).with_name("gpu_stub.py")
MOST_FILES, MOST_BYTES = 8, 16 * 2**20  # that come back from a lent machine
ALWAYS = {"gpu_log.txt", "gpu_summary.txt", "caches.tar.gz"}
FILES = {1: {"tests.xml", "smoke_cuda.csv", "sanitizer.txt"}, 3: {"training_cuda.csv"},
         2: {"kernels_cuda.csv", "host_cuda.csv", "profile.txt"}}  # fmt: skip
PYTHON = f"""#!/usr/bin/env bash
echo "$*" >>"$STUB_CALLS"
case "$*" in
  *torch.cuda.is_available*) exit 0 ;;
  "-c import fastdp.kernels") [ -e fastdp/kernels ] ;;
  "-c import fastdp._CUDA"*) [ -e fastdp/_CUDA.stub.so ] ;;
  "-c import fastdp._C"*) [ -e fastdp/_C.stub.so ] ;;
  "-c import opacus") [ -n "${{STUB_OPACUS:-}}" ] ;;
  "-m pip install "*) echo "$*" >>"$STUB_CALLS" ;;
  "setup.py"*) echo "FASTDP_CUDA=$FASTDP_CUDA"; echo C >fastdp/_C.stub.so
    if [ -z "${{STUB_NO_CUDA:-}}" ]; then echo CUDA >fastdp/_CUDA.stub.so; fi ;;
  *) exec {sys.executable} -S {STUB} "$@" ;;
esac
"""
SANITIZER = """#!/usr/bin/env bash
while [ "${1#--}" != "$1" ]; do
  case "$1" in --log-file) echo "ERROR SUMMARY: 0 errors" >"$2"; shift 2 ;; --report-api-errors | --error-exitcode) shift 2 ;; esac
done
exec "$@"
"""  # noqa: E501


def _hears_signals() -> None:
    """A shell cannot catch what was ignored when it began, as SIGINT is in what runs in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Device:
    """A tree with nothing but what the script looks at, and a PATH of stubs."""

    def __init__(self, folder: Path) -> None:
        self.tree, self.out, self.work = folder / "tree", folder / "out", folder / "work"
        self.calls, self.hangs, programs = folder / "calls", folder / "hangs", folder / "bin"
        for part in ("benchmarks", "csrc", "fastdp", "kernels"):
            (self.tree / part).mkdir(parents=True)
        shutil.copy(SCRIPT, self.tree / "benchmarks")
        (self.tree / "csrc" / "bind_cuda.cpp").write_text("// a source\n")
        (self.tree / "setup.py").write_text("")
        programs.mkdir()
        stubs = {"python3": PYTHON, "compute-sanitizer": SANITIZER, "nvcc": "#!/bin/sh\n"}
        for name, text in stubs.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        clean = {
            k: v
            for k, v in os.environ.items()
            if k not in ("OUT", "STAGES", "MODELS", "CONTENDERS", "PYTHON", "FASTDP_CUDA")
        }
        self.environment = clean | {
            "PATH": f"{programs}:{os.environ['PATH']}", "OUT": str(self.out), "GPU_WORK": str(self.work), "GRACE": "1",
            "STUB_CALLS": str(self.calls), "STUB_HANGS": str(self.hangs),
        }  # fmt: skip

    def start(self, call: int, mode: str = "", **settings: str) -> subprocess.Popen[str]:
        command = ["bash", str(self.tree / "benchmarks" / "gpu.sh"), *filter(None, [mode]), str(call)]
        return subprocess.Popen(command, env=self.environment | settings, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, start_new_session=True,
                                preexec_fn=_hears_signals)  # fmt: skip

    def run(self, call: int, mode: str = "", **settings: str) -> tuple[int, str]:
        process = self.start(call, mode, **settings)
        printed, _ = process.communicate(timeout=60)
        return process.returncode, printed

    def files(self) -> set[str]:
        found = list(self.out.iterdir())
        assert len(found) <= MOST_FILES and all(path.stat().st_size < MOST_BYTES for path in found)
        assert all(re.fullmatch(r"[\w.-]+", path.name) for path in found)
        return {path.name for path in found}

    def summary(self) -> str:
        return (self.out / "gpu_summary.txt").read_text()

    def cached(self) -> set[str]:
        with tarfile.open(self.out / "caches.tar.gz") as archive:
            return {Path(name).name for name in archive.getnames()}


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path)


# ---------------------------------------------------------------------- whole


@pytest.mark.parametrize("call", FILES)
def test_a_call_brings_all_its_files_back(call: int, device: Device) -> None:
    code, printed = device.run(call)
    assert code == 0, printed
    assert device.files() == ALWAYS | FILES[call]
    assert "passed" in device.summary() and not re.search("FAILED|out of time|no time|running", device.summary())
    stages = {1: "build info tests smoke sanitizer", 2: "build warm kernels host", 3: "build warm training"}[call]
    assert [line.split()[0] for line in device.summary().splitlines()[1:]] == stages.split()
    assert {"_C.stub.so", "_CUDA.stub.so"} <= device.cached()
    assert not (device.tree / "fastdp" / "kernels").exists()  # the link is gone
    assert "FASTDP_CUDA=1" in (device.out / "gpu_log.txt").read_text()
    if call > 1:
        assert "gram.cubin" in device.cached() and "gram.ttir" not in device.cached()
        order = device.calls.read_text()
        assert order.index(" warm ") < order.index("benchmarks.kernels" if call == 2 else "benchmarks.training")


def test_without_the_extension_nothing_else_runs_unless_asked_for(device: Device, tmp_path: Path) -> None:
    code, printed = device.run(1, STUB_NO_CUDA="1")
    assert code == 1 and "build      FAILED" in device.summary() and "nothing else is run" in printed, printed
    assert "passed" not in device.summary() and "pytest" not in device.calls.read_text()
    other = Device(tmp_path / "other")
    code, printed = other.run(1, STUB_NO_CUDA="1", FASTDP_CUDA="0", STAGES="build tests")
    assert code == 0 and other.summary().count("passed without fastdp._CUDA") == 2, printed


def test_caches_are_made_without_a_gpu(device: Device, tmp_path: Path) -> None:
    archive = tmp_path / "carried" / "caches.tar.gz"
    code, printed = device.run(3, mode="--prepare", CACHES=str(archive))
    assert code == 0, printed
    with tarfile.open(archive) as opened:
        assert {"_C.stub.so", "_CUDA.stub.so"} <= {Path(name).name for name in opened.getnames()}
    assert "pytest" not in device.calls.read_text()


def test_every_device_test_is_run() -> None:
    """Those that are left out everywhere else, as they need a GPU."""
    done = subprocess.run(["bash", str(SCRIPT), "--plan"], capture_output=True, text=True, check=True)
    needing = re.compile(r"skipif\(\s*not torch\.cuda\.is_available|^GPU = torch\.cuda\.is_available", re.M)
    found = {path for path in ROOT.glob("tests/**/test_*.py") if needing.search(path.read_text())}
    named = {ROOT / word for word in done.stdout.split() if word.endswith("device.py")}
    assert found <= named and ROOT / "tests/optim/test_graphed_device.py" in named, found - named


def test_caches_are_taken_again(device: Device, tmp_path: Path) -> None:
    device.run(3)
    carried = tmp_path / "carried.tar.gz"
    shutil.copy(device.out / "caches.tar.gz", carried)
    later = Device(tmp_path / "later")
    code, printed = later.run(2, CACHES=str(carried), STAGES="build kernels")
    assert code == 0, printed
    assert "setup.py" not in later.calls.read_text() and (later.work / "triton" / "k0" / "gram.cubin").exists()
    changed = Device(tmp_path / "changed")  # of other sources the extensions are built anew
    (changed.tree / "csrc" / "bind_cuda.cpp").write_text("// another source\n")
    changed.run(2, CACHES=str(carried), STAGES="build kernels")
    assert "setup.py" in changed.calls.read_text()


# ---------------------------------------------------------------------- cut short

STAGES = {
    "tests": (1, "pytest", "tests.xml"), "sanitizer": (1, "sanitizer", "sanitizer.txt"),
    "kernels": (2, "benchmarks.kernels", "kernels_cuda.csv"), "host": (2, "host", "profile.txt"),
    "training": (3, "benchmarks.training", "training_cuda.csv"),
}  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_at_its_limit_has_written_its_file(stage: str, device: Device) -> None:
    call, program, file = STAGES[stage]
    code, printed = device.run(call, STAGES=f"build {stage}", STUB_SLOW=program, SECONDS_IN_ALL="4")
    assert code == 1 and "out of time" in printed, printed
    assert "out of time" in device.summary()
    assert device.files() >= ALWAYS | {file}
    assert (device.out / file).read_text() and "line 1" in (device.out / "gpu_log.txt").read_text()
    if stage == "tests":  # SIGINT came through, and the report was written; of two tests
        assert ElementTree.parse(device.out / file).getroot()[0].get("tests") == "2"


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda sent: sent.name)
def test_stopped_from_outside(sent: signal.Signals, device: Device) -> None:
    call, program, file = STAGES["training"]
    process = device.start(call, STUB_SLOW=program)
    for _ in range(300):
        if device.hangs.exists():
            break
        time.sleep(0.1)
    os.kill(process.pid, sent)
    printed, _ = process.communicate(timeout=30) if sent != signal.SIGKILL else ("", process.wait())
    _end_what_is_left(device)
    assert device.files() >= ALWAYS | {file}
    assert "_C.stub.so" in device.cached()  # a whole archive, of the stage before or of this one
    assert len((device.out / file).read_text().splitlines()) == 2  # rows as they came
    assert f"{program}: line 1" in (device.out / "gpu_log.txt").read_text()
    words = "running, or stopped" if sent == signal.SIGKILL else "stopped from outside"
    assert words in device.summary() and "build" in device.summary()
    if sent != signal.SIGKILL:
        assert process.returncode == 130 and "stopped from outside" in printed


def _end_what_is_left(device: Device) -> None:
    """Programs that outlive the script (SIGKILL leaves no time to end them), by what they have for an environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"STUB_HANGS={device.hangs}".encode() in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)
        except (OSError, ProcessLookupError):
            continue


# ---------------------------------------------------------------------- the plan


def test_limits_of_a_call_fit_into_its_time() -> None:
    for call in range(1, 7):
        done = subprocess.run(["bash", str(SCRIPT), "--plan", str(call)], capture_output=True, text=True, check=True)
        limits = [int(n) for n in re.findall(r"at most (\d+) s", done.stdout)]
        # a build that the caches spare, and stages that end before their limit, leave room for a little more
        assert sum(limits) <= 720 and limits, (call, limits)
    assert subprocess.run(["bash", str(SCRIPT), "9"], capture_output=True).returncode == 2


def test_models_of_all_calls_are_those_of_the_suite() -> None:
    named = re.findall(r'^  \d\) stages=".*training" models="([\w,-]+)"', SCRIPT.read_text(), re.M)
    assert sorted(",".join(named).split(",")) == sorted(GPU) and named[0] == "gpt2-large,llama-lora"


def test_every_module_and_option_that_it_names_is_there() -> None:
    """A stub takes whatever it is told: the real commands must take the options, too."""
    lines = SCRIPT.read_text().replace("\\\n", "").splitlines()
    for module in ("kernels", "training", "device", "smoke"):
        mine = [line.partition(f"-m benchmarks.{module} ")[2].partition("|")[0] for line in lines]
        used = {option for line in mine for option in re.findall(r"(?<!\w)--[a-z-]+", line)}
        command = [sys.executable, "-m", f"benchmarks.{module}", "--help"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0 and used and not {o for o in used if o not in done.stdout}, (module, used)
