"""`python -m disagg`."""

from disagg.cli import main

if __name__ == "__main__":
    main()
