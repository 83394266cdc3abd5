"""`python -m disagg.cli`."""

from disagg.cli import main

if __name__ == "__main__":
    main()
