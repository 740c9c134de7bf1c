"""`python -m ringmap`: the command line."""

from ringmap.cli import main

if __name__ == "__main__":
    main()
