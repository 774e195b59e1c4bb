"""`python -m dspark`: the command line, whatever else on PATH is called dspark."""

from __future__ import annotations

from dspark.cli import main

if __name__ == "__main__":
    main()
