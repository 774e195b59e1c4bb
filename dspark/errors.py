"""The one exception that means "the input is wrong", as opposed to "dspark is wrong".

The command line prints it as a single line and exits with code 2; library callers catch it. Its
message says where (`file:line` if there is a file), what was expected, and what to do.
"""

from __future__ import annotations


class UserError(Exception):
    """A wrong file, option or configuration value, in one line for whoever gave it."""
