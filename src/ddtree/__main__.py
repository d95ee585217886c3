"""`python -m ddtree` is the command `ddtree`."""

from ddtree.cli.main import main

if __name__ == "__main__":
    main()
