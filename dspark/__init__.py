"""dspark: distil, run and measure block drafters for large language models.

Nothing heavy is imported here: `import dspark` costs milliseconds, and each part loads what it
needs when it is used.
"""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
