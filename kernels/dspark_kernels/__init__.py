"""The operations dspark spends its time in: one file per op, plain torch first."""
