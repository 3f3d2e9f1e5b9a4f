"""``python -m kvferry.cli``."""

from kvferry.cli import main

if __name__ == "__main__":
    main()
