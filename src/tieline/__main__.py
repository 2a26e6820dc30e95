"""`python -m tieline` is the command line."""

from tieline.cli import main

if __name__ == "__main__":
    main()
