"""`python -m pipeflow` is the command `pipeflow`."""

from pipeflow.cli.__main__ import main

if __name__ == "__main__":
    main()
