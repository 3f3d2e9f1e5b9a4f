"""What tells one host, and one PID namespace of it, from another."""

from pathlib import Path


def boot_id() -> str:
    """Random per start of the host; containers have their host's."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> str:
    """The PID namespace of this process, unique on a host: process ids mean nothing in another."""
    return str(Path("/proc/self/ns/pid").readlink())
