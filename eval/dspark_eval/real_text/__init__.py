"""A study on real text: SmolLM2 answers public prompts, drafters learn from it and are measured."""
