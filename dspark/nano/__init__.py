"""How the shipped nano target is made: its problems, its tokenizer and its training recipe."""
