"""One file per command of `dspark`: parse, call one function, print."""
