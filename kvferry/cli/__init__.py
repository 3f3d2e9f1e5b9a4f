"""The ``kvferry`` command."""

__all__ = ["main"]


def main() -> None:
    """Entry point of the console script."""
    from kvferry.cli.app import run

    run()
