"""Runs the steps of a Dockerfile without Docker, in a root made by Debian's mmdebstrap.

A stage `FROM debian:SUITE-slim` begins with a new root; for any other base, the root of the stage
before is used. pip finds packages as on this machine. Needs root rights, and Linux.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

NEEDED = ("mmdebstrap", "unshare", "chroot", "ip")
"""Programs that this module needs."""

# A step sees the machine's network, the devices, and the folders from which pip installs.
_STEP = """
set -e
mount --make-rprivate /
mount -t proc proc "$ROOT/proc"
mount --rbind /dev "$ROOT/dev"
mount -t tmpfs -o mode=1777 tmpfs "$ROOT/dev/shm"
cp /etc/resolv.conf "$ROOT/etc/resolv.conf"
for place in $PLACES; do
    mkdir -p "$ROOT/run/host/$(dirname "$place")"
    if [ -d "$place" ]; then mkdir -p "$ROOT$place"; else touch "$ROOT/run/host/$place"; fi
    if [ -d "$place" ]; then mount --bind "$place" "$ROOT$place"; fi
    if [ -f "$place" ]; then mount --bind "$place" "$ROOT/run/host/$place"; fi
done
exec chroot "$ROOT" env -i "$@"
"""

# A container can write only to /dev/shm, and cannot reach the outside.
_CONTAINER = """
set -e
mount --make-rprivate /
mount --bind "$ROOT" "$ROOT"
mount -t proc proc "$ROOT/proc"
mount -t tmpfs -o mode=755,size=1m tmpfs "$ROOT/dev"
for device in null zero full random urandom; do
    touch "$ROOT/dev/$device"
    mount --bind "/dev/$device" "$ROOT/dev/$device"
done
mkdir "$ROOT/dev/shm"
mount -o remount,ro "$ROOT/dev"
mount -t tmpfs -o mode=1777,size="$SHM" tmpfs "$ROOT/dev/shm"
mount -o remount,ro,bind "$ROOT"
ip link set lo up
exec chroot --userspec="$RUN_AS:$RUN_AS" --groups= "$ROOT" env -i "$@"
"""


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction of a Dockerfile."""

    name: str
    """Name of the instruction, `RUN` for example."""
    argument: str
    """Text behind the name, on one line."""


def stages_of(dockerfile: str) -> dict[str, list[Step]]:
    """Stage name → steps of the stage; the first step is `FROM`, with the base alone."""
    stages: dict[str, list[Step]] = {}
    steps: list[Step] = []
    plain = [line for line in dockerfile.splitlines() if not line.startswith("#")]
    for line in "\n".join(plain).replace("\\\n", " ").splitlines():
        name, _, argument = line.strip().partition(" ")
        if name == "FROM":
            base, _, stage = argument.partition(" AS ")
            steps = stages[stage] = [Step(name, base)]
        elif name:
            steps.append(Step(name, " ".join(argument.split())))
    return stages


def pip_settings() -> tuple[dict[str, str], set[str]]:
    """The settings of this machine's pip as variables, and the files and folders in the
    settings.
    """
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    variables: dict[str, str] = {}
    for line in listed.splitlines():  # the environment's settings come first and win
        key, _, value = line.partition("=")
        name = "PIP_" + key.rpartition(".")[2].replace("-", "_").upper()
        variables.setdefault(name, " ".join(shlex.split(value)[0].split()))
    places = set()
    for name, value in variables.items():
        for word in value.split():
            # An index may lead to files beside it.
            path = Path(word.removeprefix("file://"))
            path = path.parent if word.startswith("file://") else path
            if path.is_absolute() and path.exists():
                places.add(str(path))
                if path.is_file():
                    variables[name] = value.replace(word, f"/run/host{word}")
    return variables, places


@dataclass
class Root:
    """A root file system with the results of a Dockerfile's steps."""

    folder: Path
    """Folder of the root file system."""
    context: Path
    """Folder from which `COPY` copies."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment of every process: `ENV`."""
    user: str = "0"
    """User of the container: `USER`."""
    command: list[str] = field(default_factory=list)
    """Command of the container: `CMD`."""

    def build(self, steps: list[Step]) -> None:
        """Runs the steps of a stage.

        Raises:
            CalledProcessError: a step failed; the step's output is on standard output.
            ValueError: this module does not know a step.
        """
        for step in steps:
            print(f"{step.name} {step.argument}", time.strftime("%X"), flush=True)
            getattr(self, f"_{step.name.lower()}", self._unknown)(step.argument)

    def _unknown(self, argument: str) -> None:
        raise ValueError(f"an unknown instruction of a Dockerfile before {argument!r}")

    def _from(self, base: str) -> None:
        suite = re.fullmatch(r"debian:(\w+)-slim", base)
        self.user, self.command = "0", []
        if suite is None:  # the current root plays the base
            self.environment = {"PATH": self.environment["PATH"]}
            return
        self.environment = {}
        if self.folder.exists():
            raise ValueError(f"FROM {base}: {self.folder} is there already")
        subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=minbase", suite[1], self.folder], check=True
        )

    def _arg(self, _argument: str) -> None:
        """Does nothing: pip's own settings replace the argument."""

    def _env(self, argument: str) -> None:
        self.environment |= dict(word.split("=", 1) for word in shlex.split(argument))

    def _expose(self, _argument: str) -> None:
        """Does nothing: the instruction only informs people."""

    def _user(self, argument: str) -> None:
        self.user = argument

    def _cmd(self, argument: str) -> None:
        self.command = json.loads(argument)

    def _copy(self, argument: str) -> None:
        *sources, target = argument.split()
        place = self.folder / target.lstrip("/")
        for source in sources:
            found = self.context / source
            if found.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(found, place, ignore=ignored, dirs_exist_ok=True)
                continue
            copied = place / found.name if target.endswith("/") else place
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(found, copied)

    def _run(self, argument: str) -> None:
        variables, places = pip_settings()
        self._start(
            _STEP,
            ["/bin/sh", "-c", argument],
            {"PATH": os.environ["PATH"], **variables, **self.environment},
            {"PLACES": " ".join(sorted(places))},
        ).check_returncode()

    def contain(
        self, command: list[str], *, shm: str = "64m", timeout_s: float = 300.0
    ) -> "subprocess.CompletedProcess[str]":
        """Runs a command as a container would: as the container's user, under a read-only root.

        Args:
            command: the command.
            shm: size of `/dev/shm`, the only writable folder.
            timeout_s: seconds after which the command is ended.
        """
        return self._start(
            _CONTAINER,
            command,
            {"HOME": "/", **self.environment},  # as for a user without an entry
            {"SHM": shm, "RUN_AS": self.user},
            "--net",
            timeout_s=timeout_s,
        )

    def _start(
        self,
        script: str,
        command: list[str],
        environment: dict[str, str],
        said: dict[str, str],
        *kinds: str,
        timeout_s: float = 900.0,
    ) -> "subprocess.CompletedProcess[str]":
        isolated = ["unshare", "--mount", "--pid", "--ipc", "--uts", *kinds]
        isolated += ["--fork", "--kill-child", "sh", "-c", script, "sh"]
        isolated += [f"{name}={value}" for name, value in environment.items()]
        ended = subprocess.run(
            [*isolated, *command],
            env={"PATH": os.environ["PATH"], "ROOT": str(self.folder), **said},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        print(ended.stdout, flush=True)
        return ended


def main() -> None:
    """Builds the stages of the Dockerfile beside this file, in the given folder."""
    here = Path(__file__).parent
    root = Root(Path(sys.argv[1]), here.parents[1])
    for steps in stages_of((here / "Dockerfile").read_text(encoding="utf-8")).values():
        root.build(steps)


if __name__ == "__main__":
    main()
