"""``kvferry bench``."""

from pathlib import Path

import typer

from kvferry.cli.calibration import calibrate
from kvferry.cli.console import make_console
from kvferry.errors import ConfigError, HostError
from kvferry.topology.machine_costs import default_costs_path


def bench(wanted: bool, output: Path | None) -> None:
    """Measures the machine's costs and writes them to a file.

    Raises:
        ConfigError: nothing to measure was asked for.
        HostError: the file cannot be written, or there is no room for the measurement.
    """
    if not wanted:
        raise ConfigError("nothing to measure: write `kvferry bench --calibrate`")
    console = make_console()
    found = calibrate(lambda text: console.print(text, markup=False, soft_wrap=True))
    path = output or default_costs_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(found.encode())
    except OSError as error:
        raise HostError(f"{path}: cannot be written: {error.strerror}") from error
    typer.echo(f"costs: {path}")
