"""dspark_eval: how well a drafter is accepted, and how much faster it makes its target.

`metrics` defines every number once; `bench` measures speed, `acceptance` measures acceptance per
prompt set; `plots` and `report` show both. The protocol is written down in eval/README.md.
"""
