"""Other ways to draft, judged by the same verdict and counted by the same records.

    plain            one token a step, no draft
    lookup           the text's own past (Saxena 2023)
    ar               a small causal LM (Leviathan et al. 2023; Chen et al. 2023)
    dflash           one block pass, no sequential head (DFlash)
    eagle3           one decoder layer that feeds on its own output (EAGLE-3; Li et al. 2025)

`base` says what a way to draft has to offer; one file each says what it does. `python -m
dspark_eval.baselines` trains the last three on the rows of a distillation run and makes the table.
"""
