"""Drafters in the layouts of other tools: one file per layout, one meaning inside.

Inside there is only `DraftConfig` and the tensor names of `DSparkDrafter`. A layout is a reader and
a writer between its `config.json` and that configuration, and its names of the tensors.
"""
