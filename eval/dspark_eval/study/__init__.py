"""Studies: many short distillation runs that differ in one thing, and the table they give."""
